"""Leaves of a backward's graph, and what is remembered of those that are in no optimizer."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.tensor_state import few_values, version_of
from gradguard.torch_compat.private_api import implementation

_MOST_NODES = 20_000


class Stranger:
    """A leaf that gets gradient and is in no optimizer."""

    __slots__ = ("dtype", "first_backward", "impl", "is_parameter", "last_backward", "ref", "seen", "shape", "step", "values", "version")

    def __init__(self, leaf: torch.Tensor, backward: int, step: int) -> None:
        self.ref = TensorRef(leaf)
        self.shape = tuple(leaf.shape)
        self.is_parameter = isinstance(leaf, torch.nn.Parameter)
        self.impl, self.dtype = implementation(leaf), leaf.dtype
        self.version = version_of(leaf)
        self.values = few_values(leaf)
        self.seen = 1
        self.first_backward = self.last_backward = backward
        self.step = step

    def same(self) -> bool:
        """Whether it lives and has not changed since it was first seen (written through `.data` included), but for a conversion."""
        leaf = self.ref()
        if leaf is None:
            return False
        if leaf.dtype != self.dtype:
            self.dtype, self.values = leaf.dtype, torch.tensor(self.values).to(leaf.dtype).tolist()
        if implementation(leaf) != self.impl:  # swapped for another tensor, which has a count of versions of its own
            self.impl, self.version = implementation(leaf), version_of(leaf)
        return version_of(leaf) == self.version and few_values(leaf) == self.values


def leaves(roots: tuple[Any, ...]) -> list[torch.Tensor]:
    """The leaves of a graph that require grad; nothing for graphs too large to walk in a step."""
    found: list[torch.Tensor] = []
    stack = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        following = node.next_functions
        if not following:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
            continue
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                stack.append(each)
        if len(seen) > _MOST_NODES:
            return []
    return found
