"""Finds the op that made the first non-finite value of a live graph.

Every edge of the graph is *clean*, *injected* (it holds infinities that a constant put there, as masked attention scores
do, and no NaN) or *dirty* (NaN, or an infinity that was computed). The origin is the oldest op with a dirty result and no
dirty operand. A clean known value cleans what comes after it: a NaN that `where` masks again never reached the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gradguard.analysis.graph.node_values import GraphValues, Health, Input, health, plain
from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.graph.walk import is_accumulate
from gradguard.torch_compat.private_api import node_sequence

# Ops that may put a constant into their result which the graph does not keep.
INJECTING = frozenset(
    {
        "MaskedFill",
        "Where",
        "WhereSelf",
        "Add",
        "Sub",
        "Rsub",
        "IndexPut",
        "IndexFill",
        "CopySlices",
        "MaskedScatter",
        "Scatter",
        "ConstantPadNd",
        "Clamp",
        "ClampMin",
        "ClampMax",
        "Minimum",
        "Maximum",
        "Stack",
        "Cat",
        "CopyBackwards",
    }
)
_NOT_INJECTING_ALONE = frozenset({"Clamp", "ClampMin", "ClampMax"})

# An infinite constant is meant as a mask where it is added or filled in, never where it is a factor.
_PRODUCTS = frozenset({"Mul", "Mm", "Bmm", "Addmm", "Div", "Mv", "Dot"})

State = Literal["clean", "injected", "dirty"]


@dataclass
class Origin:
    """Where a graph's values stopped being finite.

    Attributes:
        kind: "op" (an op made it of finite operands), "leaf" (a parameter or input of the graph already was), "constant"
            (a value that is no part of the graph already was).
        node: the op, or the first op that used the leaf or constant.
        health: of the op's result, or of the leaf or constant.
        injected: an op that put infinities in on purpose, which the origin then could not digest.
        spread: where an infinity that the origin made first became NaN.
        sure: False where operands of the origin are not known, so that the fault may lie further back.
    """

    kind: Literal["op", "leaf", "constant"]
    node: Any
    health: Health
    output: torch.Tensor | None = None
    tensor: torch.Tensor | None = None
    slot: str = ""
    injected: Any = None
    spread: Any = None
    sure: bool = True


@dataclass
class _Edge:
    state: State
    has_nan: bool = False
    origins: tuple[Origin, ...] = ()
    injected: Any = None  # node that put constants in
    known: bool = True


@dataclass
class _Search:
    values: GraphValues
    edges: dict[tuple[Any, int], _Edge] = field(default_factory=dict)

    def run(self) -> None:
        wanted: dict[Any, set[int]] = {}
        for inputs in self.values.inputs.values():
            for source in inputs:
                if source.node is not None:
                    wanted.setdefault(source.node, set()).add(source.output)
        for node in sorted(self.values.nodes, key=node_sequence):
            if is_accumulate(node):
                continue
            for output in sorted(wanted.get(node, {0})):
                self.edges[node, output] = self._judge(node, output)

    def _judge(self, node: Any, output: int) -> _Edge:
        operands = [self._operand(node, source) for source in self.values.inputs[node]] + self._constants(node)
        dirty = [edge for edge in operands if edge.state == "dirty"]
        injected = next((edge.injected for edge in operands if edge.state == "injected"), None)
        value = self.values.output(node, output)
        if value is None:
            if dirty:
                return _Edge("dirty", any(edge.has_nan for edge in dirty), _merged(dirty), injected, known=False)
            return _Edge("injected" if injected is not None else "clean", injected=injected, known=False)
        found = health(value)
        if found.finite:
            return _Edge("clean")
        if dirty:
            merged = _merged(dirty)
            if found.nan and not any(edge.has_nan for edge in dirty):
                for origin in merged:
                    origin.spread = origin.spread or node
            return _Edge("dirty", found.nan > 0, merged, injected)
        kind = node_kind(node)
        if not found.nan and (injected is not None or self._injects(node, kind)):
            return _Edge("injected", injected=node if injected is None else injected)
        sure = all(edge.known for edge in operands)
        return _Edge("dirty", found.nan > 0, (Origin("op", node, found, value, injected=injected, sure=sure),))

    def _injects(self, node: Any, kind: str) -> bool:
        if kind not in INJECTING or kind in _NOT_INJECTING_ALONE:
            return False
        if kind in ("Add", "Sub", "Rsub", "Where", "WhereSelf", "Stack", "Cat", "Minimum", "Maximum"):
            inputs = self.values.inputs[node]
            return len(inputs) < 2 or any(source.node is None for source in inputs)
        return True

    def _operand(self, node: Any, source: Input) -> _Edge:
        if source.node is None:
            return _Edge("clean")
        leaf = source.leaf
        if leaf is not None:
            found = health(leaf)
            if found.finite:
                return _Edge("clean")
            return _Edge("dirty", found.nan > 0, (Origin("leaf", node, found, tensor=leaf),))
        edge = self.edges.get((source.node, source.output))
        return edge if edge is not None else _Edge("clean", known=False)

    def _constants(self, node: Any) -> list[_Edge]:
        edges = []
        for slot, tensor in self.values.constants.get(node, {}).items():
            if slot in ("mask", "condition", "indices", "result", "output", "total_weight") or slot.startswith("result"):
                continue
            value = plain(tensor)
            if value is None or not value.is_floating_point():
                continue
            found = health(value)
            if found.nan or (found.bad and (value.dim() == 0 or node_kind(node) in _PRODUCTS)):
                edges.append(_Edge("dirty", found.nan > 0, (Origin("constant", node, found, tensor=tensor, slot=slot),)))
            elif found.bad:
                edges.append(_Edge("injected", injected=node))
        return edges


def _merged(edges: list[_Edge]) -> tuple[Origin, ...]:
    found: dict[int, Origin] = {}
    for edge in edges:
        for origin in edge.origins:
            found.setdefault(id(origin), origin)
    oldest = sorted(found.values(), key=_age)
    return tuple(oldest[:8])


def _age(origin: Origin) -> tuple[int, int]:
    # weights and data that were bad before come before anything that was computed of them
    return (0 if origin.kind != "op" else 1, node_sequence(origin.node))


def find_origin(values: GraphValues, root: Any) -> Origin | None:
    """The origin of a root's non-finite value; None where the graph does not show one."""
    search = _Search(values)
    search.run()
    edge = search.edges.get((root.grad_fn, root.output_nr)) if isinstance(root, torch.Tensor) else None
    if (
        edge is not None and edge.state == "injected"
    ):  # it was put in on purpose, or came with a constant, and nothing kept it from the root
        value = values.output(edge.injected)
        return Origin(
            "constant",
            edge.injected,
            health(root if value is None else value),
            tensor=root.detach() if value is None else value,
            slot="injected",
        )
    if edge is None or not edge.origins:
        found = [item for item in search.edges.values() if item.origins] if edge is None else []
        merged = _merged(found)
        return merged[0] if merged else None
    return edge.origins[0]
