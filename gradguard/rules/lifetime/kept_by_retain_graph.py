"""The old graph that retain_graph=True has kept: a carried state whose history the optimizer has changed under its feet.

The words are those of an in-place error, and name a (transposed) weight; the bug is the state that was never detached.
Told apart from an update between a forward pass and its backward by age: here the value that was
overwritten had been saved before the program last came to this same backward call.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradguard.analysis.history.carried_graphs import Carrier, find_carried_state, previous_turn
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import holds_memory
from gradguard.analysis.live.stores import Store
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.instrumentation.facts import BackwardFact, StepFact
from gradguard.rules.lifetime import wording
from gradguard.rules.lifetime.resetting import learning_kept, state_fixes

CHANGED = "has been modified by an inplace operation"

AVOID = (
    "retain_graph=True: it keeps the old graph and not the weights that graph was computed with; without it the "
    "next error is that the graph has been freed, and with it memory and time grow with every step"
)


@dataclass(frozen=True, eq=False)
class _Kept:
    """An old graph, what carries it, and the step that changed a parameter it needs."""

    carrier: Carrier
    store: Store
    previous: BackwardFact
    step: StepFact
    parameter: str


def recognise(incident: Incident, code: str, name: str) -> Diagnosis | None:
    """The diagnosis of a state, for the rule with this code and name; None where the overwritten value belongs to this turn."""
    kept = _kept(incident)
    if kept is None or kept.carrier.renewal != "each step":
        return None
    return _told(incident, kept, (code, name))


def recognise_precomputed(incident: Incident, code: str, name: str) -> Diagnosis | None:
    """The same of a value that was made once, before the loop or into a cache, and is used in every turn."""
    kept = _kept(incident)
    if kept is None or kept.carrier.renewal != "once" or kept.store.relation not in ("outside", "cache", "init"):
        return None
    return _told_of_precomputed(incident, kept, (code, name))


def _kept(incident: Incident) -> _Kept | None:
    if "_lifetime_retained" not in vars(incident):
        vars(incident)["_lifetime_retained"] = _look(incident)
    found: _Kept | None = vars(incident)["_lifetime_retained"]
    return found


def _look(incident: Incident) -> _Kept | None:
    call = incident.call
    if incident.where not in ("backward", "grad") or call is None or call.nested or not incident.mismatches:
        return None
    previous = previous_turn(incident.journal, call)
    met = next((item for item in incident.mismatches if item.message == incident.message), incident.mismatches[0])
    if previous is None or met.seq >= previous.seq or met.storage is None:
        return None
    state = incident.names.state(storage=met.storage)
    step = _step_on(incident, met.storage, met.seq)
    if state is None or state.is_buffer or step is None:
        return None
    carrier = find_carried_state(incident.root_nodes, incident.journal, incident.frames, incident.names, call)
    if carrier is None or carrier.store is None:
        return None
    return _Kept(carrier, carrier.store, previous, step, state.full)


def _step_on(incident: Incident, storage: int, since: int) -> StepFact | None:
    """The first optimizer step since that changed this memory."""
    steps = (fact for fact in incident.journal.steps if fact.seq > since)
    return next((fact for fact in steps if holds_memory(fact.optimizer(), storage)), None)


def _told_of_precomputed(incident: Incident, kept: _Kept, rule: tuple[str, str]) -> Diagnosis:
    holder, parameter = wording.holder_name(kept.carrier), kept.parameter
    culprit = kept.store.span("computed once, with its graph, and used again")
    where = {"cache": "into a cache", "init": "in the constructor"}.get(kept.store.relation, "before the loop")
    stepping = _stepping(incident, kept.step)
    return Diagnosis(
        code=rule[0],
        name=rule[1],
        severity="error",
        headline=f"{holder} was computed once, with its graph, and `{stepping}.step()` has changed the weights that graph needs",
        culprit=culprit,
        related=wording.without_repeats(culprit, _spans(incident, kept, "goes back to where it was computed", "it was computed with")),
        tensors=wording.carrier_facts(kept.carrier),
        explanation=(
            f"{holder} was computed {where}, with the graph that leads to `{parameter}`. Since then `{stepping}.step()` has written new "
            "weights over those it was computed with, and this backward() needs the old ones. That is why PyTorch speaks of an in-place "
            "operation: the update is right, the value is of parameters that are no more."
        ),
        notes=_unseen(incident),
        fixes=[
            Fix(title=f"compute what {holder} holds anew in each step, from the parameters as they are then", safety="manual"),
            Fix(
                title=f"if the parameters behind {holder} are not to be trained, compute it under `torch.no_grad()` or `.detach()` it",
                safety="unsafe",
            ),
        ],
        avoid=["retain_graph=True: it keeps the graph and not the weights that it was computed with"],
        confidence="certain" if kept.carrier.made is not None else "likely",
    )


def _stepping(incident: Incident, step: StepFact) -> str:
    optimizer = step.optimizer()
    return incident.names.optimizer(optimizer) if optimizer is not None else step.type_name


def _spans(incident: Incident, kept: _Kept, back: str, used: str) -> list[SourceSpan]:
    call = None if incident.call is None else resolve(incident.call.site)
    stepped = resolve(kept.step.site)
    spans: list[SourceSpan | None] = [
        None if call is None else call.span(back, "backward"),
        None if stepped is None else stepped.span(f"changed `{kept.parameter}`, which {used}", "changed"),
    ]
    return [span for span in spans if span is not None]


def _told(incident: Incident, of: _Kept, rule: tuple[str, str]) -> Diagnosis:
    carrier, previous, parameter = of.carrier, of.previous, of.parameter
    holder = wording.holder_name(carrier)
    culprit = of.store.span(f"{holder.replace('`', '')} keeps its graph from step to step")
    call = None if incident.call is None else resolve(incident.call.site)
    stepping = _stepping(incident, of.step)
    kept = ", kept by `retain_graph=True`" if previous.retain_graph else ""
    facts: list[TensorFacts] = wording.carrier_facts(carrier)
    return Diagnosis(
        code=rule[0],
        name=rule[1],
        severity="error",
        headline=f"{holder} carries the graph of an earlier step into this one, and `{stepping}.step()` has changed the weights it needs",
        culprit=culprit,
        related=wording.without_repeats(culprit, _spans(incident, of, "goes back into the step before", "the step before had used")),
        tensors=facts,
        explanation=(
            f"{holder} still has the graph of the step that made it{kept}. This backward() goes through it and needs `{parameter}` as it "
            f"was then; `{stepping}.step()` has written the new weights over it. That is why PyTorch speaks of an in-place operation: "
            "the update is right, the history that reaches behind it is not."
        ),
        notes=[*(["`retain_graph=True` is not needed once the value is detached"] if previous.retain_graph else []), *_unseen(incident)],
        fixes=learning_kept(state_fixes(carrier, holder, call, incident.journal, previous), carrier, holder, incident, previous),
        avoid=[AVOID],
        confidence="certain" if carrier.made is not None else "likely",
    )


def _unseen(incident: Incident) -> list[str]:
    return [] if incident.traced else [wording.UNTRACED]
