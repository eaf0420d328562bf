"""`nn.Embedding(max_norm=...)`: a lookup rescales the rows it reads, in the weight itself.

torch does that in its forward, under no_grad: no line of the user's writes, and yet the version counter goes up. A graph that has
saved the weight before (scores against all rows) fails in backward. The documentation of `nn.Embedding` says so, and to clone.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from gradguard.analysis.graph.walk import is_accumulate, op_name, walk
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import edit_of, patched
from gradguard.rules.inplace import spans
from gradguard.rules.inplace.write_history import Story
from gradguard.torch_compat.private_api import node_sequence

UNTRACED = "this step was not traced; `level: strict` (or GRADGUARD_LEVEL=strict) traces every step and names the lines"
_LOOKUPS = ("embedding", "embedding_bag")


def lookups_since(story: Story) -> list[Any]:
    """The graph's lookups in a weight of limited norm that came after the graph had saved it, oldest first; no other write is known."""
    state = story.state
    if state is None or story.writes or not isinstance(state.owner, (nn.Embedding, nn.EmbeddingBag)) or state.owner.max_norm is None:
        return []
    weight = state.owner.weight
    found = [
        node
        for node, edges in walk(story.incident.root_nodes)
        if not is_accumulate(node)
        and op_name(node) in _LOOKUPS
        and node_sequence(node) > story.mismatch.seq
        and any(getattr(edge.source, "variable", None) is weight for edge in edges)
    ]
    return sorted(found, key=node_sequence)


def renormed(story: Story, code: str, name: str) -> Diagnosis | None:
    """What is told of it."""
    lookups = lookups_since(story)
    if not lookups or story.state is None:
        return None
    incident, parameter = story.incident, story.state.full
    owner, word = story.state.owner, f"nn.{type(story.state.owner).__name__}"
    place = incident.place_of_node(node_sequence(lookups[0]))
    text = f"`{spans.short(place.text)}`" if place is not None else f"a lookup in the `{word}`"
    label = f"rescales the rows it looks up, in `{parameter}` itself"
    if len(lookups) == story.mismatch.found - story.mismatch.expected:
        label += f": version {story.mismatch.expected} becomes {story.mismatch.expected + 1}"
    culprit = None if place is None else place.span(label, "culprit")
    later = Fix(
        title="look up all rows before the weight itself is used",
        safety="manual",
        detail="what the graph saves of the weight is then its state after the lookups",
    )
    return Diagnosis(
        code=code,
        name=name,
        headline=f"{text} rescales rows of `{parameter}` in place (`max_norm={owner.max_norm:g}`), "
        f"which `{story.op_word}` had saved for its backward pass",
        culprit=culprit,
        related=spans.without(spans.compact([spans.saved_span(story), spans.backward_span(story)]), culprit),
        tensors=[spans.tensor_facts(story, parameter)],
        explanation=(
            f"With `max_norm`, each lookup of an `{word}` first brings the rows it reads to that norm, in the weight itself. "
            f"`{story.op_word}` saved `{parameter}` at version {story.mismatch.expected}, a later lookup changed it "
            f"(now version {story.mismatch.found}), and the value that backward needs is gone."
        ),
        notes=[] if incident.traced else [UNTRACED],
        fixes=[_copy(story), later],
        avoid=[spans.NO_DATA],
        confidence="certain" if place is not None else "likely",
    )


def _copy(story: Story) -> Fix:
    """A copy of the weight for what is computed from all of it."""
    saved = story.saved_at
    read = None if saved is None else _weight_in(saved)
    shown = f"{dotted(read)}.clone()" if read is not None else f"{story.state.full if story.state is not None else 'weight'}.clone()"
    line = f" at line {saved.line}" if saved is not None and read is not None else ""
    patch = patched(saved.source, edit_of(read, shown)) if saved is not None and saved.source is not None and read is not None else None
    return Fix(
        title=f"give `{story.op_word}` a copy of the weight{line}: `{shown}`",
        safety="safe",
        detail="it then saves the copy, which no lookup rescales; the weight gets its gradient all the same",
        patch=patch,
    )


def _weight_in(saved: ResolvedSite) -> ast.Attribute | None:
    """The one `.weight` that the statement of the saving op reads."""
    if saved.statement is None:
        return None
    reads = [
        node
        for node in inside(saved.statement, ast.Attribute)
        if node.attr == "weight" and isinstance(node.ctx, ast.Load) and dotted(node) is not None
    ]
    return reads[0] if len(reads) == 1 else None
