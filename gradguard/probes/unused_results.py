"""Results that nothing has used: what is computed of parameters, and dies before any other call has read it.

`p = 0.9 * p + 0.1 * q` binds a name and changes no parameter. Whatever the program calls its variables and however it goes over its
parameters, such a result is made by an operation that works element by element, becomes the operand of no other call, and is freed.

Only calls that read a Parameter are followed (or its `.data`, its `.grad`, what `detach()` and `state_dict()` give). What they read
beside it may have been made of another tensor alone, such as `0.9 * shadow[name]`: then that tensor is the operand. A call that makes
something of a followed result alone passes it on: of `(0.9 * p + 0.1 * q).to(p.dtype)` the last result is the one that counts. Results
are held weakly, and so is their memory, which another tensor may have taken over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradguard.core.callsite import USER_FILES, CallSite, user_frame
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import variables_of
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.probes.op_table import DATA, DETACH, is_elementwise
from gradguard.torch_compat.private_api import has_memory, quiet, version_of

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_PLAIN = (_Tensor, _Parameter)
_MOST = 4_096  # results followed at once
_MOST_UNUSED = 1_024  # results that were found unused, between two looks
_MOST_MADE = 256  # tensors remembered that were made of one other each
_OPERANDS = 6
_VALUES, _AT_ONE_LINE = 4, 3  # values of each tensor that are compared, results of one line of which that is done between two looks
_COPYING = frozenset({"clone", "to", "float", "double", "half", "bfloat16", "detach", "__deepcopy__"})
_in_backward = getattr(torch._C, "_current_graph_task_id", None)

Stack = tuple[CallSite, ...]


class Operand(NamedTuple):
    """A tensor that a result was computed from, and its version then."""

    ref: TensorRef
    version: int


class Unused(NamedTuple):
    """A result that was computed, and freed without any call having read it.

    Attributes:
        stack: the user's frames around the last call that made it, innermost first; as far as one calls the next itself.
        operands: the tensors that it was computed from, as far as they were not computed on the way.
        leaf: the one among them whose gradient is another.
        values: a few values of the result and of each operand, in the order of `operands`; empty where they were not looked at.
        names: the variables of the innermost frame that were operands; like `values`, of the first results of a line.
    """

    stack: Stack
    operands: tuple[Operand, ...]
    leaf: TensorRef | None
    values: tuple[tuple[float, ...], ...]
    names: tuple[str | None, ...]


class _Followed(NamedTuple):
    ref: TensorRef
    memory: StorageWeakRef
    result: Unused | None  # None: it is no result but another view of its one operand
    operands: tuple[Operand, ...]


class UnusedResults:
    """Follows results from call to call.

    Attributes:
        open: what is followed, by id of the tensor.
        read: what the call under way has among its arguments of that.
    """

    PART = "record of unused results"

    def __init__(self) -> None:
        self.open: dict[int, _Followed] = {}
        self.read: list[_Followed] = []
        self._unused: list[Unused] = []
        self._looked_at: dict[Stack, int] = {}
        self._made: dict[int, tuple[TensorRef, Operand]] = {}  # tensors that were made of one other, none of which is followed

    def settle(self, going_on: bool = True) -> list[Unused]:
        """The results that were freed unused since the last call.

        Args:
            going_on: whether calls are seen from here on as well; else what is alive may be used unseen, and is forgotten.
        """
        for key, each in list(self.open.items()):
            if each.ref() is None:
                del self.open[key]
                self._freed(each)
        if not going_on:
            self.open.clear()
        self._looked_at.clear()
        self._made.clear()
        found, self._unused = self._unused, []
        if not going_on:
            self._unused = found  # nobody has asked for them
            return []
        return found

    def _freed(self, each: _Followed) -> None:
        if each.result is not None and each.memory.expired() and len(self._unused) < _MOST_UNUSED:  # type: ignore[no-untyped-call]
            self._unused.append(each.result)

    def use(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """A call begins: what it reads is used."""
        self.read = []
        pending: list[Any] = [*args, *kwargs.values()] if kwargs else list(args)
        for value in pending:
            if isinstance(value, _Tensor):
                known = self.open.get(id(value))
                if known is not None and known.ref() is value:
                    self.read.append(known)
                    if known.result is not None:
                        del self.open[id(value)]
            elif type(value) in (list, tuple):
                pending.extend(value)
            elif type(value) is dict:
                pending.extend(value.values())

    def note(self, kind: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, frame: Any) -> None:
        """A call has returned that reads what is followed, or a Parameter."""
        read, self.read = self.read, []
        if not read and not kind & DETACH and kind != DATA and not is_elementwise(func):
            return
        if not args or (kwargs and "out" in kwargs):
            return
        if _in_backward is not None and _in_backward() != -1:  # a hook's result goes to the engine
            return
        try:
            self._note(kind, func, args, result, frame, read)
        except internal_error():  # tensors without a storage or a version: sparse ones, those of torch.func, of inference mode
            return

    def _note(self, kind: int, func: Any, args: tuple[Any, ...], result: Any, frame: Any, read: list[_Followed]) -> None:
        if kind & DETACH or kind == DATA:
            if type(result) is _Tensor and result is not args[0]:
                self._alias(result, args[0], read)
            return
        if type(result) in (list, tuple):  # `torch._foreach_add(ours, theirs)`
            if is_elementwise(func):
                for i, each in enumerate(result):
                    rows = tuple(arg[i] if type(arg) in (list, tuple) and i < len(arg) else arg for arg in args)
                    self._result(func, rows, each, frame, read)
            return
        self._result(func, args, result, frame, read)

    def made(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """A call without a node has returned that reads nothing of what is followed: of which one tensor its result was made."""
        if type(result) is not _Tensor or not args:
            return
        tensors = [arg for arg in args if isinstance(arg, _Tensor) and arg is not result]
        if len(tensors) != 1 or type(tensors[0]) is not _Tensor or result is args[0]:
            return
        if not (is_elementwise(func) or getattr(func, "__name__", "") in _COPYING):
            return
        of = tensors[0]
        try:
            if of.shape != result.shape:
                return
            operand = self._made_of(of) or Operand(TensorRef(of), of._version)
        except internal_error():  # tensors without a shape or a version: nested ones, those of inference mode
            return
        if len(self._made) >= _MOST_MADE:
            self._made.pop(next(iter(self._made)))
        self._made[id(result)] = (TensorRef(result), operand)

    def _made_of(self, tensor: Any) -> Operand | None:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def gradient(self, result: Any) -> None:
        """`.grad` was read."""
        if type(result) is _Tensor and id(result) not in self.open and result.layout == torch.strided:
            self._alias(result, result, [])

    def _alias(self, result: Any, of: Any, read: list[_Followed]) -> None:
        """The same memory by another name."""
        known = next((each for each in read if each.ref() is of), None)
        if known is not None and known.result is not None:  # of a computed result: it is what counts now
            self._add(result, known.result, known.operands)
        elif known is not None:
            self._add(result, None, known.operands)
        elif type(of) in _PLAIN and (of is result or type(of) is _Parameter) and (version := version_of(of)) is not None:
            self._add(result, None, (Operand(TensorRef(of), version),))

    def _result(self, func: Any, args: tuple[Any, ...], result: Any, frame: Any, read: list[_Followed]) -> None:
        if type(result) not in _PLAIN or not result.is_floating_point():
            return
        tensors = [arg for arg in args if isinstance(arg, _Tensor)]
        known = {id(tensor): each for tensor in tensors for each in read if each.ref() is tensor}
        if len(tensors) == 1 and known:
            if result.numel() != tensors[0].numel():
                return
        elif not is_elementwise(func):
            return
        operands: dict[int, Operand] = {}
        for tensor in tensors:
            if tensor.shape != result.shape:
                if not tensor.dim():
                    continue  # a number
                return
            each = known.get(id(tensor))
            if each is not None:
                operands.update((id(operand.ref()), operand) for operand in each.operands)
            elif type(tensor) in _PLAIN and (of := self._made_of(tensor)) is not None:
                operands[id(of.ref())] = of
            elif type(tensor) in _PLAIN and tensor is not result:
                if (version := version_of(tensor)) is None:
                    return
                operands[id(tensor)] = Operand(TensorRef(tensor), version)
        if result is args[0] and id(result) not in known and self._made_of(result) is None:
            return  # it writes into what is there
        if not 0 < len(operands) <= _OPERANDS or any(each.ref() is result for each in operands.values()):
            return
        if _aliases(known, result):
            return
        stack = _stack(frame)
        if stack:
            alive = [each for operand in operands.values() if (each := operand.ref()) is not None]
            leaf = next((leaf for leaf in alive if leaf.requires_grad and leaf.is_leaf and any(leaf.grad is each for each in alive)), None)
            first = 1 < len(alive) == len(operands) and self._is_among_first(stack, alive)
            values = _values(result, alive) if first and leaf is None else ()
            names = _names(frame, alive) if first else ()
            unused = Unused(stack, tuple(operands.values()), None if leaf is None else TensorRef(leaf), values, names)
            self._add(result, unused, unused.operands)

    def _add(self, tensor: Any, result: Unused | None, operands: tuple[Operand, ...]) -> None:
        key = id(tensor)
        before = self.open.pop(key, None)
        if before is not None and before.ref() is None:
            self._freed(before)
        if len(self.open) >= _MOST:
            self.open.pop(next(iter(self.open)))
        self.open[key] = _Followed(TensorRef(tensor), StorageWeakRef(tensor.untyped_storage()), result, operands)  # type: ignore[no-untyped-call]

    def _is_among_first(self, stack: Stack, operands: list[Any]) -> bool:
        """Whether this is one of the first results computed here between two looks, and computed from a Parameter."""
        if not any(type(each) is _Parameter for each in operands):
            return False
        count = self._looked_at[stack] = self._looked_at.get(stack, 0) + 1
        return count <= _AT_ONE_LINE


def _values(result: Any, operands: list[Any]) -> tuple[tuple[float, ...], ...]:
    """A few values of a result and of its operands."""
    if any(not has_memory(each) or each.layout != torch.strided for each in (result, *operands)):
        return ()
    if result.is_cuda and torch.cuda.is_current_stream_capturing():
        return ()
    try:
        with quiet(), torch.no_grad():
            return tuple(_few(each) for each in (result, *operands))
    except internal_error():
        return ()


def _names(frame: Any, operands: list[Any]) -> tuple[str | None, ...]:
    """What the user's function that is running calls the operands."""
    caller = user_frame(frame)
    held = {} if caller is None else variables_of(caller)
    return tuple(next((name for name, value in held.items() if value is each), None) for each in operands)


def _few(tensor: Any) -> tuple[float, ...]:
    flat = tensor.detach().reshape(-1)
    return tuple(flat[:: max(1, flat.numel() // _VALUES)][:_VALUES].double().tolist())


def _aliases(known: dict[int, _Followed], result: Any) -> bool:
    """Whether a call has written, in place, into another view of what is followed: `p.data.mul_(0.9)`."""
    each = known.get(id(result))
    return each is not None and each.result is None


def _stack(frame: Any) -> Stack:
    """The user's frames from a torch call outwards, up to the first that other code calls; grad mode's decorators are looked through."""
    files, found = USER_FILES, list[CallSite]()
    while frame is not None and not files[frame.f_code.co_filename]:
        frame = frame.f_back
    while frame is not None and len(found) < 6:
        if files[frame.f_code.co_filename]:
            found.append(CallSite(frame.f_code, frame.f_lasti))
        elif not frame.f_code.co_filename.endswith("_contextlib.py"):
            break
        frame = frame.f_back
    return tuple(found)
