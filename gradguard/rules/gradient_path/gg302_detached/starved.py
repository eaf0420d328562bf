"""A GradScaler finds no gradient for an optimizer: the path to its parameters was cut on the way to the loss."""

from __future__ import annotations

from typing import Any

from gradguard.analysis.history import cut_origins
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.sites import UNNAMED
from gradguard.core.diagnosis import Diagnosis
from gradguard.instrumentation.facts import Cut
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.rules.gradient_path import lost_path, patching, wording

MESSAGES = ("no inf checks were recorded for this optimizer",)
_CUTTING = ("detach", "data", "no_grad", "rewrap", "escape")


def recognise(incident: Incident, code: str) -> Diagnosis | None:
    """The one cut value that this step's graph was fed with, if there is just one; else another rule says what is known."""
    place = incident.place
    if place is None or not place.arguments:
        return None
    written = place.arguments[0]
    optimizer: Any = next((value for name, value in incident.names.bindings if name == written and parameters_of(value)), None)
    if optimizer is None:
        return None
    parameters = parameters_of(optimizer)
    if any(p.grad is not None for p in parameters):
        return None
    cut = _only_cut(incident)
    if cut is None:
        return None
    origin = cut_origins.of_cut(incident, cut)
    if wording.rule_of(origin) != code:
        return None
    culprit, related = lost_path.story(origin)
    states = [state for state in map(incident.names.state, parameters) if state is not None]
    names = short_list([state.full for state in states], 3) if states else f"its {len(parameters)} parameters"
    related.append(place.span(f"no gradient has reached the parameters of `{written}`", "backward"))
    root = UNNAMED
    return Diagnosis(
        code=code, name=lost_path.NAMES[code], culprit=culprit, related=related, confidence="likely",
        headline=f"no gradient reaches the parameters of `{written}`: {wording.why(origin, root)}",
        explanation=f"{wording.explanation(origin, root)} The scaler finds no gradient among {names}, and refuses to step.",
        fixes=[patching.with_patch(wording.fix(origin, root), origin)],
    )  # fmt: skip


def _only_cut(incident: Incident) -> Cut | None:
    """The origin of all cut values that went into the graph since the last backward but one (or ever), if it is one place."""
    journal, began_at = incident.journal, incident.notes[Ledger].began_at
    plain = [fact for fact in journal.backwards if fact.kind == "backward" and not fact.nested]
    since = plain[-2].seq if len(plain) > 1 else 0
    for earliest in (since, 0):  # an untraced step: the loop's earlier, traced ones went the same way
        found = {
            cut.site: cut
            for store in (journal.fed, journal.partial)
            for seq, cuts in store.items()
            for cut in cuts
            if seq >= earliest and cut.clock > began_at and cut.kind in _CUTTING
        }
        if found:
            return next(iter(found.values())) if len(found) == 1 else None
    return None
