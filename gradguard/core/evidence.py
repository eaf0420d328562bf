"""What the HTML report draws of an incident: plain facts, taken while the graph was alive; no tensor, node or frame is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# root: what backward began at; written: a saved value of it was written since; culprit: made at the culprit's line; named: made at
# another line of the story; cut: where the value lost its path; freed: its saved values are gone; detached: backward never gets there
Mark = Literal["", "root", "written", "culprit", "named", "cut", "freed", "detached"]


@dataclass(frozen=True)
class GraphNode:
    """A node of the drawn part of the autograd graph, a tensor without a graph, or a stretch of nodes folded into one.

    Attributes:
        op: in the user's words; of a fold, what it holds most of.
        name: the variable that holds the result, as far as it is known.
        module: dotted path of the module that made it, as far as that is known.
        file, line, text: the expression that made it, where the step was traced; of a fold, its first line.
        last_line: of a fold within one file, its last line.
        leaves: parameters and other leaves that go into it.
        note: what is said beside the mark.
        count: how many nodes are folded in it; 1 for a node of its own.
    """

    op: str
    name: str | None = None
    module: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    version: int | None = None
    requires_grad: bool | None = None
    file: str | None = None
    line: int | None = None
    last_line: int | None = None
    text: str | None = None
    leaves: tuple[str, ...] = ()
    mark: Mark = ""
    note: str = ""
    count: int = 1


@dataclass(frozen=True)
class GraphEdge:
    """A way of backward, from the node that uses a value to the one that made it, by their places in `GraphPart.nodes`."""

    user: int
    source: int
    broken: bool = False


@dataclass(frozen=True)
class GraphPart:
    """The part of a graph between the loss and the culprit; nodes in forward order, the loss last."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    total: int  # nodes of the graph, as far as it was walked
    left_out: int = 0  # of them, on other ways than those to the marked nodes
    whole: bool = True  # whether it was walked to its end


@dataclass(frozen=True)
class LayerGradient:
    """Gradient norms of one layer: (optimizer step, norm), oldest first."""

    layer: str
    norms: tuple[tuple[int, float], ...]
    now: float | None = None  # of the gradients as they are at the diagnosis


Happening = Literal["zero_grad", "forward", "backward", "step"]


@dataclass(frozen=True)
class ProtocolEvent:
    """An event of the step protocol.

    Attributes:
        step: of the session, 1-based; tells which events belong together.
        text: what it was, such as "Adam.step".
        fault: whether this event is the culprit, or the one in which the fault was noticed.
        followed: False for a forward of which nothing was recorded.
    """

    kind: Happening
    step: int
    file: str | None = None
    line: int | None = None
    text: str = ""
    fault: Literal["", "culprit", "noticed"] = ""
    followed: bool = True


@dataclass(frozen=True)
class GradlessParameter:
    """A parameter without a gradient, and why as far as the graph tells."""

    name: str
    shape: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Evidence:
    """Everything that the report shows beside the diagnosis itself.

    Attributes:
        graph: for the picture.
        steps: the same part folded less, for the table.
        lines_known: whether the lines of the step's operations are known.
        lines_of_step: where they are those of an earlier step that made the same graph, which one.
        gradless_total: how many parameters have no gradient; `gradless` has the first of them.
        lost: sections that failed to be gathered, by name.
    """

    graph: GraphPart | None = None
    steps: GraphPart | None = None
    lines_known: bool = True
    lines_of_step: int | None = None
    norms: tuple[LayerGradient, ...] = ()
    timeline: tuple[ProtocolEvent, ...] = ()
    gradless: tuple[GradlessParameter, ...] = ()
    gradless_total: int = 0
    lost: tuple[str, ...] = ()
