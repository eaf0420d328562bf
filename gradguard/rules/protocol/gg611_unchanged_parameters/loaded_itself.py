"""A network that is loaded with its own state, where another's was meant: it never follows. Part of GG611."""

from __future__ import annotations

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import named_parameters
from gradguard.fixes.at_places import sees
from gradguard.fixes.edits import replaced
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.own_state import OwnState
from gradguard.rules import wording


def told(incident: Incident, finding: OwnState, code: str, name: str) -> Diagnosis | None:
    """The call, and the one network of the same shapes that an optimizer trains."""
    module, place = finding.module(), resolve(finding.site)
    if module is None or place is None:
        return None
    receiver = place.receiver if (place.callee or "").endswith(".load_state_dict") else None
    shown = receiver or incident.names.module_path(module) or type(module).__name__
    shapes, known = _shapes(module), incident.notes[Ledger].trained_ids()
    paths = [
        path
        for other in {id(m): m for _, root in incident.names.modules for m in root.modules()}.values()
        if other is not module
        and type(other) is type(module)
        and _shapes(other) == shapes
        and any(id(p) in known for p in other.parameters())
        and (path := incident.names.module_path(other)) is not None
    ]
    source = f"{paths[0]}.state_dict()" if len(paths) == 1 else "...state_dict()"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{shown}` is loaded with its own state: nothing changes, now and the time before",
        culprit=place.span(f"copies the values of `{shown}` onto themselves", "culprit"),
        tensors=wording.facts(module.parameters(), incident.names),
        explanation=f"Each tensor that is loaded lies in the memory of the very parameter it is copied to, and nothing has written "
        f"`{shown}` between this call and the one before. A target network that is refreshed like this never follows what is trained.",
        fixes=[
            Fix(
                title=f"Load the state of the network that it is to follow: `{shown}.load_state_dict({source})`",
                safety="unsafe",
                patch=_patch(place, source) if receiver is not None and len(paths) == 1 else None,
            )
        ],
    )


def _patch(place: ResolvedSite, state: str) -> str | None:
    """The call with another state, where what has it can be named there."""
    if place.call is None or not place.call.args or place.source is None or not sees(place, state):
        return None
    return replaced(place.source, [(place.call.args[0], state)])


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in named_parameters(module)]
