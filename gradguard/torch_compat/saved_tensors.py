"""Saved values in releases whose `SavedTensor` does not show the tensor it holds (2.10 and older; seen in 2.4, 2.8 and their stubs).

There a value can be had by unpacking only. That compares versions, as backward does, and runs the hook that holds the value, if one
does; nothing tells whether one does. So values are unpacked only where no `saved_tensors_hooks` was entered since the guard began:
checkpointing, which would compute its block again, and offloading both do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

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


def may_unpack() -> bool:
    """Whether unpacking runs no code but PyTorch's own."""
    return not SHOWN and not _hooks_entered


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
        value = getattr(self._node, self._name)
        if self._index is not None:
            value = value[self._index]
        return value if isinstance(value, torch.Tensor) else None
