"""The op probe: a function mode that sees every torch call of a traced step.

It records which call made which graph nodes (by sequence number), who wrote in place, and where values lost their path to
the graph. Everything dear is left for the failure: an ordinary differentiable call costs one tuple.

Why a function mode and no saved-tensor hooks: what was saved, at which version and in which memory can be read from the
live graph *after* a failure (`torch_internals.saved_slots`), so nothing has to stand between autograd and its saved
tensors. PyTorch's own version checks, `ctx.saved_tensors` identity, `save_on_cpu`, checkpointing, `torch.func` and
users' own hooks work as without the guard, because nothing of theirs is touched.

Why a function mode and not replaced in-place methods: only a mode sees the calls that cut a path (`detach`, comparisons,
casts, anything under no_grad) and what is made from their results. The price is measured in tests/benchmarks/overhead.py.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradguard.callsite import USER_FILES, CallSite, user_frame
from gradguard.journal import Cut, EscapeFact, Journal, ModeFact, WriteFact
from gradguard.probes.contents import Contents
from gradguard.probes.op_kinds import (
    ADDEND,
    DATA,
    DETACH,
    ESCAPE,
    FLAG,
    GRAD,
    MODE,
    PLAIN,
    REWRAP,
    SET_DATA,
    SKIP,
    TOGGLE,
    WRITE,
    Kinds,
    asked_in_place,
)
from gradguard.torch_internals import (
    numpy_reachable,
    quiet,
    sequence_number,
    storage_key,
)

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


class OpProbe(TorchFunctionMode):
    """Watches the torch calls of one thread and writes to its journal.

    Args:
        journal: where facts go.
        on_failure: called with (exception, func, args, kwargs) when a torch call raises; may raise a diagnosis in its place.
        on_fault: called when gradguard's own bookkeeping fails; training goes on.
    """

    def __init__(self, journal: Journal, on_failure: Failure, on_fault: Fault) -> None:
        super().__init__()
        self.journal = journal
        self.on_failure = on_failure
        self.on_fault = on_fault
        self.contents = "numpy"  # whose contents are compared: "none", "numpy" (what numpy can write) or "all"
        self.locate: Locate | None = None  # level forensic: looks at every result
        self.prints = Contents(journal)
        self._append = journal.ops.append
        self._tick = journal.tick
        self.live = True  # False: hands everything through, where it cannot be taken off the stack (within a call it sees)
        self._escaped_in = -1  # the step in which a value with a lost path last left for Python or numpy

    def rebind(self) -> None:
        """The journal has new lists."""
        self._append = self.journal.ops.append

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if _is_compiling() or not self.live:
            return func(*args, **(kwargs or _NO_KWARGS))
        kind = _KINDS[func]
        if kind == SKIP:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kind == GRAD:
            if USER_FILES[sys._getframe(1).f_code.co_filename]:
                self.journal.grad_reads += 1
            return func(*args)
        if kind == SET_DATA:
            return self._set_data(func, args)
        if kind & FLAG:
            kind = kind & ~FLAG | WRITE if asked_in_place(args, kwargs) else kind & ~FLAG
        before = sequence_number()
        watched = None
        if kind & WRITE or (kwargs and "out" in kwargs):
            watched = _versions(args, kwargs)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            self.on_failure(error, func, args, kwargs or _NO_KWARGS)
            raise
        hush = None
        try:
            locate = self.locate
            if locate is not None or (types and types[0] is not _Tensor):
                hush = quiet()  # a subclass with a `__torch_function__` of its own, or a mode, must not see our questions
                hush.__enter__()
                if locate is not None:
                    locate(self.journal, func, args, kwargs, result)
            after = sequence_number()
            if after != before:
                frame: FrameType | None = sys._getframe(1)
                files = USER_FILES
                while frame is not None and not files[frame.f_code.co_filename]:
                    frame = frame.f_back
                if frame is not None:
                    self._append((before, after, frame.f_code, frame.f_lasti, func, self._tick()))
                numpy_storages = self.journal.numpy_storages
                for arg in args:
                    if isinstance(arg, _Tensor):
                        if not arg.requires_grad:
                            self._gradless_operand(kind, before, after, arg)
                        elif numpy_storages and storage_key(arg) in numpy_storages:
                            self._note_contents(arg, before, after)
                    elif kind & ADDEND and isinstance(arg, float):
                        if self._escaped_in == self.journal.step and before not in self.journal.partial:
                            self.journal.remember_partial(before, ())  # a number that may be a loss term: told from the source
                    elif kind & ADDEND and type(arg) in (list, tuple):
                        for item in arg:
                            if isinstance(item, _Tensor) and not item.requires_grad:
                                self._gradless_operand(kind, before, after, item)
                if watched is not None:
                    self._writes(func, watched)
                if self.contents == "all":
                    self.prints.note_saved(args, result, before, after)
                if type(result) is not _Tensor and isinstance(result, tuple):
                    self._side_results(before, func, result)
            elif kind == PLAIN and not self.journal.has_cuts and _grad_enabled():
                # the bulk of gradless calls (data preparation, metrics) has nothing to remember
                if _any_requires_grad(args):
                    self._cut(kind, func, args, kwargs, result)
            else:
                self._gradless(kind, func, args, kwargs, result, watched)
        except Exception as fault:
            self.on_fault(fault)
        finally:
            if hush is not None:
                hush.__exit__(None, None, None)
        return result

    # -- calls that made no node --------------------------------------------------------------------------------------

    def _gradless(
        self, kind: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, watched: list[tuple[Any, int]] | None
    ) -> None:
        if watched is not None:
            self._writes(func, watched)
        if kind & MODE:
            self._mode_switch(args)
        elif kind & TOGGLE:
            self._toggle(func, args)
        elif kind & ESCAPE:
            self._escape(func, args, result)
        elif kind == DATA:
            self._data(args[0], result)
        else:
            self._cut(kind, func, args, kwargs, result)

    def _cut(self, kind: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """Remembers on a gradless result where its inputs' path ended, or inherits their memories."""
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [out for out in outputs if isinstance(out, _Tensor) and (not out.requires_grad or kind & REWRAP)]
        if len(tensors) < len(outputs) and len(outputs) > 1:  # each result from an input of its own (broadcast_tensors): nothing was cut
            tensors = [out for out in tensors if not out.is_floating_point()]
        if kind & WRITE and result is None and args and isinstance(args[0], _Tensor) and not args[0].requires_grad:
            tensors = [args[0]]  # `buffer[i] = value` gives nothing back
        if not tensors:
            return
        attached, origins, leaves = self._inputs(args, kwargs)
        journal = self.journal
        guess = False
        if kind & REWRAP and not attached and not origins:
            origins, guess = self._recovered(args)
        if not attached and not origins:
            return
        frame = user_frame(sys._getframe(2))
        site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
        name = _name(func)
        if attached:
            live = _grad_enabled()
            cause = _cut_kind(kind, live, tensors[0])
            mode = journal.modes[-1] if cause in ("no_grad", "inference") and journal.modes else None
            drawn_from = _sampled_distribution(sys._getframe(2)) if cause in ("no_grad", "nondiff") else None
            if cause == "no_grad" and getattr(drawn_from, "has_rsample", False):
                cause = "sample"
            outer = user_frame(frame.f_back) if frame is not None else None
            cut = Cut(
                cause,
                self._tick(),
                site,
                name,
                sequence_number(),
                tuple(attached),
                mode,
                (),
                None if outer is None else CallSite(outer.f_code, outer.f_lasti),
                tuple(leaves),
                _around(outer) if cause == "inference" else (),
            )
            cut.drawn = drawn_from is not None and cause != "sample"
            if origins:
                cut = Cut("rewrap", cut.clock, site, name, cut.seq, (), None, _merge([(cut,), *origins]))
        else:
            cut = Cut("rewrap", self._tick(), site, name, sequence_number(), (), None, _merge(origins), guess=guess)
        for out in tensors:
            journal.remember_cut(out, cut)

    def _side_results(self, before: int, func: Any, result: Any) -> None:
        """The indices that `x.max(dim=1)` gives beside the values: no derivative leads through them."""
        cut = None
        for out in result:
            if isinstance(out, _Tensor) and not out.requires_grad and not out.is_floating_point():
                if cut is None:
                    frame = user_frame(sys._getframe(2))
                    site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
                    cut = Cut("nondiff", self._tick(), site, _name(func), before, (before,))
                self.journal.remember_cut(out, cut)

    def _toggle(self, func: Any, args: tuple[Any, ...]) -> None:
        """`requires_grad_(value)` or `.requires_grad = value`."""
        if not args or not isinstance(args[0], _Tensor):
            return
        frame = user_frame(sys._getframe(3))
        self.journal.remember_toggle(args[0], args[0].requires_grad, None if frame is None else CallSite(frame.f_code, frame.f_lasti))

    def _inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[list[int], list[tuple[Cut, ...]], list[weakref.ref[torch.Tensor]]]:
        """The graph nodes behind the inputs that have one (-1 for a leaf), the memories of those that had, and the leaves."""
        attached: list[int] = []
        origins: list[tuple[Cut, ...]] = []
        leaves: list[weakref.ref[torch.Tensor]] = []
        cut_of = self.journal.cut_of
        for tensor in _tensors(args, kwargs):
            if tensor.requires_grad:
                node = tensor.grad_fn
                if node is None and tensor._base is not None:  # a view made under no_grad still says that it requires grad
                    tensor = tensor._base
                    node = tensor.grad_fn
                attached.append(-1 if node is None else node._sequence_nr())
                leaf = tensor if node is None else _only_leaf(node)
                if leaf is not None:
                    leaves.append(weakref.ref(leaf))
            else:
                cut = cut_of(tensor)
                if cut is not None:
                    origins.append(cut.roots())
        return attached, origins, leaves

    def _recovered(self, args: tuple[Any, ...]) -> tuple[list[tuple[Cut, ...]], bool]:
        """Memories of Python numbers and arrays that a new tensor is made of: they left through item(), numpy() ...

        The second is True where the values themselves prove nothing: then it is only what left last, in this step.
        """
        escapes = self.journal.escapes
        if not escapes or not args:
            return [], False
        numbers = _numbers(args[0])
        if numbers:
            recent = islice(reversed(escapes), _ESCAPES_SEARCHED)
            found = list(islice((fact.cut.roots() for fact in recent if fact.cut is not None and _same_number(fact.value, numbers)), 4))
            if found:
                return found, False
        elif type(args[0]).__module__ != "numpy":
            return [], False
        return [fact.cut.roots() for fact in list(escapes)[-8:] if fact.cut is not None and fact.step == self.journal.step], True

    def _escape(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        source = args[0] if args else None
        if not isinstance(source, _Tensor):
            return
        name = _name(func)
        journal = self.journal
        storage = None
        if name in ("numpy", "__array__"):
            storage = storage_key(source)
            if storage is not None:
                self._note_contents(source, 0, sequence_number())
                journal.numpy_storages[storage] = self._tick()
                if len(journal.numpy_storages) > journal.limits.calls:
                    journal.numpy_storages.popitem(last=False)
        if name == "__bool__":
            return
        frame = user_frame(sys._getframe(2))
        site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
        cut = journal.cut_of(source)
        if source.requires_grad:
            node = source.grad_fn
            mode = journal.modes[-1] if not _grad_enabled() and journal.modes else None
            cut = Cut(
                "escape",
                self._tick(),
                site,
                name,
                sequence_number(),
                (-1 if node is None else node._sequence_nr(),),
                mode,
                leaves=(weakref.ref(source),) if node is None else (),
            )
        if cut is not None:
            self._escaped_in = journal.step
        value = result if isinstance(result, (int, float, complex)) else (tuple(result) if name == "tolist" and _is_flat(result) else None)
        array = None if storage is None else weakref.ref(result)
        frame_id = 0 if frame is None else id(frame)
        journal.escapes.append(EscapeFact(self._tick(), name, site, value, cut, storage, frame_id, journal.step, array))

    def _data(self, source: Any, result: Any) -> None:
        journal = self.journal
        aliases = journal.data_aliases
        aliases[id(result)] = weakref.ref(result)
        if len(aliases) > journal.limits.writes:
            aliases.popitem(last=False)
        if source.requires_grad:
            frame = user_frame(sys._getframe(2))
            site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
            node = source.grad_fn
            outer = None if frame is None else user_frame(frame.f_back)
            journal.remember_cut(
                result,
                Cut(
                    "data",
                    self._tick(),
                    site,
                    "data",
                    sequence_number(),
                    (-1 if node is None else node._sequence_nr(),),
                    outer=None if outer is None else CallSite(outer.f_code, outer.f_lasti),
                    leaves=(weakref.ref(source),) if node is None else (),
                ),
            )
        else:
            cut = journal.cut_of(source)
            if cut is not None:
                journal.remember_cut(result, cut)

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
                version = tensor._version
            self.journal.data_writes += 1
            self.journal.writes.append(
                WriteFact(self._tick(), sequence_number(), storage, version, site, "data", "data", None, _grad_enabled(), caller)
            )
        except Exception as fault:
            self.on_fault(fault)
        return result

    def _mode_switch(self, args: tuple[Any, ...]) -> None:
        enabled = bool(args[0]) if args else True
        frame: FrameType | None = sys._getframe(2)
        decorated: CodeType | None = None
        via = "set_grad_enabled"
        inner = frame
        while inner is not None and not USER_FILES[inner.f_code.co_filename]:
            owner = inner.f_locals.get("self") if inner.f_code.co_name in ("__enter__", "__exit__") else None
            if owner is not None:
                via = type(owner).__name__
            if inner.f_code.co_filename.endswith("_contextlib.py") and decorated is None:
                wrapped = inner.f_locals.get("func")
                decorated = getattr(wrapped, "__code__", None)
            inner = inner.f_back
        site = None if inner is None else CallSite(inner.f_code, inner.f_lasti)
        self.journal.modes.append(ModeFact(self._tick(), enabled, site, decorated, via))

    # -- writes and contents ------------------------------------------------------------------------------------------

    def _writes(self, func: Any, watched: list[tuple[Any, int]]) -> None:
        for tensor, version in watched:
            now = tensor._version
            if now == version:
                continue
            storage = storage_key(tensor)
            if storage is None:
                continue
            frame: FrameType | None = sys._getframe(2)
            module: weakref.ref[Any] | None = None
            while frame is not None and not USER_FILES[frame.f_code.co_filename]:
                if module is None and frame.f_code.co_name == "forward":
                    owner = frame.f_locals.get("self")
                    if isinstance(owner, torch.nn.Module):
                        module = weakref.ref(owner)
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
                    _name(func),
                    "data" if unseen else "op",
                    module,
                    _grad_enabled(),
                    None if outer is None else CallSite(outer.f_code, outer.f_lasti),
                )
            )

    def _note_contents(self, tensor: Any, before: int, after: int) -> None:
        with quiet():
            self.prints.note(tensor, before, after)

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

    def _gradless_operand(self, kind: int, before: int, after: int, tensor: Any) -> None:
        journal = self.journal
        if journal.has_cuts:
            cut = journal.cut_of(tensor)
            if cut is not None:
                self._fed(kind, before, cut)
        if kind & ADDEND and before not in journal.partial and self._escaped_in == journal.step and not tensor.dim():
            journal.remember_partial(before, ())  # it may have been made of numbers or arrays, which carry no memory
        if self.contents == "numpy" and numpy_reachable(tensor):
            self._note_contents(tensor, before, after)

    def _fed(self, kind: int, seq: int, cut: Cut) -> None:
        """A value that had lost its path goes into a differentiable call."""
        journal = self.journal
        roots = cut.roots()
        if kind & ADDEND:
            journal.remember_partial(seq, _merge([journal.partial.get(seq, ()), roots]))
        else:
            journal.remember_fed(seq, _merge([journal.fed.get(seq, ()), roots]))
        for origin in roots:
            if origin.kind == "sample" and not origin.scored and _is_scoring(sys._getframe(3)):
                origin.scored = True


_DISTRIBUTIONS = os.sep + os.path.join("torch", "distributions") + os.sep


def _sampled_distribution(frame: FrameType | None) -> Any:
    """The torch distribution whose `sample()` the call comes from, if it does."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    for _ in range(4):
        if frame is None or _DISTRIBUTIONS not in frame.f_code.co_filename:
            return None
        if frame.f_code.co_name == "sample":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _is_scoring(frame: FrameType | None) -> bool:
    """Whether the call comes from a distribution's `log_prob`, or the like."""
    for _ in range(6):
        if frame is None or _DISTRIBUTIONS not in frame.f_code.co_filename:
            return False
        if frame.f_code.co_name in ("log_prob", "cdf", "icdf"):
            return True
        frame = frame.f_back
    return False


def _only_leaf(node: Any) -> Any:
    """The leaf that a value is a plain function of (`scale.exp()`), through at most five nodes with one input each."""
    for _ in range(5):
        following = [source for source, _ in node.next_functions if source is not None]
        if len(following) != 1:
            return None
        node = following[0]
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return leaf
    return None


def _around(frame: FrameType | None, most: int = 6) -> tuple[CallSite, ...]:
    """The user frames from here outwards."""
    found: list[CallSite] = []
    while frame is not None and len(found) < most:
        if USER_FILES[frame.f_code.co_filename]:
            found.append(CallSite(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _same_number(value: Any, numbers: set[Any]) -> bool:
    return value in numbers if not isinstance(value, tuple) else any(item in numbers for item in value)


def _cut_kind(kind: int, live: bool, out: Any) -> Any:
    if not live:
        return "inference" if torch.is_inference_mode_enabled() else "no_grad"
    if kind & DETACH:
        return "detach"
    if kind & REWRAP:
        return "rewrap"
    return "nondiff" if not out.is_floating_point() and not out.is_complex() else "detach" if kind & DETACH else "nondiff"


def _name(func: Any) -> str:
    name = getattr(func, "__name__", None) or str(func)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def _merge(origins: list[tuple[Cut, ...]]) -> tuple[Cut, ...]:
    """Distinct origins in argument order, at most eight: a running average must not grow a history."""
    seen: dict[int, Cut] = {}
    for group in origins:
        for cut in group:
            seen.setdefault(id(cut), cut)
    merged = list(seen.values())
    if len(merged) > 8:
        keep = sorted(merged, key=lambda cut: cut.clock)[-8:]
        merged = [cut for cut in merged if cut in keep]
    return tuple(merged)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    found = []
    for arg in args:
        if isinstance(arg, _Tensor):
            found.append(arg)
        elif type(arg) in (list, tuple):
            for item in arg:
                if isinstance(item, _Tensor):
                    found.append(item)
                elif type(item) in (list, tuple):
                    found.extend(x for x in item if isinstance(x, _Tensor))
    if kwargs:
        found.extend(value for value in kwargs.values() if isinstance(value, _Tensor))
    return found


def _any_requires_grad(args: tuple[Any, ...]) -> bool:
    for arg in args:
        if isinstance(arg, _Tensor):
            if arg.requires_grad:
                return True
        elif type(arg) in (list, tuple):
            for item in arg:
                if isinstance(item, _Tensor) and item.requires_grad:
                    return True
    return False


def _version(tensor: Any) -> int:
    if type(tensor) is _Tensor or type(tensor) is _Parameter:
        return int(tensor._version)
    with quiet():  # a subclass with a `__torch_function__` of its own must not see the question
        return int(tensor._version)


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[Any, int]] | None:
    """The tensors a call may write with their versions before it: its first argument, a list there, and `out`."""
    found = []
    try:
        for target in (args[0] if args else None, kwargs.get("out") if kwargs else None):
            if isinstance(target, _Tensor):
                found.append((target, _version(target)))
            elif isinstance(target, (list, tuple)):
                found.extend((item, _version(item)) for item in target if isinstance(item, _Tensor))
    except Exception:  # inference tensors have no version
        return None
    return found or None


def _numbers(value: Any, limit: int = 256) -> set[Any]:
    """The floats in a (nested) list; small integers prove nothing and are left out."""
    found: set[Any] = set()
    stack = [value]
    while stack and len(found) < limit:
        item = stack.pop()
        if isinstance(item, float):
            if item not in (0.0, 1.0, -1.0):
                found.add(item)
        elif type(item) in (list, tuple):
            stack.extend(item[:limit])
    return found


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 256 and all(isinstance(item, (int, float)) for item in value)
