"""A parameter that carries an old graph: it was written in place, with grad mode on, by values that have a path.

Frozen weights into which adapters are merged outside `torch.no_grad()` are the common case: the write makes the parameter a
non-leaf, whose history is that of the adapters at that time.
"""

from __future__ import annotations

import ast

from gradguard.analysis.graph.walk import leaves, op_name
from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.live.alive_tensors import node_of
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.source import dotted, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.rules.lifetime import wording
from gradguard.rules.lifetime.second_backward import Study
from gradguard.rules.spans import class_node, statement_span

_AUGMENTED = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}


def diagnosis(facts: Study, carrier: Carrier, code: str, name: str) -> Diagnosis | None:
    """The diagnosis, for the rule with this code and name."""
    assert carrier.tensor is not None
    names = facts.incident.names
    state = names.state(carrier.tensor)
    shown = f"`{state.full}`" if state is not None else wording.holder_name(carrier)
    sources = map(names.leaf, leaves([carrier.link.source]))
    behind = short_list([source for source in sources if source is not None], 3) or "values with a graph"
    culprit, where = _write(facts, carrier)
    label = f"{shown.strip('`')} is written in place here with grad mode on: it takes the graph along"
    span = None if culprit is None else culprit.model_copy(update={"label": label})
    return Diagnosis(
        code=code,
        name=name,
        severity="error",
        headline=f"{shown} was written in place with grad mode on and carries that graph into this step, where it has been freed",
        culprit=span,
        related=wording.without_repeats(span, [*wording.entry_span(facts, carrier, "used here"), *wording.backward_span(facts)]),
        tensors=wording.tensor_facts(shown.strip("`"), carrier.tensor),
        explanation=(
            f"What was written into {shown} leads to {behind}. Under grad mode the write is recorded: the parameter is no leaf any more, "
            f"and every later forward pass goes back through that history. It was freed {wording.freed_words(facts)}."
        ),
        notes=wording.notes(facts, carrier),
        fixes=[
            Fix(
                title=f"write into {shown} under `torch.no_grad()`{f' (decorate `{where}` with it)' if where else ''}",
                safety="unsafe",
                detail="the values are the same, without their history",
            )
        ],
        avoid=["retain_graph=True: the old graph would stay, grow with every such write, and need values that optimizers have changed"],
        confidence="certain" if span is not None and facts.finder.op(node_of(carrier.tensor)) is not None else "likely",
    )


def _write(facts: Study, carrier: Carrier) -> tuple[SourceSpan | None, str | None]:
    """Where the parameter was written, and in which function: seen, or the one statement of its class that can have done it."""
    assert carrier.tensor is not None
    node = node_of(carrier.tensor)
    fact = None if node is None else facts.finder.op(node)
    if fact is not None:
        place = resolve(fact.site)
        return (None, None) if place is None else (place.statement_span("", "culprit"), (place.function or "").rpartition(".")[2] or None)
    holding = carrier.holding
    found = None if holding is None or holding.owner is None else class_node(type(holding.owner))
    if found is None or holding is None or node is None:
        return None, None
    source, definition = found
    written = f"self.{holding.attribute}"
    writes = [item for item in inside(definition, ast.AugAssign, ast.Call) if _writes(item, written, op_name(node))]
    if len(writes) != 1:
        return None, None
    return statement_span(source, writes[0], ""), source.qualname_around(writes[0]).rpartition(".")[2]


def _writes(node: ast.AST, written: str, op: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return dotted(node.target) == written and _AUGMENTED.get(type(node.op)) == op
    return isinstance(node, ast.Call) and dotted(node.func) == f"{written}.{op}_"
