"""Level forensic: looks at the result of every torch call for NaN and infinity, and notes the call that made the first.

Also where there is no gradient and so no graph to ask later: data preparation, targets, statistics, masks. What is computed
from a non-finite value inherits the memory of where it came from, by storage, as cut paths do.

The look is a sum (a NaN or infinity among the terms shows in it), counted exactly only where the sum is not finite.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.facts import NonfiniteFact
from gradguard.instrumentation.journal import Journal
from gradguard.torch_compat.private_api import jit_tracing, own_part, storage_key, storage_ref

_MOST = 1_024


def note_nonfinite(journal: Journal, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
    """Notes in the journal whether this call made, or carries on, non-finite values. Never raises; no mode may be on."""
    if jit_tracing():  # what is asked of a tensor there goes into the traced program
        return
    for out in result if type(result) in (tuple, list) else (result,):
        if isinstance(out, torch.Tensor):
            try:
                _look(journal, func, args, kwargs, out)
            except internal_error():  # tensors of odd kinds do not answer
                continue


def all_finite(values: torch.Tensor) -> bool:
    """Whether all elements of a detached strided tensor are finite: by their sum, and one by one only where the sum is not."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def _look(journal: Journal, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: torch.Tensor) -> None:
    if not out.is_floating_point() or out.is_nested or not out.numel() or out.layout != torch.strided:
        return
    out = own_part(out).detach()
    finite = all_finite(out)
    if finite and not journal.nonfinite:
        return
    key = storage_key(out)
    if finite or key is None:
        journal.nonfinite.pop(key or 0, None)  # this memory is another tensor's now
        return
    origin = _inherited(journal, args, kwargs)
    if origin is None:
        frame = user_frame(sys._getframe(3))
        nan = int(torch.isnan(out).sum())
        bad = int((~torch.isfinite(out)).sum())
        name = str(getattr(func, "__name__", func))
        site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
        origin = NonfiniteFact(journal.tick(), journal.step, site, name, nan, bad - nan, out.numel())
    journal.nonfinite[key] = origin._replace(memory=storage_ref(out))
    if len(journal.nonfinite) > _MOST:
        journal.nonfinite.popitem(last=False)


def _inherited(journal: Journal, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> NonfiniteFact | None:
    """The memory of the operands, the oldest; infinities given as plain numbers are this call's own doing."""
    found: list[NonfiniteFact] = []
    pending: list[Any] = [*args, *(kwargs or {}).values()]
    for value in pending:
        if isinstance(value, torch.Tensor):
            fact = journal.nonfinite_of(value)
            if fact is not None and value.is_floating_point() and not bool(torch.isfinite(own_part(value).detach()).all()):
                found.append(fact)
        elif type(value) in (tuple, list):
            pending.extend(item for item in value[:64] if isinstance(item, torch.Tensor))
    return min(found, key=lambda fact: fact.clock) if found else None
