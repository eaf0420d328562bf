"""The op probe: a function mode that sees every torch call of a traced step.

It records which call made which graph nodes (by sequence number), who wrote in place, and where values lost their path to
the graph. Everything dear is left for the failure: an ordinary differentiable call costs one tuple.

Why a function mode and no saved-tensor hooks: what was saved, at which version and in which memory can be read from the
live graph *after* a failure (`torch_internals.saved_slots`), so nothing has to stand between autograd and its saved
tensors. PyTorch's own version checks, `ctx.saved_tensors` identity, `save_on_cpu`, checkpointing, `torch.func` and
users' own hooks work as without the guard, because nothing of theirs is touched.

Why a function mode and not replaced in-place methods: only a mode sees the calls that cut a path (`detach`, comparisons,
casts, anything under no_grad) and what is made from their results. The price, in loops of steps, as median ratios to bare loops
(tests/benchmarks/mode_or_methods.py; torch 2.13, one CPU thread):

    workload           mode that does nothing   replaced methods   this probe (off within optimizers)
    tiny MLP, AdamW    x1.68                    x1.13              x1.74
    conv net           x1.03                    x1.02              x1.07
    transformer        x1.06                    x1.01              x1.05
    LSTM, 50 steps     x1.10                    x1.02              x1.26
    500 tiny ops       x1.25                    x0.96              x1.63

So replaced methods would be cheaper where a step is all overhead, and no dearer where it is not; they would see writes only.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradguard.core.callsite import USER_FILES, CallSite, user_frame
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import function_code, variables_of
from gradguard.instrumentation.facts import CallableRef, ModeFact, Region, SelfWrite, WriteFact
from gradguard.instrumentation.fingerprints import fingerprint
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.probes.broadcasts import PAIRING, Columns, note_spread, note_spread_loss
from gradguard.probes.call_arguments import any_requires_grad, call_name, region_written, versions_of
from gradguard.probes.loss_inputs import LOSSES, LossInputs
from gradguard.probes.lost_paths import LostPaths
from gradguard.probes.op_table import (
    ADDEND,
    COLUMN,
    DATA,
    ESCAPE,
    FACTOR,
    FLAG,
    GATHER,
    GRAD,
    LOSS,
    MODE,
    PLAIN,
    SET_DATA,
    SKIP,
    STRANGE,
    TOGGLE,
    WRITE,
    Kinds,
    asked_in_place,
)
from gradguard.probes.saved_contents import Contents
from gradguard.probes.unused_results import UnusedResults
from gradguard.probes.wrapped_functions import asked_by
from gradguard.torch_compat.private_api import quiet, sequence_number, storage_key, storage_ref, version_of

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_KINDS = Kinds()
_NO_KWARGS: dict[str, Any] = {}
_ESCAPES_SEARCHED = 256  # for the number a new tensor is made of; all 4,096 would take milliseconds

Fault = Callable[[BaseException], None]
Locate = Callable[[Journal, Any, tuple[Any, ...], dict[str, Any] | None, Any], None]
Failure = Callable[[BaseException, Any, tuple[Any, ...], dict[str, Any]], None]


def _reads_parameter(args: tuple[Any, ...]) -> bool:
    """Whether a call's first, second or last argument is a Parameter, or its first a list of them."""
    first = args[0]
    if type(first) is list and first:
        first = first[0]
    return type(first) is _Parameter or type(args[-1]) is _Parameter or (len(args) > 2 and type(args[1]) is _Parameter)


class OpProbe(TorchFunctionMode):
    """Watches the torch calls of one thread and writes to its journal.

    Args:
        journal: where facts go.
        on_failure: called with (exception, func, args, kwargs) when a torch call raises; may raise a diagnosis in its place.
        on_fault: called when gradguard's own bookkeeping fails; training goes on.
    """

    HIDDEN = True  # from who counts the function modes (`torch_internals.users_modes`)

    def __init__(self, journal: Journal, on_failure: Failure, on_fault: Fault) -> None:
        super().__init__()
        self.journal = journal
        self.on_failure = on_failure
        self.on_fault = on_fault
        self.locate: Locate | None = None  # level forensic: looks at every result
        self.prints = Contents(journal)
        self.lost = LostPaths(journal, self.prints)
        self.losses = LossInputs(journal)
        self.columns = Columns()
        self.results = UnusedResults()
        journal.unused_results = self.results.settle
        self._append = journal.ops.append
        self._tick = journal.tick
        self.live = True  # False: hands everything through, where it cannot be taken off the stack (within a call it sees)

    def rebind(self) -> None:
        """The journal has new lists."""
        self._append = self.journal.ops.append

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            kind = _KINDS[func]
            if kind & STRANGE:
                func = asked_by(func, sys._getframe(1))
                kind = _KINDS[func]
                if kind & ~STRANGE in (SKIP, GRAD, SET_DATA):
                    kind &= ~STRANGE
        except internal_error() as fault:
            self.on_fault(fault)
            kind = SKIP
        if _is_compiling() or not self.live:
            return func(*args, **(kwargs or _NO_KWARGS))
        if kind & MODE:
            return self._mode_call(func, args, kwargs or _NO_KWARGS)
        if self.results.open and not (kind == SKIP and func.__name__ == "__get__"):
            try:
                self.results.use(args, kwargs)
            except internal_error() as fault:
                self.on_fault(fault)
        if kind == SKIP:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kind == GRAD:
            result = func(*args)
            if USER_FILES[sys._getframe(1).f_code.co_filename]:
                self.journal.grad_reads += 1
                try:
                    self.results.gradient(result)
                except internal_error() as fault:
                    self.on_fault(fault)
            return result
        if kind == SET_DATA:
            return self._set_data(func, args)
        before = sequence_number()
        watched: list[tuple[Any, Any]] | None = None
        try:
            if kind & FLAG:
                kind = kind & ~FLAG | WRITE if asked_in_place(args, kwargs) else kind & ~FLAG
            if kind & WRITE or (kwargs and "out" in kwargs):
                watched = versions_of(args, kwargs)
                if watched and self.journal.data_aliases:
                    watched = self._with_marks(watched)
        except internal_error() as fault:
            self.on_fault(fault)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except internal_error() as error:  # the call's own
            self.on_failure(error, func, args, kwargs or _NO_KWARGS)
            raise
        try:
            if self.locate is not None or (types and types[0] is not _Tensor):
                with quiet():  # a subclass with a `__torch_function__` of its own, or a mode, must not see our questions
                    if self.locate is not None:
                        self.locate(self.journal, func, args, kwargs, result)
                    self._returned(kind, before, watched, func, args, kwargs, result)
            else:
                self._returned(kind, before, watched, func, args, kwargs, result)
        except internal_error() as fault:
            self.on_fault(fault)
        return result

    def _returned(
        self,
        kind: int,
        before: int,
        watched: list[tuple[Any, Any]] | None,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
    ) -> None:
        """A call has returned: notes the nodes that it made, what it wrote, and what lost its path in it."""
        after = sequence_number()
        strange = kind & STRANGE
        kind ^= strange
        if kind & COLUMN:
            kind &= ~COLUMN
            if after == before:
                self.columns.note(func, args, result)
        if kind & GATHER:
            self.lost.gathered(func, args, kwargs or _NO_KWARGS)
        if self.results.read or (args and _reads_parameter(args)):
            self.results.note(kind, func, args, kwargs, result, sys._getframe(2))
        elif after == before:
            self.results.made(func, args, result)
        if after != before:
            frame: FrameType | None = sys._getframe(2)
            files = USER_FILES
            while frame is not None and not files[frame.f_code.co_filename]:
                frame = frame.f_back
            if frame is not None:
                self._append((before, after, frame.f_code, frame.f_lasti, CallableRef(func) if strange else func, self._tick()))
                if kind & LOSS:
                    self._loss(func, args, kwargs or _NO_KWARGS, result, (before, after), frame)
            numpy_storages = self.journal.numpy_storages
            for arg in args:
                if isinstance(arg, _Tensor):
                    if not arg.requires_grad:
                        self.lost.operand(kind, before, after, arg)
                        if kind & (ADDEND | FACTOR) and len(args) == 2:
                            note_spread(self.journal, self.columns, func, args, result, before)
                    elif numpy_storages and storage_key(arg) in numpy_storages:
                        self.prints.note_quietly(arg, before, after)
                elif kind & ADDEND and isinstance(arg, float):
                    if self.lost.escaped_in == self.journal.step:
                        self.lost.number(before, arg)
                elif kind & ADDEND and type(arg) in (list, tuple):
                    for item in arg:
                        if isinstance(item, _Tensor) and not item.requires_grad:
                            self.lost.operand(kind, before, after, item)
            if watched is not None:
                self._writes(func, args, watched)
            if self.prints.whose == "all":
                self.prints.note_saved(args, result, before, after)
            if type(result) is _Tensor:
                if not result.requires_grad:  # `x.argsort()`: sorted inside, and only the indices come out
                    self.lost.side_results(before, func, (result,), args, kwargs)
            elif isinstance(result, tuple):
                self.lost.side_results(before, func, result, args, kwargs)
        elif kind & ~(FACTOR | LOSS) == PLAIN and not self.journal.has_cuts and _grad_enabled():
            # the bulk of gradless calls (data preparation, metrics) has nothing to remember
            if any_requires_grad(args):
                self.lost.cut(kind, func, args, kwargs, result)
        else:
            self._gradless(kind, func, args, kwargs, result, watched)

    def _loss(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, nodes: tuple[int, int], frame: FrameType
    ) -> None:
        name = call_name(func)
        if name in PAIRING:
            note_spread_loss(self.journal, func, args, kwargs, result, sys._getframe(3))
        if name in LOSSES:
            self.losses.look(func, args, kwargs, nodes, frame.f_code, frame.f_lasti)

    # -- calls that made no node --------------------------------------------------------------------------------------

    def _gradless(
        self, kind: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, watched: list[tuple[Any, Any]] | None
    ) -> None:
        if watched is not None:
            self._writes(func, args, watched)
        if kind & TOGGLE:
            self._toggle(func, args)
        elif kind & ESCAPE:
            self.lost.escape(func, args, result)
        elif kind == DATA:
            self.lost.data(args[0], result)
        else:
            self.lost.cut(kind, func, args, kwargs, result)

    def _toggle(self, func: Any, args: tuple[Any, ...]) -> None:
        """`requires_grad_(value)` or `.requires_grad = value`."""
        if not args or not isinstance(args[0], _Tensor):
            return
        frame = user_frame(sys._getframe(3))
        self.journal.remember_toggle(args[0], args[0].requires_grad, None if frame is None else CallSite(frame.f_code, frame.f_lasti))

    def _set_data(self, func: Any, args: tuple[Any, ...]) -> Any:
        """`p.data = other`: whoever saved `p` itself finds the other memory, under the old version number."""
        tensor = args[0]
        before = storage_key(tensor)
        result = func(*args)
        try:
            storage = storage_key(tensor)
            frame = user_frame(sys._getframe(2))
            if storage is None or storage == before or frame is None:
                return result
            outer = user_frame(frame.f_back)
            site, caller = CallSite(frame.f_code, frame.f_lasti), None if outer is None else CallSite(outer.f_code, outer.f_lasti)
            with quiet():
                version = version_of(tensor) or 0
            self.journal.data_writes += 1
            self.journal.writes.append(
                WriteFact(
                    self._tick(), sequence_number(), storage, version, site, "data", "data", None, _grad_enabled(), caller,
                    memory=storage_ref(tensor),
                )
            )  # fmt: skip
        except internal_error() as fault:
            self.on_fault(fault)
        return result

    def _mode_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Grad mode is switched: noted while it is on, so that an exception from outside that comes meanwhile does not leave it off."""
        enabled = not args or args[0] is not False
        try:
            if not enabled:
                self._mode_switch(enabled)
        except internal_error() as fault:
            self.on_fault(fault)
        result = func(*args, **kwargs)
        try:
            if enabled:
                self._mode_switch(enabled)
        except internal_error() as fault:
            self.on_fault(fault)
        return result

    def _mode_switch(self, enabled: bool) -> None:
        frame: FrameType | None = sys._getframe(2)
        decorated: CodeType | None = None
        via = "set_grad_enabled"
        inner = frame
        while inner is not None and not USER_FILES[inner.f_code.co_filename]:
            owner = variables_of(inner).get("self") if inner.f_code.co_name in ("__enter__", "__exit__") else None
            if owner is not None:
                via = type(owner).__name__
            if inner.f_code.co_filename.endswith("_contextlib.py") and decorated is None:
                decorated = function_code(variables_of(inner).get("func"))
            inner = inner.f_back
        site = None if inner is None else CallSite(inner.f_code, inner.f_lasti)
        self.journal.modes.append(ModeFact(self._tick(), enabled, site, decorated, via))

    # -- writes and contents ------------------------------------------------------------------------------------------

    def _with_marks(self, watched: list[tuple[Any, int]]) -> list[tuple[Any, Any]]:
        """With the contents of what shares its memory through `.data`: a write that changes nothing there spoils nothing."""
        with quiet():
            return [(tensor, (version, fingerprint(tensor)) if self._is_data_alias(tensor) else version) for tensor, version in watched]

    def _writes(self, func: Any, args: tuple[Any, ...], watched: list[tuple[Any, Any]]) -> None:
        if len(args) > 1 and isinstance(args[0], _Tensor) and isinstance(args[1], _Tensor) and args[0] is not args[1]:
            self._into_itself(func, args[0], args[1])
        for tensor, version in watched:
            mark = None
            if type(version) is tuple:
                version, mark = version
            now = tensor._version
            if now == version:
                continue
            storage = storage_key(tensor)
            if storage is None:
                continue
            if mark is not None:
                with quiet():
                    if fingerprint(tensor) == mark:
                        continue
            frame: FrameType | None = sys._getframe(2)
            module: weakref.ref[Any] | None = None
            while frame is not None and not USER_FILES[frame.f_code.co_filename]:
                if module is None and frame.f_code.co_name == "forward":
                    owner = variables_of(frame).get("self")
                    if isinstance(owner, torch.nn.Module):
                        module = UncountedRef(owner)
                frame = frame.f_back
            outer = user_frame(frame.f_back) if frame is not None else None
            unseen = self._is_data_alias(tensor)
            self.journal.data_writes += unseen
            self.journal.writes.append(
                WriteFact(
                    self._tick(),
                    sequence_number(),
                    storage,
                    now,
                    None if frame is None else CallSite(frame.f_code, frame.f_lasti),
                    call_name(func),
                    "data" if unseen else "op",
                    module,
                    _grad_enabled(),
                    None if outer is None else CallSite(outer.f_code, outer.f_lasti),
                    region_written(func, args, tensor) if unseen else None,
                    (Region.of(tensor), mark) if mark is not None else None,
                    storage_ref(tensor),
                )
            )

    def _into_itself(self, func: Any, target: Any, operand: Any) -> None:
        """Notes a write whose operand is the same memory by another tensor."""
        storage = storage_key(target)
        if storage is None or storage != storage_key(operand) or target.layout != torch.strided or operand.layout != torch.strided:
            return
        if not target.is_nested and target.shape == operand.shape and target.storage_offset() == operand.storage_offset():
            caller = user_frame(sys._getframe(3))
            site = None if caller is None else CallSite(caller.f_code, caller.f_lasti)
            previous = next((write.func for write in reversed(self.journal.writes) if write.storage == storage), None)
            self.journal.self_writes.append(SelfWrite(TensorRef(target), storage, site, call_name(func), previous))

    def _is_data_alias(self, tensor: Any) -> bool:
        aliases = self.journal.data_aliases
        if not aliases:
            return False
        for candidate in (tensor, tensor._base):
            if candidate is not None:
                ref = aliases.get(id(candidate))
                if ref is not None and ref() is candidate:
                    return True
        return False
