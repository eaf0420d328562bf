"""Running statistics that are still the initial ones: of batch norms that run in eval mode, whose parameters follow a trained network's.

A mean teacher or target network is moved over `parameters()`; buffers are none. The parameters of such a batch norm change between two
looks at it, and no optimizer has them; its own count of batches is zero and its statistics are those that it was made with.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.safe_read import in_training, parameters_in, store_of, variables_of
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.findings import Finding, TraceNext
from gradguard.monitors.tensor_state import few_values
from gradguard.torch_compat.private_api import storage_key

if TYPE_CHECKING:
    from gradguard.monitors.view import View

_APART = 3  # steps between two looks at one module
_MOST_LOOKS = 12  # the gap doubles with each
_MOST = 256
_MOST_SAID = 4


@dataclass(frozen=True, eq=False)
class InitialStatistics(Finding):
    """A batch norm whose parameters have moved normalises with the statistics that it was made with.

    Attributes:
        root: the outermost module around it that was called and of which no optimizer trains anything.
        site: the user's line that called that.
    """

    CODE = "GG609"

    module: weakref.ref[nn.Module]
    root: weakref.ref[nn.Module]
    site: CallSite


@dataclass
class _Seen:
    """One module with untouched statistics; `values` are those of its parameters at the first look."""

    ref: weakref.ref[nn.Module]
    values: list[list[float]]
    due: int
    looks: int = 0
    moved_at: int | None = None  # the steps at which it was seen that they have moved


def untouched(module: Any) -> bool:
    """Whether a norm's running statistics look as they did when it was made: its count, and a few of its values."""
    buffers = store_of(module, "_buffers")
    mean, var, count = (buffers.get(name) for name in ("running_mean", "running_var", "num_batches_tracked"))
    if mean is None or var is None or count is None or (mean.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    means, variances = few_values(mean), few_values(var)
    return few_values(count) == [0.0] and bool(means) and not any(means) and all(each == 1.0 for each in variances)


def _untrained(module: nn.Module, frame: FrameType | None, trained: set[int]) -> tuple[nn.Module, FrameType | None]:
    """The outermost module whose call we are in and of which nothing is trained, and the user's frame that called it."""
    caller = user_frame(frame)
    while frame is not None:
        if frame.f_code is _CALL:
            owner = variables_of(frame).get("self")
            if not isinstance(owner, nn.Module) or any(id(p) in trained for p in parameters_in(owner)):
                break
            module, caller = owner, user_frame(frame)
        frame = frame.f_back
    return module, caller


_CALL = getattr(nn.Module._call_impl, "__code__", None)


class Statistics:
    """The norms of a run whose statistics were untouched when they were first looked at."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen | weakref.ref[nn.Module]] = {}  # a bare reference: there is nothing to look for
        self._said: set[CallSite] = set()

    def runs(self, module: nn.Module, frame: FrameType | None, view: View) -> Iterator[Finding]:
        """A module runs in eval mode."""
        if not isinstance(module, _NormBase) or len(self._said) >= _MOST_SAID:
            return
        known = self._seen.get(id(module))
        if isinstance(known, weakref.ref) and known() is module:
            return
        if not isinstance(known, _Seen) or known.ref() is not module:
            if self._note(module, view):
                yield TraceNext(None)
            return
        if view.steps < known.due or not self._moved(module, known, view):
            return
        root, caller = _untrained(module, frame, view.trained_ids())
        if caller is None or known.moved_at is None:
            return
        weight = storage_key(next(iter(store_of(module, "_parameters").values())))
        if view.steps < known.moved_at + _APART and not (weight and view.journal.writes_to(weight, view.began_at)):
            known.due = view.steps + 1
            if view.steps == known.moved_at:  # the line that writes them shows in a traced step
                yield TraceNext(None)
            return
        self._seen[id(module)] = known.ref
        site = CallSite(caller.f_code, caller.f_lasti)
        if site not in self._said:
            self._said.add(site)
            yield InitialStatistics(None, known.ref, UncountedRef(root), site)

    def survey(self, module: nn.Module, view: View) -> bool:
        """Notes a norm that may run later. Is it one whose parameters have moved, and that now stands in eval mode?"""
        if not isinstance(module, _NormBase):
            return False
        known = self._seen.get(id(module))
        if known is None or (known.ref if isinstance(known, _Seen) else known)() is not module:
            self._note(module, view)
            return False
        if not isinstance(known, _Seen) or in_training(module) or not self._moved(module, known, view):
            return False
        known.due = view.steps  # at its next call
        return True

    def _note(self, module: nn.Module, view: View) -> bool:
        parameters = list(store_of(module, "_parameters").values())
        ids = view.trained_ids()
        wanted = bool(parameters) and not any(id(p) in ids for p in parameters) and untouched(module)
        if len(self._seen) >= _MOST:
            self._seen.clear()
        ref: weakref.ref[nn.Module] = UncountedRef(module)
        self._seen[id(module)] = _Seen(ref, [few_values(p) for p in parameters], view.steps + _APART) if wanted else ref
        return wanted

    def _moved(self, module: nn.Module, known: _Seen, view: View) -> bool:
        """Whether the parameters have moved since the first look, and the statistics have not."""
        known.looks += 1
        known.due = view.steps + (_APART << known.looks)
        ids, parameters = view.trained_ids(), list(store_of(module, "_parameters").values())
        if known.looks > _MOST_LOOKS or any(id(p) in ids for p in parameters) or not untouched(module):
            self._seen[id(module)] = known.ref
            return False
        if [few_values(p) for p in parameters] == known.values:
            return False
        if known.moved_at is None:
            known.moved_at = view.steps
        return True
