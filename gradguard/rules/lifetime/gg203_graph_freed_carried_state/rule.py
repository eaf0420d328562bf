"""# GG203 graph-freed-carried-state

## What it is
A tensor that an earlier step made (a recurrent state, a memory bank's entry, a running average) feeds this step with its
graph still attached. That step's backward() has freed the graph, and this one would have to go through it again.

## Why it is wrong
Every step's graph hangs on the one before, so each backward would run through the whole history. PyTorch frees the saved
values of a graph with its first backward and stops here.

## Example
    for tokens, targets in windows:
        logits, state = model(tokens, state)
        loss = criterion(logits, targets)
        loss.backward()

## Use instead
    for tokens, targets in windows:
        logits, state = model(tokens, state)
        loss = criterion(logits, targets)
        loss.backward()
        state = state.detach()

## Fix safety
`.detach()` at the border of a step keeps the value and drops the history: truncated backpropagation through time. Gradients
within a step do not change. `retain_graph=True` is no cure: the next backward needs the parameters as they were before
optimizer.step() changed them, memory grows with every step, and each backward takes longer.

## When it speaks, what silences it
When backward() fails on a freed graph, the freed part was made before the last call of this same backward, and what carries
it over is made anew in each step (a variable that the loop carries, an attribute or a container that a step fills). Also when
`retain_graph=True` has kept that old graph and backward() fails in it on weights that optimizer.step() has changed since.
"""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.history.carried_graphs import Carrier, called_in
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.alive_tensors import node_of
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.bindings import dotted, targets_of
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import UNKNOWN, elements, follow
from gradguard.fixes.at_places import detached_value
from gradguard.fixes.edits import edit_of, patched
from gradguard.rules.base import Rule
from gradguard.rules.lifetime import kept_by_retain_graph, wording
from gradguard.rules.lifetime.detaching import stored_item
from gradguard.rules.lifetime.gg203_graph_freed_carried_state import overwritten
from gradguard.rules.lifetime.gg203_graph_freed_carried_state.collecting import emptying
from gradguard.rules.lifetime.resetting import is_cleared, learning_kept, state_fixes
from gradguard.rules.lifetime.second_backward import MESSAGES, Study, binding_store, is_overwritten, study

AVOID = (
    "retain_graph=True would not repair this: the old graph needs the "
    "parameters as they were before optimizer.step() changed them, so the next "
    "error is the in-place one, and memory and time would grow with every step"
)


def recognise(incident: Incident) -> Diagnosis | None:
    if incident.says(kept_by_retain_graph.CHANGED):
        return kept_by_retain_graph.recognise(incident, RULE.code, RULE.name)
    facts = study(incident)
    if facts is None or facts.cause != "carried" or facts.carrier is None:
        return None
    carrier = facts.carrier
    if is_overwritten(carrier):
        return overwritten.diagnosis(facts, carrier, RULE.code, RULE.name)
    name = wording.holder_name(carrier)
    culprit = _culprit(facts, carrier, name)
    put = "put there" if carrier.how == "container" else "made"
    explanation = (
        f"{name} still has the graph of the step that made it. That graph's saved values were freed {wording.freed_words(facts)}; "
        f"this backward() reaches it again, because the value was {put} in one step and used in the next without being detached."
    )
    related = [
        *_entered(facts, carrier),
        *wording.made_span(facts, carrier, _made_label(carrier)),
        *wording.freed_span(facts),
        *wording.backward_span(facts),
    ]
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        headline=f"{name} carries the graph of an earlier step into this one, and that step's backward() has already freed it",
        culprit=culprit,
        related=wording.without_repeats(culprit, related),
        tensors=wording.carrier_facts(carrier),
        explanation=explanation,
        notes=wording.notes(facts, carrier),
        fixes=_fixes(facts, carrier, name),
        avoid=[AVOID],
        confidence=wording.confidence(facts, carrier),
    )


def _culprit(facts: Study, carrier: Carrier, name: str) -> SourceSpan | None:
    store = binding_store(facts, carrier)
    if store is not None:
        what = "is stored here with its graph" if carrier.how == "container" else "keeps its graph from step to step"
        return store.span(f"{name.replace('`', '')} {what}")
    return None if carrier.made is None else carrier.made.statement_span("made here with its graph, used again in the next step", "culprit")


def _made_label(carrier: Carrier) -> str:
    """What stands where the newest freed node was made: the carried tensor itself, or what it was made from."""
    itself = carrier.tensor is None or node_of(carrier.tensor) is carrier.link.source
    return "the tensor that carries the old graph was made here" if itself else "the freed part of the old graph ends here"


def _entered(facts: Study, carrier: Carrier) -> list[SourceSpan]:
    place, store = wording.entry_place(facts, carrier), carrier.store
    function = store.function_name.rpartition(".")[2] if store is not None else ""
    # the statement that hands the value to where it is kept stands behind the backward, and still at the end of its step
    handing = place is not None and place.statement is not None and function in called_in(place.statement)
    label = "handed on here with its graph" if handing else "the old graph enters this step here"
    if is_cleared(place):
        label = "sets the values back, and keeps the graph of the step before"
    found = wording.entry_span(facts, carrier, label)
    if not found and carrier.read is not None and carrier.store is not None:
        source = carrier.store.source
        found = [source.span(r, "the value of the step before is read here", "carried") for r in [_range(carrier.read)] if r is not None]
    return found


def _range(node: ast.AST) -> tuple[int, int, int, int] | None:
    from gradguard.analysis.program.syntax import range_of

    return range_of(node)


def _fixes(facts: Study, carrier: Carrier, name: str) -> list[Fix]:
    if carrier.how == "container" and not _assigned_whole(carrier):
        continued = _continued(carrier)
        if continued is not None:
            return [continued]
        emptied = emptying(facts, carrier, name)
        if emptied is not None:
            return [emptied]
        stored = _stored(facts, carrier)
        texts = [text for _, _, text in stored]
        what = " and ".join(f"`{text}`" for text in texts) if texts else "the detached tensor"
        return [
            Fix(
                title=f"store {what} in {name}: it keeps the value and not the history",
                safety="unsafe",
                patch=_patch_container(carrier, stored),
            )
        ]
    call = resolve(facts.call.site) if facts.call is not None else None
    fixes = state_fixes(carrier, name, call, facts.incident.journal, facts.previous, wording.entry_place(facts, carrier))
    fixes = learning_kept(fixes, carrier, name, facts.incident, facts.previous)
    fixes.append(
        Fix(
            title="if the gradient through several steps is wanted, sum their losses and call backward() once for all of them",
            safety="manual",
        )
    )
    return fixes


def _assigned_whole(carrier: Carrier) -> bool:
    """Whether the container is made anew by the statement that stores it, as an LSTM's pair of states is."""
    held = carrier.holding.attribute if carrier.holding is not None else None
    targets = [] if carrier.store is None else targets_of(carrier.store.statement)
    return held is not None and any((dotted(target) or "").rpartition(".")[2] == held for target in targets)


def _continued(carrier: Carrier) -> Fix | None:
    """An item made from the one before in its place (`mean[c] = 0.9 * mean[c] + 0.1 * x`): the old one is to be detached where it is
    read; what is stored may be needed by this step's own loss."""
    store = carrier.store
    if store is None or store.value is None or not isinstance(store.statement, ast.Assign):
        return None
    items = [ast.unparse(target) for target in targets_of(store.statement) if isinstance(target, ast.Subscript)]
    reads = [node for node in inside(store.value, ast.Subscript) if ast.unparse(node) in items]
    if len(reads) != 1 or isinstance(store.source.parents.get(reads[0]), ast.Attribute):
        return None
    item = stored_item(carrier)
    text = detached_value(store.source.flat(reads[0]), carrier.tensor if item is None else item)
    if text is None:
        return None
    return Fix(
        title=f"detach the item of the step before where it is read: `{text}`",
        safety="unsafe",
        detail="the value goes on, its history ends there, and this step's own part keeps its gradient",
        patch=patched(store.source, edit_of(reads[0], text)),
    )


def _stored(facts: Study, carrier: Carrier) -> list[tuple[ast.expr, str, str]]:
    """The names that are stored, with what is to be written in their place, by the values that they have."""
    value = carrier.store.value if carrier.store is not None else None
    arguments = value.args if isinstance(value, ast.Call) else [value] if value is not None else []
    flat = [
        (part, place)
        for argument in arguments
        for place, part in (enumerate(argument.elts) if isinstance(argument, (ast.Tuple, ast.List)) else [(None, argument)])
    ]
    item, found = stored_item(carrier), list[tuple[ast.expr, str, str]]()
    for part, place in flat:
        written = dotted(part)
        if written is None:
            continue
        parts = elements(item) if place is not None else []
        kept = item if place is None else parts[place] if place < len(parts) else None
        live = _live(facts, carrier, written)
        text = detached_value(written, live if live is not None else kept if kept is not None else carrier.tensor)
        if text is not None:
            found.append((part, written, text))
        if place is None:
            break
    return found


def _live(facts: Study, carrier: Carrier, written: str) -> Any:
    """What a name stands for in the running function that stores it."""
    store, (first, _, rest) = carrier.store, written.partition(".")
    for view in facts.finder.frames:
        code = view.site.code
        if store is not None and code.co_name == store.function_name.rpartition(".")[2] and code.co_filename == store.source.filename:
            value = view.locals.get(first)
            value = follow(value, rest) if rest else value
            return None if value is UNKNOWN else value
    return None


def _patch_container(carrier: Carrier, stored: list[tuple[ast.expr, str, str]]) -> str | None:
    """What is stored, detached; a name that is read in other parts of the statement too is left to the reader."""
    if carrier.store is None or not stored:
        return None
    inside_value = [dotted(node) for node in inside(carrier.store.value, ast.Name, ast.Attribute) if isinstance(node.ctx, ast.Load)]
    if any(inside_value.count(written) != 1 for _, written, _ in stored):
        return None
    return patched(carrier.store.source, [edit for part, _, text in stored for edit in edit_of(part, text)])


RULE = Rule(
    code="GG203",
    name="graph-freed-carried-state",
    recognise=recognise,
    priority=50,
    messages=(*MESSAGES, kept_by_retain_graph.CHANGED),
    summary="a tensor of an earlier step (hidden state, memory bank, running average) brings its freed graph into this one",
)
