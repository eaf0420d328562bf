"""A state that was kept to be restored later, and is the parameters' own memory: by then it holds what they hold. Part of GG615."""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.monitors.own_state import KeptState
from gradguard.rules import wording


def told(incident: Incident, finding: KeptState, code: str, name: str) -> Diagnosis | None:
    """Where the state was kept, and where it is loaded."""
    module, kept, place = finding.module(), resolve(finding.kept), resolve(finding.site)
    if module is None:
        return None
    receiver = place.receiver if place is not None and (place.callee or "").endswith(".load_state_dict") else None
    shown = receiver or incident.names.module_path(module) or type(module).__name__
    since = f"{finding.steps} steps have changed" if finding.steps else "was loaded in between"
    culprit = None if kept is None else kept.span(f"gives out the memory of `{shown}`: no copy is made", "culprit")
    loading = None if place is None else place.span(f"copies the values of `{shown}` onto themselves", "context")
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"The state of `{shown}` that is loaded is no copy but its own memory: what {since} stays",
        culprit=culprit,
        related=wording.spans(loading),
        tensors=wording.facts(module.parameters(), incident.names),
        explanation=f"`state_dict()` gives tensors on the memory of the parameters. The state that was kept has followed `{shown}` ever "
        "since, and loading it restores nothing.",
        fixes=[
            Fix(
                title="Keep a copy: `{name: value.clone() for name, value in ...state_dict().items()}`",
                safety="unsafe",
                reason="what is restored is the state at that time",
                patch=None if kept is None else _patch(kept),
            )
        ],
        confidence="certain",
    )


def _patch(kept: ResolvedSite) -> str | None:
    """The call, with its tensors copied."""
    if kept.source is None or kept.call is None or not (kept.callee or "").endswith("state_dict"):
        return None
    text = kept.source.flat(kept.call)
    return replaced(kept.source, [(kept.call, f"{{name: value.clone() for name, value in {text}.items()}}")])
