"""backward() is called on a Python number or an array: where the loss left torch."""

from __future__ import annotations

import ast
import re

from gradguard.analysis.history import cut_origins
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.history.follower import Follower
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import same_place, short
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.rules.gradient_path import lost_path, patching, wording

MESSAGES = ("object has no attribute 'backward'",)
_SAID = re.compile(r"'(?:\w+\.)*(float|int|float16|float32|float64|ndarray)' object has no attribute 'backward'")


def recognise(incident: Incident, code: str) -> Diagnosis | None:
    """The value that backward was asked of, followed through the source to where it became a number."""
    said = _SAID.search(incident.message)
    if said is None or not isinstance(incident.error, AttributeError) or not incident.user_frames:
        return None
    place = resolve(incident.user_frames[0].site)
    node = None if place is None else _asked(place)
    scope = Follower(incident).live(0)
    if place is None or node is None or scope is None:
        return None
    follower = Follower(incident)
    flow = follower.flow(node, scope)
    found = cut_origins.ranked(incident, cut_origins.merged(flow.found))
    escapes = [origin for origin in found if origin.kind == "escape" and origin.place is not None]
    origin = escapes[0] if escapes and len({each.key for each in escapes}) == 1 else None
    if origin is not None and wording.rule_of(origin) != code:
        return None
    kind = "a numpy array" if said[1] == "ndarray" else f"a plain `{said[1]}`"
    return _told(place, short(place.source.flat(node), 40) if place.source is not None else "the loss", kind, origin, code)


def _told(place: ResolvedSite, name: str, kind: str, origin: Origin | None, code: str) -> Diagnosis:
    asked = place.span(f"`{name}` is {kind}, without a graph", "backward")
    culprit: SourceSpan | None = None
    related = [asked]
    headline = f"`{name}` is {kind} and no tensor: there is nothing to go backward through"
    fix = Fix(title=f"Compute `{name}` from tensors", safety="manual", detail="Numbers are for what is logged.")
    if origin is not None:
        culprit, before = lost_path.story(origin)
        related = [*before, *([] if same_place(origin.place, place) else [asked])]
        headline = f"`{name}` is {kind} and no tensor: {wording.why(origin, name)}"
        fix = patching.with_patch(wording.fix(origin, name), origin)
    return Diagnosis(
        code=code, name=lost_path.NAMES[code], headline=headline, culprit=culprit, related=related, confidence="likely",
        explanation="`backward()` is a method of tensors. A Python number or an array holds a value and nothing of how it was computed.",
        fixes=[fix],
        avoid=[f"`torch.tensor({name}, requires_grad=True).backward()` silences the error, and trains nothing."],
    )  # fmt: skip


def _asked(place: ResolvedSite) -> ast.expr | None:
    """`total` of `total.backward()`."""
    for part in (place.node, place.statement):
        for node in inside(part, ast.Attribute):
            if node.attr == "backward":
                return node.value
    return None
