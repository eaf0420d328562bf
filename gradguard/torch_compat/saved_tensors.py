"""Saved values: what stands for them under gradguard's hooks, and how they are read in older releases.

**Hooks.** While any saved-tensor hook is on, PyTorch checks no versions. So what gradguard's pack hook returns, a
`Packed`, remembers the version, and its unpack hook repeats PyTorch's checks in PyTorch's words: those of the release at hand, read from
errors that it raises (`_specimen`). The hooks stand at the bottom of the thread's stack, so that those of the program win wherever it has
any, and a `with` of the program's that ends pops its own.

**Older releases** (2.10 and older; seen in 2.4, 2.8 and their stubs) have a `SavedTensor` that does not show the tensor it
holds. There a value can be had by unpacking only. That compares versions, as backward does, and runs the hook that holds the value, if one
does; nothing tells whether one does. So values are unpacked only where no `saved_tensors_hooks` was entered since the guard began:
checkpointing, which would compute its block again, and offloading both do.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradguard.core.foreign_exceptions import internal_error

SHOWN = hasattr(torch._C._autograd.SavedTensor, "data")

_hooks_entered = False


def install(divert: Callable[..., None]) -> None:
    """Has it noted where hooks are entered."""
    if not SHOWN:
        divert(saved_tensors_hooks, "__enter__", _enter)


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any) -> Any:
        global _hooks_entered
        _hooks_entered = True
        return original(self)

    return guarded


def may_unpack(node: Any) -> bool:
    """Whether unpacking a node's values runs no code but PyTorch's own and gradguard's."""
    return not SHOWN and (not _hooks_entered or bool(packed_of(node)))


class Unpacked:
    """Stands for a slot of a node: `data` unpacks it.

    Args:
        node: the graph's.
        name: of its attribute with the unpacked value.
        index: of a list of values; None of a single one.
    """

    __slots__ = ("_index", "_name", "_node")

    def __init__(self, node: Any, name: str, index: int | None = None) -> None:
        self._node = node
        self._name = name
        self._index = index

    @property
    def data(self) -> torch.Tensor | None:
        """The tensor.

        Raises:
            RuntimeError: it was modified or freed, as PyTorch tells it.
        """
        with _peeking():
            value = getattr(self._node, self._name)
        if self._index is not None:
            value = value[self._index]
        return value if isinstance(value, torch.Tensor) else None


# -- gradguard's own hooks ------------------------------------------------------------------------------------------------

_autograd: Any = torch._C._autograd
_top: Callable[[bool], Any] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)  # since 2.8
_BACKWARD = re.compile(r"Backward\d*$")


class Packed:
    """Stands for a saved tensor under gradguard's hooks; dies when the graph lets the saved value go.

    Attributes:
        tensor: the saved tensor, as PyTorch keeps it: an input is the object itself, an output is without its graph, which would keep
            itself alive.
        version: when it was saved.
        name, output: of an output, the name of its node and which output of it. Of an input `name` is None.
        made: the number of the node that had made it; -1 where there is none.
        had_node: whether it is an input that had a graph node.
        in_place: of a view that was written in place, whether the node named `name` is still there, and else the name of its operation.
        fact: what the probe has noted.
        gone: told of the fact when this dies.
        hook: the unpack hook of the program's that holds the value, and what its pack hook returned, after `register_hooks`.
    """

    __slots__ = ("__weakref__", "fact", "gone", "had_node", "hook", "in_place", "made", "name", "output", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int, name: str | None, output: int, made: int) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = version
        self.name = name
        self.output = output
        self.made = made
        self.had_node = made >= 0 and name is None
        self.in_place: Callable[[], str | None] | None = None
        self.fact: Any = None
        self.gone: Callable[[Any], None] | None = None
        self.hook: tuple[Callable[[Any], Any], Any] | None = None

    @property
    def data(self) -> torch.Tensor | None:
        """The tensor, as `SavedTensor.data` is."""
        return self.tensor

    def verdict(self) -> str | None:
        """PyTorch's words where it would refuse the value."""
        try:
            if self.tensor is not None:
                _check(self, self.tensor)
        except internal_error(RuntimeError) as error:
            return str(error)
        return None

    def __del__(self) -> None:
        if self.gone is not None and self.fact is not None:
            self.gone(self.fact)


def unpack(packed: Any) -> Any:
    """The unpack hook.

    Raises:
        RuntimeError: what PyTorch raises of a saved tensor that was modified or detached in place.
    """
    if type(packed) is not Packed:
        return packed
    if packed.fact is not None:
        packed.fact.used = True
    if packed.hook is not None:
        return packed.hook[0](packed.hook[1])
    tensor = packed.tensor
    if _thread.peeking:
        return tensor
    if type(tensor) not in _PLAIN or _function_modes():
        with _no_torch_function():
            _check(packed, tensor)
    else:
        _check(packed, tensor)
    return tensor


class _Thread(threading.local):
    peeking = False
    packed: Callable[[Any], list[Packed]] | None = None


_thread = _Thread()


@contextmanager
def _peeking() -> Iterator[None]:
    """A block in which gradguard's unpack hook gives what it holds, unchecked."""
    before, _thread.peeking = _thread.peeking, True
    try:
        yield
    finally:
        _thread.peeking = before


def look_up_with(packed_of: Callable[[Any], list[Packed]]) -> None:
    """Has `packed_of` asked, in this thread, for what a node has saved and does not show."""
    _thread.packed = packed_of


def packed_of(node: Any) -> list[Packed]:
    """What a node of this thread has saved, as far as gradguard's hooks have seen it and the node still holds it."""
    return [] if _thread.packed is None else _thread.packed(node)


def _check(packed: Packed, tensor: Any) -> None:
    if packed.had_node and tensor.grad_fn is None:
        raise RuntimeError(_DETACHED)
    if tensor._version != packed.version:
        try:
            text = _words(packed, tensor)
        except internal_error():
            text = _WORDS
        raise RuntimeError(text)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
_no_torch_function: Any = torch._C.DisableTorchFunction


def _words(packed: Packed, tensor: torch.Tensor) -> str:
    """What PyTorch says of a saved tensor that was modified: what it says of one of the same kind that was made for that, with this one's
    sizes, operation and versions."""
    text, kind = _specimen(tensor) or (_WORDS, str(tensor.type()))
    name = packed.name if packed.in_place is None else packed.in_place()
    if packed.name is None and tensor.grad_fn is not None:
        name = tensor.grad_fn.name()
    if name is not None and "ExpBackward0" not in text:  # since 2.13 the operation is named, before the node was
        name = _BACKWARD.sub("", name)
    before, after = text.split("[", 1)[0], text.split(_VERSIONS, 1)[1]
    sizes = tensor._nested_tensor_size() if tensor.is_nested else list(tensor.shape)
    of_which = "" if name is None else f", which is output {packed.output} of {name},"
    return f"{before}[{kind} {sizes}]{of_which} is at version {tensor._version}; expected version {packed.version}{after}"


def _specimen(tensor: torch.Tensor) -> tuple[str, str] | None:
    """PyTorch's words of a tensor of this dtype on this device, and what it calls such a tensor. They depend on the release, and on
    anomaly mode, so PyTorch is asked each time."""
    others = _hooks()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            result = torch.ones(1, device=tensor.device, dtype=tensor.dtype, requires_grad=True).exp()
            node: Any = result.grad_fn
            result.add_(1)
            node._saved_result  # noqa: B018
    except internal_error(RuntimeError, TypeError, AttributeError) as error:
        found = _SPECIMEN.search(str(error))
        return None if found is None else (str(error), found[1])
    finally:
        _put_back(others)
    return None


_VERSIONS = " is at version 1; expected version 0"
_SPECIMEN = re.compile(rf"\[(\S+) \[1\]\], which is output 0 of Exp\w*,{_VERSIONS}")
_WORDS = (
    f"one of the variables needed for gradient computation has been modified by an inplace operation: [tensor [1]],{_VERSIONS}"
    " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True)."
)
_DETACHED = (
    "Trying to use a saved tensor that has been detached in-place, i.e. with .detach_()."
    "This is not supported, please use out-of-place `.detach()` instead"
)


def _register_hooks(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def register_hooks(self: Any, *hooks: Any, **named: Any) -> None:
        """As PyTorch's, which refuses a value that a hook holds; one that gradguard's own holds is handed on."""
        packed: Any = self.data if SHOWN and self.unpack_hook is unpack else None
        tensor = packed.tensor if type(packed) is Packed else None
        if tensor is None or named or len(hooks) != 2 or not all(map(callable, hooks)):
            return original(self, *hooks, **named)
        pack_hook, unpack_hook = hooks
        version = tensor._version
        with torch.no_grad():
            packed.hook = (unpack_hook, pack_hook(tensor.detach()))
        packed.tensor = None
        if tensor._version != version:
            raise RuntimeError(_WRITING)
        return None

    return register_hooks


_ORIGINAL = _autograd.SavedTensor.register_hooks
_WRITING = (
    "A saved tensor pack hook is modifying its input in place. Tensors provided as input to pack hook can not be modified by in-place "
    "operations as this can lead to unexpected side-effects. Please open an issue if you need to perform in-place operations on the input "
    "to a pack hook."
)


def can_hook() -> bool:
    """Whether this torch shows which hooks are on, without which those of the program's could not be kept above gradguard's."""
    return _top is not None


def _hooks() -> list[tuple[Any, Any]]:
    """Takes all hooks of this thread off and returns them, the innermost first."""
    assert _top is not None
    found: list[tuple[Any, Any]] = []
    while (pair := _top(False)) is not None:
        found.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    return found


def _put_back(pairs: list[tuple[Any, Any]]) -> None:
    for pair in reversed(pairs):
        _autograd._push_saved_tensors_default_hooks(*pair)


def hooks_allowed() -> bool:
    """Whether torch takes hooks in this thread now: not while `torch.func` differentiates."""
    return bool(_autograd._saved_tensors_hooks_is_enabled())


def hook_below(pack: Callable[[torch.Tensor], Any]) -> None:
    """Puts `pack` and `unpack` on this thread's stack of hooks, below all that are there."""
    others = _hooks()
    try:
        if _autograd.SavedTensor.register_hooks is _ORIGINAL:
            _autograd.SavedTensor.register_hooks = _register_hooks(_ORIGINAL)
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    finally:
        _put_back(others)


def unhook() -> None:
    """Takes gradguard's hooks off this thread's stack, wherever they stand."""
    if not is_hooked():
        return
    others = _hooks()
    _put_back([pair for pair in others if pair[1] is not unpack])


def is_hooked() -> bool:
    """Whether gradguard's hooks are on this thread's stack."""
    if _top is None or not hooks_allowed():
        return False
    innermost = _top(False)
    if innermost is None or innermost[1] is unpack:
        return innermost is not None
    others = _hooks()
    _put_back(others)
    return any(pair[1] is unpack for pair in others)


def acts() -> bool:
    """Whether gradguard's hooks are the innermost, so that they see what is saved."""
    innermost = None if _top is None else _top(False)
    return innermost is not None and innermost[1] is unpack


def within(context: AbstractContextManager[Any], inner: Iterator[Any]) -> Iterator[Any]:
    """A generator that runs inside a context."""
    with context:
        yield from inner


@contextmanager
def unhooked() -> Iterator[None]:
    """A block in which gradguard's hooks are off where they would act; those of the program's stay."""
    if not acts():
        yield
        return
    pack = _top(False)[0]  # type: ignore[misc]
    _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        try:
            hook_below(pack)
        except internal_error():  # they stay off; what the block has computed is not lost
            pass
