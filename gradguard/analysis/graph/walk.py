"""Reading the live autograd graph after a failure: what was saved, what is freed, what is old.

All of this runs only when a diagnosis is being made. Nothing here unpacks a saved tensor except to hear PyTorch's verdict.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge

from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import (
    ACCUMULATE_SEQ,
    check_saved,
    grad_fn_of,
    held_by_hook,
    is_a,
    node_sequence,
    saved_data,
    saved_slots,
    storage_key,
)

MAX_NODES = 200_000
DEEPEST = 20_000
"""Nodes in a chain that are looked at. `next_functions` gives each node a Python object that lives as long as the node, and PyTorch 2.13
frees a chain of those recursively: a stack of 8 MiB is too small for 50,000 of them."""

_VERSIONS = re.compile(r"is at version (\d+); expected version (\d+)")


@dataclass(frozen=True)
class Edge:
    """A use of `source`'s output number `output` by `user` (None: by the root itself)."""

    user: Any
    source: Any
    output: int


@dataclass
class Mismatch:
    """A saved value whose version is no longer the one autograd saved."""

    node: Any
    slot: str
    tensor: torch.Tensor | None
    expected: int
    found: int
    message: str

    @property
    def storage(self) -> int | None:
        return None if self.tensor is None else storage_key(self.tensor)

    @property
    def seq(self) -> int:
        return node_sequence(self.node)


def root_nodes(tensors: Iterable[Any]) -> list[Any]:
    """The graph nodes that made these tensors (leaves have none)."""
    found = []
    for tensor in tensors:
        node = cast(Any, tensor).node if is_a(tensor, GradientEdge) else grad_fn_of(tensor)
        if node is not None:
            found.append(node)
    return found


def walk(roots: Iterable[Any], limit: int = MAX_NODES) -> Iterator[tuple[Any, list[Edge]]]:
    """Every node reachable from the roots, the newest first, each with its outgoing edges."""
    heap: list[tuple[int, int, Any]] = []
    seen: dict[Any, int] = {}  # how deep below a root
    order = 0
    for root in roots:
        if root not in seen:
            seen[root] = 0
            heapq.heappush(heap, (-_rank(root), order, root))
            order += 1
    while heap and len(seen) < limit:
        node = heapq.heappop(heap)[2]
        edges = []
        deeper = seen[node] + 1
        for source, output in node.next_functions if deeper < DEEPEST else ():
            if source is None:
                continue
            edges.append(Edge(node, source, output))
            if source not in seen:
                seen[source] = deeper
                order += 1
                heapq.heappush(heap, (-_rank(source), order, source))
        yield node, edges


def nodes_from(roots: Iterable[Any], limit: int = MAX_NODES) -> list[Any]:
    """Every node reachable from the roots, in no order: a third of what `walk` costs."""
    found: dict[Any, int] = dict.fromkeys(roots, 0)
    stack = list(found)
    while stack and len(found) < limit:
        node = stack.pop()
        deeper = found[node] + 1
        for source, _ in node.next_functions if deeper < DEEPEST else ():
            if source is not None and source not in found:
                found[source] = deeper
                stack.append(source)
    return list(found)


def _rank(node: Any) -> int:
    seq = node_sequence(node)
    return -1 if seq >= ACCUMULATE_SEQ else seq


def is_accumulate(node: Any) -> bool:
    """Whether the node is a leaf's AccumulateGrad (`.variable` is the leaf)."""
    return node_sequence(node) >= ACCUMULATE_SEQ or type(node).__name__ == "AccumulateGrad"


def leaves(roots: Iterable[Any]) -> list[torch.Tensor]:
    """The leaves reachable from the roots."""
    found = []
    for node, _ in walk(roots):
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
    return found


def mismatches(roots: Iterable[Any]) -> list[Mismatch]:
    """The reachable saved values that were written after they were saved, in the order backward would meet them."""
    found = []
    for node, _ in walk(roots):
        verdict = check_saved(node)
        if verdict is None:
            continue
        versions = _VERSIONS.search(verdict)
        if versions is None:
            continue
        slot, tensor = _mismatched_slot(node, verdict)
        found.append(Mismatch(node, slot, tensor, int(versions[2]), int(versions[1]), verdict))
    return found


def _mismatched_slot(node: Any, verdict: str) -> tuple[str, torch.Tensor | None]:
    """Which saved value of the node failed: the one whose unpacking gives this verdict."""
    candidates: list[tuple[str, torch.Tensor | None]] = []
    found = int(_VERSIONS.search(verdict)[1]) if _VERSIONS.search(verdict) else -1  # type: ignore[index]
    for name, slot in saved_slots(node):
        data = saved_data(slot)
        if "[" not in name and not held_by_hook(node, name):
            try:
                getattr(node, f"_saved_{name}")
            except internal_error(RuntimeError) as error:
                if str(error) == verdict:
                    return name, data
            except internal_error():
                continue
        if data is not None and _version(data) == found:
            candidates.append((name, data))
    return candidates[0] if candidates else ("", None)


def _version(tensor: torch.Tensor) -> int:
    try:
        return int(tensor._version)
    except internal_error():
        return -1


def saved_tensors(roots: Iterable[Any]) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Every readable saved tensor of the graph: (node, slot name, tensor)."""
    for node, _ in walk(roots):
        for name, slot in saved_slots(node):
            data = saved_data(slot)
            if data is not None:
                yield node, name, data


def op_name(node: Any) -> str:
    """A node's op in the user's words: `SigmoidBackward0` -> `sigmoid`; a custom Function keeps its class name."""
    raw = node.name() if callable(getattr(node, "name", None)) else type(node).__name__
    raw = raw.rsplit("::", 1)[-1]
    cls = getattr(node, "_forward_cls", None)
    if cls is not None:
        return str(cls.__name__)
    name = re.sub(r"Backward\d*$", "", raw)
    return {"Mm": "matmul", "Addmm": "linear", "Bmm": "matmul", "T": "transpose", "AsStrided": "as_strided"}.get(
        name, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    )
