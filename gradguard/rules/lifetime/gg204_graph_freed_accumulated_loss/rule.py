"""# GG204 graph-freed-accumulated-loss

## What it is
A running sum of losses is backpropagated again and again: the sum contains the losses of earlier steps, whose graphs the
earlier backward() calls have freed.

## Why it is wrong
Each backward would go through all losses so far: what has been counted is counted again. A sum for the log must not carry
graphs, and a sum to train on is backpropagated once, at its end.

## Example
    total_loss = 0
    for inputs, targets in loader:
        total_loss += criterion(model(inputs), targets)
        total_loss.backward()

## Use instead
    total_loss = 0.0
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        loss.backward()
        total_loss += loss.item()

## Fix safety
Backward on the step's own loss is what was meant, and frees nothing that is needed later. With `retain_graph=True` the
gradients of early losses would be added again in every step (and optimizer.step() between them makes it fail all the same).

## When it speaks, what silences it
When backward() fails on a freed graph, and a loss that was backpropagated before is an addend of the new one: it is reached
from the new root through sums alone.
"""

from __future__ import annotations

import ast

from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.stores import Store
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.bindings import assignments_to, dotted, uses_of
from gradguard.analysis.program.defuse import reads_of
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import after, edit_of, patched
from gradguard.rules.base import Rule
from gradguard.rules.lifetime import wording
from gradguard.rules.lifetime.gg204_graph_freed_accumulated_loss.restarting import new_sum
from gradguard.rules.lifetime.second_backward import MESSAGES, Study, binding_store, study

AVOID = (
    "retain_graph=True would count the earlier losses again in every step and "
    "keep all their graphs in memory; after optimizer.step() it fails with the "
    "in-place error"
)


def recognise(incident: Incident) -> Diagnosis | None:
    facts = study(incident)
    if facts is None or facts.cause != "accumulated" or facts.carrier is None:
        return None
    carrier = facts.carrier
    added = wording.entry_place(facts, carrier)
    if carrier.store is None and added is None:
        carrier.store = _summed_here(facts)
    name = _name(facts, carrier, added)
    culprit = _culprit(facts, carrier, added)
    explanation = (
        f"{name} adds this step's loss to losses that were backpropagated before. "
        f"Their graphs were freed {wording.freed_words(facts)}, and backward() on the sum "
        "goes through every addend."
    )
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        headline=(
            f"{name} still contains losses of earlier steps, whose graphs are freed: backward() on the sum would go through them again"
        ),
        culprit=culprit,
        related=wording.without_repeats(
            culprit,
            [
                *wording.made_span(facts, carrier, "the earlier loss was made here"),
                *wording.freed_span(facts),
                *wording.backward_span(facts),
            ],
        ),
        tensors=wording.tensor_facts(name.strip("`"), facts.incident.roots[0] if facts.incident.roots else None),
        explanation=explanation,
        notes=wording.notes(facts),
        fixes=_fixes(facts, carrier, name),
        avoid=[AVOID],
        confidence="certain" if added is not None else "likely",
    )


def _summed_here(facts: Study) -> Store | None:
    """Untraced: the statement that adds to what backward is called on, from the source alone."""
    place = resolve(facts.call.site) if facts.call is not None else None
    if place is None or place.source is None or place.receiver is None:
        return None
    scope = place.enclosing_function or place.source.tree
    found = (
        [statement for statement in assignments_to(scope, place.receiver) if _adds_to(statement, place.receiver)]
        if scope is not None
        else []
    )
    return Store(place.source, found[-1], "carried") if found else None


def _adds_to(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add)
    return isinstance(statement, ast.Assign) and bool(reads_of(statement.value, name))


def _name(facts: Study, carrier: Carrier, added: ResolvedSite | None) -> str:
    """What the sum is called: the variable it is added to, what backward is called on."""
    if carrier.store is not None and isinstance(carrier.store.statement, ast.AugAssign):
        return f"`{dotted(carrier.store.statement.target) or carrier.name}`"
    root = facts.incident.roots[0] if facts.incident.roots else None
    name = carrier.name or (facts.incident.names.tensor(root) if root is not None else None)
    if name is None and added is not None and added.targets:
        name = added.targets[0]
    return f"`{name}`" if name else "the loss"


def _culprit(facts: Study, carrier: Carrier, added: ResolvedSite | None) -> SourceSpan | None:
    label = "adds to a sum whose earlier part has been backpropagated"
    store = binding_store(facts, carrier)
    if store is not None:
        return store.span("is kept with its graph, and summed again in the next step" if carrier.how == "container" else label)
    return None if added is None else added.statement_span(label, "culprit")


def _fixes(facts: Study, carrier: Carrier, name: str) -> list[Fix]:
    plain = name.strip("`")
    if carrier.how != "container" and not _is_sum(carrier):
        return [
            Fix(
                title=f"call backward() on this step's own loss, and keep {name} as a number (`.item()` of what goes into it)",
                safety="unsafe",
                detail="the gradients become those of each loss once",
            )
        ]
    keep = (
        f"keep its value: `{plain}.append(loss.detach())`"
        if carrier.how == "container" and _is_joined(carrier, plain)
        else f"keep its number: `{plain}.append(loss.item())`"
        if carrier.how == "container"
        else f"add its number to {name}: `{plain} += loss.{_number(carrier.store)}`"
    )
    window = None if carrier.how == "container" else new_sum(facts, carrier, plain)
    if window is not None:
        return [
            window,
            Fix(title=f"call backward() on each loss as it is made, and {keep}", safety="unsafe"),
        ]
    return [
        Fix(
            title=f"call backward() on this step's own loss, and {keep}",
            safety="unsafe",
            detail="the gradients become those of each loss once",
            patch=_patch(facts, carrier.store),
        ),
        Fix(title="if one update for all of them is meant, move backward() and optimizer.step() behind the loop", safety="manual"),
    ]


def _is_joined(carrier: Carrier, name: str) -> bool:
    """Whether the container's items are stacked somewhere, which numbers cannot be."""
    tree = None if carrier.store is None else carrier.store.source.tree
    joins = calls_inside(tree, "stack", "cat", "hstack", "vstack", "concat")
    return any(dotted(node) == name for call in joins for node in inside(call, ast.Attribute, ast.Name))


def _is_sum(carrier: Carrier) -> bool:
    """Whether the line that keeps it adds to it: an average weighs the earlier losses, and `+=` would not replace it."""
    statement = None if carrier.store is None else carrier.store.statement
    if isinstance(statement, ast.AugAssign) or statement is None:
        return True
    value = getattr(statement, "value", None)
    return not (isinstance(value, ast.BinOp) and any(isinstance(node.op, (ast.Mult, ast.Div)) for node in inside(value, ast.BinOp)))


def _number(store: Store | None) -> str:
    """How a loss becomes a number for a sum: without its graph alone, where the sum is read as a tensor."""
    statement = None if store is None else store.statement
    if store is None or not isinstance(statement, ast.AugAssign) or (name := dotted(statement.target)) is None:
        return "item()"
    read = [store.source.parents.get(each) for each in inside(store.source.tree, ast.Name, ast.Attribute) if dotted(each) == name]
    return "detach()" if any(isinstance(above, ast.Attribute) and above.attr != "backward" for above in read) else "item()"


def _patch(facts: Study, store: Store | None) -> str | None:
    """`total += value; total.backward()` becomes `loss = value; loss.backward(); total += loss.item()`, where both stand in one block."""
    call = facts.call
    place = resolve(call.site) if call is not None else None
    if (
        store is None
        or place is None
        or place.source is not store.source
        or place.call is None
        or not isinstance(store.statement, ast.AugAssign)
    ):
        return None
    statement, backward = store.statement, place.statement
    target = dotted(statement.target)
    function = store.function or store.source.tree
    if (
        target is None
        or function is None
        or not isinstance(backward, ast.Expr)
        or place.receiver != target
        or not isinstance(statement.op, ast.Add)
    ):
        return None
    if store.source.parents.get(statement) is not store.source.parents.get(backward):
        return None
    receiver = place.call.func.value if isinstance(place.call.func, ast.Attribute) else None
    value = dotted(statement.value)
    loss = value or ("loss" if not uses_of(function, "loss") else "batch_loss")
    if receiver is None or (value is None and uses_of(function, loss)):
        return None
    changes = edit_of(receiver, loss)
    number = f"{loss}.{_number(store)}"
    if value is None:
        changes += edit_of(statement, f"{loss} = {store.source.flat(statement.value)}")
        return patched(store.source, changes, [after(store.source, backward, f"{target} += {number}")])
    return patched(store.source, [*changes, *edit_of(statement.value, number)])


RULE = Rule(
    code="GG204",
    name="graph-freed-accumulated-loss",
    recognise=recognise,
    priority=50,
    messages=MESSAGES,
    summary="a running sum of losses is backpropagated in every step, earlier losses included",
)
