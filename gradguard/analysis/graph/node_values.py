"""The values that flowed along a live autograd graph: which results are known, and where they stopped being finite.

At the moment backward() is called the whole graph is alive. A saved tensor that is unpacked carries the
node that made it, so every saved input or output gives the value of one edge exactly; variables in the frames give
more; the rest is computed again from known values where the op is simple (`gradguard.analysis.graph.recompute`).

Runs only when a diagnosis is being made. The caller sees to it that no function mode of ours is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gradguard.analysis.graph.recompute import Unknown, recompute
from gradguard.analysis.graph.walk import is_accumulate, walk
from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import (
    has_memory,
    has_own_dispatch,
    held_by_hook,
    node_sequence,
    own_part,
    saved_data,
    saved_slots,
    unpacking_hook,
)

MOST_NODES = 20_000
MOST_ELEMENTS = 60_000_000  # of values computed again: a diagnosis must not exhaust the memory


class Input(NamedTuple):
    """One operand of a node: what another node made (`node`, `output`), a leaf, or something autograd did not record."""

    node: Any
    output: int

    @property
    def leaf(self) -> torch.Tensor | None:
        """The parameter (or other leaf) that is fed in."""
        variable = getattr(self.node, "variable", None) if self.node is not None else None
        return variable if isinstance(variable, torch.Tensor) else None


class Health(NamedTuple):
    """How many elements of a value are NaN, +inf or -inf."""

    nan: int
    inf: int
    neginf: int
    total: int

    @property
    def finite(self) -> bool:
        return not (self.nan or self.inf or self.neginf)

    @property
    def bad(self) -> int:
        return self.nan + self.inf + self.neginf


def health(tensor: torch.Tensor) -> Health:
    """Counts a tensor's non-finite elements."""
    with torch.no_grad():
        value = _of_this_rank(tensor)
        if value is None or not (value.is_floating_point() or value.is_complex()):
            return Health(0, 0, 0, tensor.numel())
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        if bool(torch.isfinite(value).all()):
            return Health(0, 0, 0, value.numel())
        inf = torch.isinf(value)
        negative = value < 0
        return Health(int(torch.isnan(value).sum()), int((inf & ~negative).sum()), int((inf & negative).sum()), value.numel())


def plain(tensor: Any) -> torch.Tensor | None:
    """The tensor without its graph, as something whose elements can be read; None for the odd kinds."""
    try:
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested or has_own_dispatch(tensor) or not has_memory(tensor):
            return None
        if tensor.layout != torch.strided:
            return tensor.detach().coalesce().values() if tensor.layout == torch.sparse_coo else None
        return tensor.detach()
    except internal_error():  # functorch wrappers, fake tensors and whatever else does not answer
        return None


def _of_this_rank(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return plain(own_part(tensor))
    except ValueError:
        return None


class GraphValues:
    """The nodes of a live graph with the values of their outputs, as far as these can be known.

    Args:
        roots: graph nodes to start from.
        tensors: tensors at hand (variables of the frames): each gives the value of the edge it stands for.
    """

    def __init__(self, roots: Iterable[Any], tensors: Iterable[torch.Tensor] = ()) -> None:
        self.nodes: list[Any] = []  # newest first
        self.inputs: dict[Any, list[Input]] = {}
        self.known: dict[tuple[Any, int], torch.Tensor] = {}
        self.constants: dict[Any, dict[str, torch.Tensor]] = {}  # saved operands that are no part of the graph
        self._computed: dict[tuple[Any, int], torch.Tensor | None] = {}
        self._budget = MOST_ELEMENTS
        self.users: dict[Any, list[Any]] = {}
        for node, _ in walk(roots, MOST_NODES):
            self.nodes.append(node)
            self.inputs[node] = [Input(source, output) for source, output in node.next_functions]
            for source in self.inputs[node]:
                if source.node is not None:
                    self.users.setdefault(source.node, []).append(node)
        members = set(self.nodes)
        for tensor in tensors:
            node = _grad_fn(tensor)
            if node is not None and node in members:
                self._note(node, tensor)
        for node in self.nodes:
            if not is_accumulate(node):
                self._read_saved(node, members)

    def _read_saved(self, node: Any, members: set[Any]) -> None:
        for name, tensor in saved_values(node):
            maker = _grad_fn(tensor)
            if maker is not None and maker in members:
                self._note(maker, tensor)
            elif not tensor.requires_grad and not has_own_dispatch(tensor):
                self.constants.setdefault(node, {})[name] = tensor.detach()

    def _note(self, node: Any, tensor: torch.Tensor) -> None:
        value = plain(tensor)
        if value is not None:
            self.known.setdefault((node, tensor.output_nr), value)

    def output(self, node: Any, index: int = 0) -> torch.Tensor | None:
        """What the node's forward op gave: a saved value, or computed again from its inputs; None if neither is possible."""
        key = (node, index)
        value = self.known.get(key)
        if value is not None:
            return value
        if key not in self._computed:
            self._computed[key] = None
            self._computed[key] = self._recompute(node, index)
        return self._computed[key]

    def input(self, node: Any, position: int) -> torch.Tensor | None:
        """The value of a node's operand; None if it is not known."""
        inputs = self.inputs.get(node, [])
        if position >= len(inputs):
            return None
        source = inputs[position]
        if source.node is None:
            return None
        if source.leaf is not None:
            return plain(source.leaf)
        return self.output(source.node, source.output)

    def input_values(self, node: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The operands of a node whose values are known, with the slot or position they have."""
        for position in range(len(self.inputs.get(node, []))):
            value = self.input(node, position)
            if value is not None:
                yield str(position), value
        for name, tensor in self.constants.get(node, {}).items():
            if name not in ("result", "output", "mask", "condition") and tensor.is_floating_point():
                yield name, tensor

    def _recompute(self, node: Any, index: int) -> torch.Tensor | None:
        if is_accumulate(node):
            return plain(getattr(node, "variable", None))
        if self._budget <= 0:
            return None
        # oldest first and without recursion: graphs are deep
        pending = [(node, index)]
        seen: set[tuple[Any, int]] = set()
        order: list[tuple[Any, int]] = []
        while pending:
            key = pending.pop()
            if key in seen:
                continue
            seen.add(key)
            order.append(key)
            for source in self.inputs.get(key[0], []):
                inner = (source.node, source.output)
                if source.node is None or source.leaf is not None or inner in self.known or inner in self._computed:
                    continue
                pending.append(inner)
        result = None
        for key in sorted(order, key=lambda item: node_sequence(item[0])):
            if self._budget <= 0:
                return None
            try:
                with torch.no_grad():
                    result = recompute(self, key[0], key[1])
            except Unknown:
                result = None
            except internal_error():  # shapes or kinds that the formula was not written for
                result = None
            if result is not None:
                self._budget -= result.numel()
            self._computed[key] = result
        return self._computed.get((node, index))


def saved_values(node: Any) -> list[tuple[str, torch.Tensor]]:
    """The saved tensors of a node, unpacked, so that each carries the node that made it. Values that a hook holds
    (checkpointing, save_on_cpu) are left alone; those that were written since are read as they are now."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, slot in saved_slots(node):
        try:
            if unpacking_hook(slot) is not None:
                continue
        except internal_error():
            continue
        value: Any = None
        short, _, index = name.partition("[")
        try:
            value = getattr(node, f"_saved_{short}")
            if index:
                value = value[int(index.rstrip("]"))]
        except internal_error():
            try:
                value = saved_data(slot)
            except internal_error():
                continue
        if isinstance(value, torch.Tensor) and has_memory(value):
            found.append((name, value))
    if hasattr(type(node), "_forward_cls") and not held_by_hook(node, "tensors"):
        try:
            found += [
                (f"saved_tensors[{i}]", value)
                for i, value in enumerate(node.saved_tensors)
                if isinstance(value, torch.Tensor) and has_memory(value)
            ]
        except internal_error():
            pass
    return found


def _grad_fn(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except internal_error():
        return None
