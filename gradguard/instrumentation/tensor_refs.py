"""Weak references to what is the program's that do not change what code counting weak references sees.

`torch.utils.swap_tensors` refuses tensors that have weak references. `nn.Module.to`, `to_empty` and `load_state_dict` swap
parameters that are tensor subclasses (DTensor, and with it FSDP2; torchao), and all parameters after
`torch.__future__.set_swap_module_params_on_conversion(True)`. A swapped parameter is the same Python object with another
content, so a weak reference to it stays right; only the count has to be as without the guard. `weakref.getweakrefs` and
`weakref.getweakrefcount` therefore leave out the references of these classes, and no other class may refer to a tensor, an optimizer
or anything else that a program can ask about.
"""

from __future__ import annotations

import _weakref
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_own = getattr(torch._C.TensorBase, "_fix_weakref", id)


class UncountedRef(weakref.ref[Any]):
    """A weak reference that is invisible to `weakref.getweakrefs`; equal to itself only, since others ask what they refer to."""

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


class TensorRef(UncountedRef):
    """One to a tensor, asked as `torch.utils.weak.TensorWeakRef` asks: where C++ alone holds a tensor, such as a graph its leaf, the Python
    object has to be told that Python holds it too."""

    __slots__ = ()

    def __call__(self) -> Any:
        tensor = super().__call__()
        if issubclass(type(tensor), torch.Tensor):
            _own(tensor)
        return tensor


_UNCOUNTED = (UncountedRef, TensorRef)


def install(replace: Callable[..., None]) -> None:
    """Replaces the two functions that list and count them; for `gradguard.probes.torch_functions`."""
    replace(weakref, "getweakrefs", _references)
    replace(weakref, "getweakrefcount", _count)


def _references(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    @wraps(original)
    def getweakrefs(object: Any, /) -> list[Any]:
        return [ref for ref in original(object) if type(ref) not in _UNCOUNTED]

    return getweakrefs


def _count(original: Callable[[Any], int]) -> Callable[[Any], int]:
    @wraps(original)
    def getweakrefcount(object: Any, /) -> int:
        return original(object) - sum(type(ref) in _UNCOUNTED for ref in _weakref.getweakrefs(object))

    return getweakrefcount
