"""The objects that are alive, above all the tensors, found through the garbage collector; for the time of a diagnosis only."""

from __future__ import annotations

import gc
from collections.abc import Collection
from functools import cached_property
from typing import Any, TypeVar

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import is_quiet
from gradguard.torch_compat.private_api import node_sequence

T = TypeVar("T")


def alive(kind: type[T]) -> list[T]:
    """Every object of a class that is alive. type() instead of isinstance(): proxies and mocks may run code when asked."""
    verdicts: dict[int, bool] = {}  # by id: a metaclass may have a hash of its own
    found: list[T] = []
    for obj in gc.get_objects():
        own = type(obj)
        verdict = verdicts.get(id(own))
        if verdict is None:
            verdict = verdicts[id(own)] = issubclass(own, kind) and is_quiet(obj)
        if verdict:
            found.append(obj)
    return found


class Alive:
    """Every tensor of the process that has a graph, and look-ups by the node that made it."""

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """Those with a graph node."""
        return [tensor for tensor, _ in self._made]

    @cached_property
    def _made(self) -> list[tuple[torch.Tensor, Any]]:
        return [(tensor, node) for tensor in alive(torch.Tensor) if (node := node_of(tensor)) is not None]

    def made_by(self, nodes: Collection[Any]) -> list[torch.Tensor]:
        """The tensors that one of these nodes made."""
        wanted = set(nodes)
        return [tensor for tensor, node in self._made if node in wanted]

    def made_at(self, seqs: Collection[int]) -> list[torch.Tensor]:
        """The tensors whose node has one of these sequence numbers."""
        return [tensor for tensor, node in self._made if node_sequence(node) in seqs]

    def own(self) -> set[int]:
        """ids of the containers in here, which refer to every tensor and hold none for the user."""
        return {id(self.__dict__), id(self.tensors), id(self._made), *(id(entry) for entry in self._made)}


def node_of(tensor: torch.Tensor) -> Any:
    """A tensor's graph node; None for leaves and for tensors that hide it."""
    try:
        return tensor.grad_fn
    except internal_error():
        return None
