"""# GG201 graph-freed-same-root

## What it is
backward() (or autograd.grad) is called a second time on one and the same loss.

## Why it is wrong
The first call has let go of the saved values. In a loop it means more: the loss was computed once, before the loop, so every
step would get the gradient of the very first parameters.

## Example
    loss = (model(inputs) - targets).pow(2).mean()
    for epoch in range(100):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

## Use instead
    for epoch in range(100):
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

## Fix safety
Moving the forward pass into the loop changes what is trained on, which is the point. A second call by mistake is simply taken
out. Where the same graph is differentiated twice on purpose, `retain_graph=True` on the first call is right, as long as no
optimizer.step() lies between.

## When it speaks, what silences it
When backward() fails because saved values are freed, and an earlier call had begun at the very same node.
"""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.graph.walk import leaves
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.holders import holdings
from gradguard.analysis.live.names import short_list
from gradguard.analysis.live.stores import Store, stores_of_attribute, stores_of_variable
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.bindings import assignments_to, names_read
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import removed
from gradguard.instrumentation.facts import BackwardFact
from gradguard.rules.base import Rule
from gradguard.rules.lifetime import wording
from gradguard.rules.lifetime.keeping import is_vector_product, vector_product
from gradguard.rules.lifetime.moving import into_iteration
from gradguard.rules.lifetime.second_backward import MESSAGES, Study, study
from gradguard.torch_compat.private_api import storage_key

AVOID_LOOP = (
    "retain_graph=True would only hide it: every step would use the gradient "
    "of a loss that was computed once, with the first parameters (or fail "
    "with the in-place error after optimizer.step())"
)


def recognise(incident: Incident) -> Diagnosis | None:
    facts = study(incident)
    if facts is None or facts.cause != "same root" or not incident.roots:
        return None
    name = incident.names.tensor(incident.roots[0])
    shown = f"`{name}`" if name else "the same loss"
    first = facts.freed_by
    if is_vector_product(facts) and not _changed_since(facts, first):
        return vector_product(facts, shown, RULE.code, RULE.name)
    repeated = first is not None and facts.call is not None and first.stack == facts.call.stack
    return _in_a_loop(facts, shown, name) if repeated else _twice(facts, shown, first)


def _in_a_loop(facts: Study, shown: str, name: str | None) -> Diagnosis:
    store = _stored(facts, name)
    made = facts.finder.site(facts.graph.roots[0])
    culprit = None
    if store is not None:
        culprit = store.span("computed once, outside of what is repeated")
    elif made is not None:
        culprit = made.statement_span("computed once, outside of what is repeated", "culprit")
    feeding = _feeding(store, facts)
    inputs = f", with {short_list(feeding)} that it is made from" if feeding else ""
    explanation = (
        f"{shown} was computed once{inputs}, and each turn of the loop calls backward() "
        f"on that same tensor. Its graph was freed {wording.freed_words(facts)}; "
        "a new gradient needs a new forward pass with the parameters as they are now."
    )
    patch = None if store is None else into_iteration(facts, store)
    closure = _closure(facts)
    into = f"the function `{closure}`" if closure else "the loop"
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        headline=(f"backward() runs again on {shown}, which was computed once, outside {into}"),
        culprit=culprit,
        related=wording.without_repeats(culprit, wording.backward_span(facts, "the second turn fails here")),
        tensors=wording.tensor_facts(name, facts.incident.roots[0]),
        explanation=explanation,
        notes=wording.notes(facts),
        fixes=[
            Fix(
                title=(f"move the forward pass that makes {shown}{' (' + short_list(feeding) + ')' if feeding else ''} into {into}"),
                safety="safe" if patch else "manual",
                patch=patch,
            )
        ],
        avoid=[AVOID_LOOP],
        confidence="certain" if culprit is not None else "likely",
    )


def _twice(facts: Study, shown: str, first: BackwardFact | None) -> Diagnosis:
    """Two calls in a row; of an `autograd.grad` and a later call, the former should have kept the graph."""
    call = facts.call
    here = resolve(_apart(call, first)) if call is not None else facts.incident.place
    before = None if first is None else resolve(_apart(first, call))
    by_grad = first is not None and first.kind == "grad"
    if by_grad and before is not None:
        culprit: SourceSpan | None = before.span("frees the graph, which is needed once more", "culprit")
        related = [*wording.backward_span(facts, "needs the same graph again")]
    else:
        culprit = None if here is None else here.span("goes through the same graph a second time", "culprit")
        related = [] if before is None else [before.span("freed the graph here (the first call)", "freed")]
        related += wording.backward_span(facts)
    made = facts.finder.site(facts.graph.roots[0])
    if made is not None:
        related.append(made.span("the loss was made here", "made"))
    text = f"The graph of {shown} was freed {wording.freed_words(facts)}. A second call on the same loss finds no saved values."
    keep = Fix(
        title=f"pass retain_graph=True to {wording.call_words(first)} if both are wanted",
        safety="manual",
        detail=None if by_grad else "gradients of two backward() calls add up in .grad",
    )
    alone = here is not None and here.source is not None and isinstance(here.statement, ast.Expr) and here.statement.value is here.node
    once = Fix(
        title=f"call backward() once on {shown}: take {wording.call_words(call)} out, or call it on the loss that was meant",
        safety="unsafe",
        patch=removed(here.source, here.statement.lineno, here.statement.end_lineno or here.statement.lineno)
        if alone and here is not None and here.source is not None and here.statement is not None
        else None,
    )
    avoid = ["retain_graph=True on the first call makes the second run, but its gradient is then added once more: every gradient doubled"]
    changed = _changed_since(facts, first)
    if changed:
        were = "was" if len(changed) == 1 else "were"
        text += f" {short_list(changed, 3)} {were} changed in between: the same graph would give the gradient at the old values."
        once = Fix(title=f"compute {shown} anew before the second call, from the parameters as they are then", safety="manual")
        avoid = [
            "retain_graph=True on the first call would only lead to the next error: parameters that the graph has saved were changed "
            "in place"
        ]
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        headline=f"backward() is called a second time on {shown}, whose graph the first call has freed"
        if not by_grad
        else f"{wording.call_words(first)} has freed the graph of {shown}, which is needed once more",
        culprit=culprit,
        related=wording.without_repeats(culprit, related),
        tensors=wording.tensor_facts(shown.strip("`") if shown[0] == "`" else None, facts.incident.roots[0]),
        explanation=text,
        notes=wording.notes(facts),
        fixes=[once] if changed else [keep] if by_grad else [once, keep],
        avoid=[] if by_grad and not changed else avoid,
        confidence="certain",
    )


def _changed_since(facts: Study, first: BackwardFact | None) -> list[str]:
    """The parameters of the graph that were written in place after the first call, as far as that was traced."""
    if first is None:
        return []
    names = facts.incident.names
    written = {write.storage for write in facts.incident.journal.writes if write.clock > first.clock}
    return [names.leaf(leaf) or "a parameter" for leaf in leaves(facts.graph.roots) if storage_key(leaf) in written]


def _apart(fact: BackwardFact | None, other: BackwardFact | None) -> CallSite | None:
    """Where two calls part: their own lines, or, for calls in one helper, the helper's callers."""
    if fact is None:
        return None
    if other is None:
        return fact.site
    for mine, theirs in zip(fact.stack, other.stack, strict=False):
        if mine != theirs:
            return mine
    return fact.site


def _closure(facts: Study) -> str | None:
    """The function around the failing call, when the loop is outside of it: an optimizer's closure, a step function."""
    place = resolve(facts.call.site) if facts.call is not None else None
    return None if place is None or place.enclosing_loops or place.function == "<module>" else place.function.rpartition(".")[2]


def _stored(facts: Study, name: str | None) -> Store | None:
    """The statement that computes the loss, as far out as its variable is set."""
    root = facts.incident.roots[0]
    for view in facts.finder.frames:
        for variable, value in view.locals.items():
            if value is root:
                stores = stores_of_variable(variable, view, container=False)
                if stores:
                    return _nearest(stores, facts)
    for holding in holdings([root], facts.finder.frames, facts.finder.ignore)[0]:
        stores = stores_of_attribute(holding, facts.finder.frames) if holding.owner is not None else []
        if stores:
            return _nearest(stores, facts)
    return None


def _nearest(stores: list[Store], facts: Study) -> Store:
    made = facts.finder.site(facts.graph.roots[0])
    return next((store for store in stores if store.covers(made)), stores[-1])


def _feeding(store: Store | None, facts: Study) -> list[str]:
    """The variables computed for this loss on the way, in the same block, that must move with it."""
    if store is None:
        return []
    scope = store.function or store.source.tree
    block = store.source.parents.get(store.statement)
    if scope is None or block is None:
        return []
    found: dict[str, None] = {}
    wanted = names_read(store.source, [store.value]) if store.value is not None else []
    for name in wanted:
        if name in found or len(found) > 12:
            continue
        for statement in assignments_to(scope, name):
            if (
                store.source.parents.get(statement) is block
                and statement.lineno < store.line
                and isinstance(statement, ast.Assign)
                and _differentiable(name, facts)
            ):
                found.setdefault(name)
                wanted.extend(names_read(store.source, [statement.value]))
    return list(found)


def _differentiable(name: str, facts: Study) -> bool:
    """Whether a variable of the frames around holds a tensor with a graph."""
    value = next((view.locals[name] for view in facts.finder.frames if name in view.locals), None)
    return isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None


RULE = Rule(
    code="GG201",
    name="graph-freed-same-root",
    recognise=recognise,
    priority=50,
    messages=MESSAGES,
    summary="backward() is called twice on one loss, or on a loss that was computed outside the loop",
)
