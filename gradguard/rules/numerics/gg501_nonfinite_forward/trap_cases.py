"""One op that made a non-finite value of finite operands, as the descriptions of the traps see it; and what such a description is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.analysis.graph.node_values import GraphValues
from gradguard.analysis.graph.recompute import node_kind
from gradguard.core.diagnosis import Fix
from gradguard.core.foreign_exceptions import internal_error
from gradguard.rules.numerics.first_nonfinite import Origin
from gradguard.rules.numerics.ranges import elements, kinds


@dataclass
class Trap:
    """The explanation of one origin.

    Attributes:
        what: continues "`expression` ...": what it did with which numbers.
        why: why that is so, in a sentence or two.
        fixes: the recommended one first.
        underflowed: the node of an exponential that has become 0, and with it what was divided by.
        masked: whether it comes of infinities that a mask puts in.
    """

    what: str
    why: str
    fixes: list[Fix] = field(default_factory=list)
    avoid: list[str] = field(default_factory=list)
    underflowed: Any = None
    masked: bool = False


@dataclass
class Case:
    values: GraphValues
    origin: Origin

    @property
    def node(self) -> Any:
        return self.origin.node

    def operand(self, position: int = 0, slot: str = "self") -> torch.Tensor | None:
        found = self.values.input(self.node, position)
        if found is None:
            found = self.values.constants.get(self.node, {}).get(slot)
        return found

    def offending(self, operand: torch.Tensor | None) -> torch.Tensor | None:
        """The operand's finite elements that gave a non-finite result, for ops that work element by element."""
        out = self.origin.output
        if operand is None or out is None:
            return None
        with torch.no_grad():
            try:
                operand = operand.expand_as(out)
            except internal_error(RuntimeError):
                return None
            found = operand[~torch.isfinite(out)]
            return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found

    @property
    def dtype(self) -> torch.dtype:
        return self.origin.output.dtype if self.origin.output is not None else torch.float32

    @property
    def share(self) -> str:
        return elements(self.origin.health.bad, self.origin.health.total)

    @property
    def result(self) -> str:
        return kinds(self.origin.health)

    def from_kind(self, position: int = 0) -> str:
        """The kind of the op that made an operand."""
        inputs = self.values.inputs.get(self.node, [])
        return node_kind(inputs[position].node) if position < len(inputs) and inputs[position].node is not None else ""


def fix_of(title: str, detail: str | None = None) -> Fix:
    return Fix(title=title, safety="manual", detail=detail)


def limit_of(dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.3g}"
