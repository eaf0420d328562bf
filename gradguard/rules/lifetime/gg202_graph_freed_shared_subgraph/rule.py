"""# GG202 graph-freed-shared-subgraph

## What it is
Two backward() calls of one step go through a common part of the graph: a generator's batch that both losses use, a trunk under
two heads, a custom Function whose own inner graph is differentiated for each.

## Why it is wrong
The first backward() frees the saved values of everything it goes through, the common part included.

## Example
    fake = generator(noise)
    loss_d = criterion(discriminator(fake), zeros)
    loss_d.backward()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()

## Use instead
    fake = generator(noise)
    loss_d = criterion(discriminator(fake.detach()), zeros)
    loss_d.backward()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()

## Fix safety
Where the first loss is not to train what lies behind the shared tensor, `.detach()` is right. Where both losses train it, add
them up and call backward() once. `retain_graph=True` on the first call is right only where both calls must be separate and no
optimizer.step() changes the parameters between them. The turns of one loop over a tensor made before it are such losses: add
them up, or make the tensor in each turn; detached, what is behind it would be trained by none.

## When it speaks, what silences it
When backward() fails on a freed graph that was made in this same step, and that another loss's backward() has gone through.
"""

from __future__ import annotations

from gradguard.analysis.graph.walk import op_name
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.syntax import header_range
from gradguard.core.diagnosis import Diagnosis, Fix, Role, SourceSpan
from gradguard.fixes.edits import edit_of, patched
from gradguard.fixes.one_backward import summed
from gradguard.instrumentation.facts import BackwardFact
from gradguard.rules.base import Rule
from gradguard.rules.lifetime import wording
from gradguard.rules.lifetime.gg202_graph_freed_shared_subgraph.sharing import (
    Entry,
    detached_text,
    entry_into_first_loss,
    entry_into_second_loss,
    inner_use,
    likeliest_freeing,
    where_the_loss_is_made,
    whose_parameters,
)
from gradguard.rules.lifetime.gg202_graph_freed_shared_subgraph.turns import are_turns, is_the_only_call, story, turning_place
from gradguard.rules.lifetime.keeping import only_looked_at, retaining
from gradguard.rules.lifetime.second_backward import MESSAGES, Study, study


def recognise(incident: Incident) -> Diagnosis | None:
    facts = study(incident)
    if facts is None or facts.cause != "shared":
        return None
    if facts.inner:
        return _inner(facts)
    if facts.carrier is None:
        return _part_of_a_larger_loss(facts)
    first = facts.freed_by = likeliest_freeing(facts, facts.carrier)
    if first is not None and first.kind == "grad":
        return _freed_by_grad(facts, first)
    side = whose_parameters(facts, facts.carrier)
    if are_turns(facts) and (side == "both" or is_the_only_call(facts)):
        return _turns(facts)
    if side == "first":
        return _not_detached(facts)
    if side == "second":
        return _second_not_detached(facts)
    return _two_losses(facts)


def _not_detached(facts: Study) -> Diagnosis:
    """The first loss was to train something else: the shared tensor went into it attached."""
    carrier = facts.carrier
    assert carrier is not None
    name = wording.holder_name(carrier)
    entry = entry_into_first_loss(facts, carrier)
    again = facts.freed_by is not None and facts.call is not None and facts.freed_by.stack == facts.call.stack
    which = "this loss" if again else "the first loss"
    if entry is not None and again and len(facts.graph.roots) == 1:
        entry = where_the_loss_is_made(facts, entry, facts.graph.roots[0])
    first = _place_apart(facts.freed_by, facts.call)
    culprit: SourceSpan | None = None
    if entry is not None:
        culprit = _statement_span(entry, f"{entry.name} goes into {which} with its graph")
    elif first is not None:
        culprit = first.span("goes through the shared graph and frees it", "culprit")
    needed = "The next turn of the loop goes through it once more." if again else "The second loss needs it."
    text = (
        f"{name} was made once and goes into {'the loss of each turn' if again else 'two losses'}. "
        f"{_first_words(facts)} ran through {name} into the parameters "
        "behind it, which its optimizer does not train, and freed that graph "
        f"(backward call {facts.freed_by.index if facts.freed_by else '?'}). {needed}"
    )
    written = entry.name if entry is not None else (carrier.name or "the tensor")
    fix = Fix(
        title=f"use `{detached_text(facts, written)}` in {which}" if written != "the tensor" else f"detach the shared tensor in {which}",
        safety="unsafe",
        detail=("it then trains what its own optimizer holds, and the graph stays whole for the other"),
        patch=patched(entry.source, edit_of(entry.read, detached_text(facts, entry.name))) if entry is not None else None,
    )
    avoid = (
        "retain_graph=True would let it run, but the first loss would leave its "
        "gradient in the parameters behind it, and go through that graph for nothing"
    )
    return _diagnosis(
        facts,
        (
            f"{name} goes into {'the loss of each turn' if again else 'two losses'} "
            "with its graph, and the backward() of the first has freed it"
        ),
        culprit,
        text,
        [fix],
        [avoid],
        entry,
    )


def _second_not_detached(facts: Study) -> Diagnosis:
    """The first loss trains what is behind the shared tensor; the second one, of another optimizer, was to use its value only."""
    carrier = facts.carrier
    assert carrier is not None
    name = wording.holder_name(carrier)
    entry = entry_into_second_loss(facts, carrier)
    here = _place_apart(facts.call, facts.freed_by)
    written = entry.name if entry is not None else (carrier.name or "the tensor")
    culprit = _statement_span(entry, f"{entry.name} goes into the second loss with its graph") if entry is not None else None
    if culprit is None and here is not None:
        culprit = here.span("goes through the graph of the first loss as well", "culprit")
    text = (
        f"{name} belongs to the first loss: {_first_words(facts)} "
        "trained what is behind it, and freed that graph (backward call "
        f"{facts.freed_by.index if facts.freed_by else '?'}). The second loss trains "
        f"other parameters, and still runs into it because {f'`{written}`' if written != 'the tensor' else 'it'} was not detached."
    )
    fix = Fix(
        title=f"use `{detached_text(facts, written)}` in the second loss"
        if written != "the tensor"
        else "detach the shared tensor in the second loss",
        safety="unsafe",
        detail=("the second loss then trains its own parameters only, with the value as it is"),
        patch=patched(entry.source, edit_of(entry.read, detached_text(facts, entry.name))) if entry is not None else None,
    )
    avoid = (
        "retain_graph=True on the first call would send the second loss into parameters "
        "that are not its own, and fails once optimizer.step() has changed them"
    )
    return _diagnosis(
        facts,
        f"the second loss still holds the graph of `{written}`, which the backward() of the first has freed",
        culprit,
        text,
        [fix],
        [avoid],
    )


def _two_losses(facts: Study) -> Diagnosis:
    """Both losses train the common part: one sum, one backward."""
    carrier = facts.carrier
    assert carrier is not None
    name = wording.holder_name(carrier)
    first = _place_apart(facts.freed_by, facts.call)
    culprit = None if first is None else first.span("frees the part that both losses share", "culprit")
    text = (
        f"Both losses are computed from {name}. {_first_words(facts)} "
        f"freed the saved values of everything below its loss, the part behind {name} "
        f"included (backward call {facts.freed_by.index if facts.freed_by else '?'}); "
        f"{_next(facts)} has to go through that part again."
    )
    stepped = any(fact.seq >= facts.freed_by.seq for fact in facts.incident.journal.steps) if facts.freed_by is not None else False
    once = None if stepped else summed(first, _place_apart(facts.call, facts.freed_by))
    fixes = [
        Fix(
            title="add the losses up and call backward() once on the sum" + (f": `{once[0]}`" if once is not None else ""),
            safety="unsafe" if stepped else "safe",
            patch=None if once is None else once[1],
            detail="gradients add up just the same, and the common part is gone through once"
            if not stepped
            else "one optimizer step for both, in place of the two",
        )
    ]
    if not stepped:
        fixes.append(
            Fix(
                title=f"pass retain_graph=True in the first call, {_first_words(facts)}, where the two must stay apart",
                safety="manual",
            )
        )
    fixes.append(Fix(title=f"`.detach()` {name} in one of the losses, if that one is not to train what is behind it", safety="unsafe"))
    avoid = (
        [
            (
                "retain_graph=True would not repair this: optimizer.step() between "
                "the two calls changes parameters that the shared graph has saved"
            )
        ]
        if stepped
        else []
    )
    return _diagnosis(
        facts, f"two losses share the graph of {name}, and the backward() of the first has freed it", culprit, text, fixes, avoid
    )


def _turns(facts: Study) -> Diagnosis:
    """One call in a loop: a part that was made before it serves the loss of each turn."""
    assert facts.carrier is not None
    headline, text, fixes = story(facts, wording.holder_name(facts.carrier))
    place = turning_place(facts)
    culprit = None if place is None else place.span("frees the part that the next turn needs", "culprit")
    avoid = ["`.detach()` in the losses: the error goes away, and what is behind is trained by none of them"]
    return _diagnosis(facts, headline, culprit, text, fixes, avoid)


def _freed_by_grad(facts: Study, first: BackwardFact) -> Diagnosis:
    """An autograd.grad for a penalty or for the log took the graph with it."""
    carrier = facts.carrier
    assert carrier is not None
    place = _place(first)
    name = wording.holder_name(carrier)
    words = wording.call_words(first)
    graph = "a graph" if name == "a tensor" else f"the graph of {name}"
    stepped = any(fact.clock > first.clock for fact in facts.incident.journal.steps)
    again = facts.call is not None and facts.call.stack == first.stack and not stepped
    needed = "its next call" if again else "the loss" if facts.call is not None and facts.call.kind == "backward" else "the next call"
    culprit = None if place is None else place.span(f"frees the graph that {needed} still needs", "culprit")
    text = f"{words} freed {graph} as backward() does; {_next(facts)} has to go through it again."
    looked_at = only_looked_at(place)
    create = Fix(
        title=f"pass create_graph=True to {words} if its result goes into the loss, such as a gradient penalty",
        safety="manual",
    )
    if again:
        keep = Fix(
            title=f"pass retain_graph=True to {words}: one graph serves all of its calls",
            safety="safe",
            patch=retaining(place),
        )
        fixes = [keep] if looked_at or (place is not None and "create_graph" in place.keywords) else [keep, create]
    elif looked_at:
        fixes = [Fix(title=f"pass retain_graph=True to {words}: its result is only looked at", safety="safe")]
    else:
        fixes = [create, Fix(title="pass retain_graph=True to it if its result is only looked at", safety="safe")]
    who = "backward()" if facts.call is not None and facts.call.kind == "backward" else _next(facts)
    return _diagnosis(facts, f"{words} has freed {graph}, which {who} still needs", culprit, text, fixes, [])


def _next(facts: Study) -> str:
    """The failing call; of two turns at one and the same call, the later."""
    first, call = facts.freed_by, facts.call
    if first is not None and call is not None and first.stack == call.stack:
        return "its next call"
    return wording.call_words_apart(call, first)


def _first_words(facts: Study) -> str:
    return wording.call_words_apart(facts.freed_by, facts.call)


def _inner(facts: Study) -> Diagnosis:
    """A custom Function differentiates a graph of its own in its backward, and is asked twice."""
    first = _place(facts.freed_by)
    here = _place(facts.call)
    function = (first or here).function.rpartition(".")[0] if (first or here) is not None else ""  # type: ignore[union-attr]
    name = f"`{function}`" if function else "a custom autograd.Function"
    culprit = None if first is None else first.span("frees the Function's own inner graph", "culprit")
    related = [] if here is None else [here.span("needs that inner graph again", "backward")]
    outer = [fact for fact in (_outer(facts, facts.freed_by), _outer(facts, facts.call)) if fact is not None]
    for fact, label in zip(outer, ("the first backward through it", "the second backward through it"), strict=False):
        place = _place(fact)
        if place is not None:
            related.append(place.span(label, "backward"))
    inner = facts.incident.names.tensor(facts.incident.roots[0]) if facts.incident.roots else None
    what = f"the inner graph of `{inner}`" if inner else "the graph it keeps on ctx"
    text = (
        f"The backward of {name} differentiates {what}, and {wording.call_words(facts.freed_by)} "
        f"lets its saved values go. The next backward through {name} needs it again. "
        "retain_graph=True on the outer call does not reach an inner graph."
    )
    fix = Fix(
        title=f"pass retain_graph=True to {wording.call_words(facts.freed_by)}: the inner graph lives as long as ctx does",
        safety="safe",
        patch=retaining(first),
    )
    alternative = Fix(title="call backward() once, on the sum of the losses", safety="manual")
    culprit_name = f"{name} frees its own inner graph in its backward, and a second backward goes through it"
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        headline=culprit_name,
        culprit=culprit,
        related=wording.without_repeats(culprit, related),
        tensors=wording.tensor_facts(inner, facts.incident.roots[0] if facts.incident.roots else None),
        explanation=text,
        notes=wording.notes(facts),
        fixes=[fix, alternative],
        avoid=["retain_graph=True on the outer backward() alone changes nothing here"],
    )


def _outer(facts: Study, inner: BackwardFact | None) -> BackwardFact | None:
    """The call of the program's within which an inner one ran."""
    if inner is None:
        return None
    return next((fact for fact in reversed(facts.incident.journal.backwards) if fact.index < inner.index and not fact.nested), None)


def _part_of_a_larger_loss(facts: Study) -> Diagnosis:
    root = facts.incident.roots[0] if facts.incident.roots else None
    name = facts.incident.names.tensor(root) if root is not None else None
    shown = f"`{name}`" if name else f"the result of `{op_name(facts.graph.roots[0])}`"
    place = _place(facts.call)
    culprit = None if place is None else place.span("goes through a graph that an earlier call has used up", "culprit")
    text = (
        f"{shown} is part of a loss that was backpropagated before: its graph "
        f"was freed {wording.freed_words(facts)}, with all that it was made from."
    )
    fixes = [
        Fix(title=f"take the second call out: {wording.call_words(facts.freed_by)} has given its gradient already", safety="unsafe"),
        Fix(title=f"pass retain_graph=True to {wording.call_words(facts.freed_by)} if both gradients are wanted", safety="manual"),
    ]
    return _diagnosis(facts, f"{shown} is part of a loss whose backward() has already freed its graph", culprit, text, fixes, [])


def _place_apart(fact: BackwardFact | None, other: BackwardFact | None) -> ResolvedSite | None:
    return resolve(wording.parting(fact, other))


def _place(fact: BackwardFact | None) -> ResolvedSite | None:
    return None if fact is None else resolve(fact.site)


def _statement_span(entry: Entry, label: str, role: Role = "culprit") -> SourceSpan:
    return entry.source.span(header_range(entry.statement), label, role, entry.source.qualname_around(entry.statement))


def _diagnosis(
    facts: Study, headline: str, culprit: SourceSpan | None, text: str, fixes: list[Fix], avoid: list[str], entry: Entry | None = None
) -> Diagnosis:
    carrier = facts.carrier
    related: list[SourceSpan] = []
    if carrier is not None:
        if carrier.store is not None and carrier.store.value is not None:
            related.append(carrier.store.span("the shared tensor is made here", "made"))
        related += (
            wording.made_span(facts, carrier, "the shared part ends here")
            if carrier.store is None or not carrier.store.covers(carrier.made)
            else []
        )
    related += wording.freed_span(facts)
    if carrier is not None:
        related += wording.entry_span(facts, carrier, "needed again from here")
    use = inner_use(entry) if entry is not None else None
    if use is not None:
        related.append(_statement_span(use, f"used with its graph here, as {use.name}", "carried"))
    related += wording.backward_span(facts)
    tensors = wording.carrier_facts(carrier) if carrier is not None else []
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        headline=headline,
        culprit=culprit,
        related=wording.without_repeats(culprit, related),
        tensors=tensors,
        explanation=text,
        notes=wording.notes(facts, carrier),
        fixes=fixes,
        avoid=avoid,
        confidence=wording.confidence(facts, carrier) if carrier is not None else "certain",
    )


RULE = Rule(
    code="GG202",
    name="graph-freed-shared-subgraph",
    recognise=recognise,
    priority=50,
    messages=MESSAGES,
    summary="two backward() calls of one step go through a common part of the graph, which the first has freed",
)
