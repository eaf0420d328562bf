"""The old graph that retain_graph=True has kept: a carried state whose history the optimizer has changed under its feet.

The words are those of an in-place error, and name a (transposed) weight; the bug is the state that was never detached
(TORCH_FACTS 34). Told apart from an update between a forward pass and its backward by age: here the value that was
overwritten had been saved before the program last came to this same backward call.
"""

from __future__ import annotations

from gradguard.diagnosis import Diagnosis, SourceSpan, TensorFacts
from gradguard.evidence.carried import Carrier, find_carried_state, previous_turn
from gradguard.evidence.optimizers import holds_memory
from gradguard.evidence.source import resolve
from gradguard.facts import BackwardFact, StepFact
from gradguard.rules.incident import Incident
from gradguard.rules.lifetime import tell
from gradguard.rules.lifetime.resetting import state_fixes

CHANGED = "has been modified by an inplace operation"

AVOID = (
    "retain_graph=True: it keeps the old graph and not the weights that graph was computed with; without it the "
    "next error is that the graph has been freed, and with it memory and time grow with every step"
)


def recognise(incident: Incident, code: str, name: str) -> Diagnosis | None:
    """The diagnosis, for the rule with this code and name; None where the overwritten value belongs to this turn."""
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
    if carrier is None or carrier.store is None or carrier.renewal != "each step":
        return None
    return _told(incident, carrier, previous, step, state.full, (code, name))


def _step_on(incident: Incident, storage: int, since: int) -> StepFact | None:
    """The first optimizer step since that changed this memory."""
    steps = (fact for fact in incident.journal.steps if fact.seq > since)
    return next((fact for fact in steps if holds_memory(fact.optimizer(), storage)), None)


def _told(incident: Incident, carrier: Carrier, previous: BackwardFact, step: StepFact, parameter: str, rule: tuple[str, str]) -> Diagnosis:
    holder = tell.holder_name(carrier)
    bare = holder.replace("`", "")
    assert carrier.store is not None and incident.call is not None
    culprit = carrier.store.span(f"{bare} keeps its graph from step to step")
    call = resolve(incident.call.site)
    stepped = resolve(step.site)
    optimizer = step.optimizer()
    stepping = incident.names.optimizer(optimizer) if optimizer is not None else step.type_name
    spans: list[SourceSpan | None] = [
        None if call is None else call.span("goes back into the step before", "backward"),
        None if stepped is None else stepped.span(f"changed `{parameter}`, which the step before had used", "changed"),
    ]
    kept = ", kept by `retain_graph=True`" if previous.retain_graph else ""
    facts: list[TensorFacts] = tell.carrier_facts(carrier)
    return Diagnosis(
        code=rule[0],
        name=rule[1],
        severity="error",
        headline=f"{holder} carries the graph of an earlier step into this one, and `{stepping}.step()` has changed the weights it needs",
        culprit=culprit,
        related=tell.without_repeats(culprit, [span for span in spans if span is not None]),
        tensors=facts,
        explanation=(
            f"{holder} still has the graph of the step that made it{kept}. This backward() goes through it and needs `{parameter}` as it "
            f"was then; `{stepping}.step()` has written the new weights over it. That is why PyTorch speaks of an in-place operation: "
            "the update is right, the history that reaches behind it is not."
        ),
        notes=[*(["`retain_graph=True` is not needed once the value is detached"] if previous.retain_graph else []), *_unseen(incident)],
        fixes=state_fixes(carrier, holder, call, incident.journal, previous),
        avoid=[AVOID],
        confidence="certain" if carrier.made is not None else "likely",
    )


def _unseen(incident: Incident) -> list[str]:
    return [] if incident.traced else [tell.UNTRACED]
