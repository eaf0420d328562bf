"""What the arguments of a torch call are: its tensors, the versions of those it may write, the numbers it was given."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.facts import Region
from gradguard.torch_compat.private_api import quiet, storage_key

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
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


def tensors_within(value: Any, most: int = 2_000) -> list[Any]:
    """The tensors in nested lists, tuples and dicts."""
    found: list[Any] = []
    stack = [value]
    while stack and len(found) < most:
        item = stack.pop()
        if isinstance(item, _Tensor):
            found.append(item)
        elif isinstance(item, dict):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
    return found


def any_requires_grad(args: tuple[Any, ...]) -> bool:
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


def versions_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[Any, int]] | None:
    """The tensors a call may write with their versions before it: its first argument, a list there, and `out`."""
    found = []
    try:
        for target in (args[0] if args else None, kwargs.get("out") if kwargs else None):
            if isinstance(target, _Tensor):
                found.append((target, _version(target)))
            elif isinstance(target, (list, tuple)):
                found.extend((item, _version(item)) for item in target if isinstance(item, _Tensor))
    except internal_error():  # inference tensors have no version
        return None
    return found or None


def numbers_in(value: Any, limit: int = 256) -> set[Any]:
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


def is_flat(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 256 and all(isinstance(item, (int, float)) for item in value)


def is_one_of(value: Any, numbers: set[Any]) -> bool:
    return value in numbers if not isinstance(value, tuple) else any(item in numbers for item in value)


def call_name(func: Any) -> str:
    name = getattr(func, "__name__", None) or str(func)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def region_written(func: Any, args: tuple[Any, ...], tensor: torch.Tensor) -> Region | None:
    """The elements that a call has written of one of its arguments; None where that is not known."""
    if func is torch.Tensor.__setitem__:
        with quiet(), torch.no_grad():
            part = args[0][args[1]]
        if storage_key(part) != storage_key(tensor):
            return None  # picked by numbers or a mask: a copy, which does not tell where its elements came from
        tensor = part
    return Region.of(tensor)
