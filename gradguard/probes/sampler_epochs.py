"""The passes of each DistributedSampler, and whether its order changes: it is made from the seed, and the epoch that `set_epoch` sets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler

from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import peek
from gradguard.instrumentation.fault_barrier import say
from gradguard.probes.listeners import local

_PASSES = 3  # in one order, with steps in each: the first two may be a look at the data, and training


class Pass(NamedTuple):
    """One pass over a sampler.

    Attributes:
        order: the seed and the epoch.
        step: the training step before it.
        session: whose step that is.
    """

    order: tuple[int, int]
    step: int
    session: int


_passes: weakref.WeakKeyDictionary[Any, list[Pass]] = weakref.WeakKeyDictionary()
repeated: list[weakref.ref[Any]] = []  # samplers that gave the same order at each of their last passes, until a rule has looked


def install(divert: Callable[..., None]) -> None:
    """Diverts the method that makes the order."""
    divert(DistributedSampler, "__iter__", _iterated)


def _iterated(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any) -> Any:
        session: Any = local.listener
        if session is not None and type(self) is DistributedSampler:
            try:
                _note(self, session)
            except internal_error() as fault:
                say("the record of samplers", "one that repeats its order is not told", fault)
        return original(self)

    return guarded


def _note(sampler: Any, session: Any) -> None:
    order = (peek(sampler, "seed", None), peek(sampler, "epoch", None))
    if peek(sampler, "shuffle", None) is not True or any(type(each) is not int for each in order):
        return
    found = _passes.setdefault(sampler, [])
    now = Pass(order, session.steps_so_far(), id(session))
    if found and (found[-1].order != order or found[-1].session != now.session or found[-1].step >= now.step):
        found.clear()
    found.append(now)
    if len(found) == _PASSES:
        repeated.append(weakref.ref(sampler))
