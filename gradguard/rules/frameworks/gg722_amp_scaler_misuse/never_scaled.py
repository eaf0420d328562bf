"""A step through a GradScaler on gradients of a loss that the scaler has not scaled: it divides them all the same (GG722)."""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.monitors.grad_scaler import NeverScaled
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.frameworks.scaler_names import scaler_in_words


def diagnosis(incident: Incident, finding: NeverScaled, book: Book) -> Diagnosis:
    """What is told of it: the backward call whose loss is not scaled, and the step that divides."""
    name, scale = wording.optimizer_name(book, incident), finding.scale
    scaler, bare = scaler_in_words(incident)
    place = resolve(finding.backward)
    loss = _receiver(place)
    what = f"`{wording.short(loss, 40)}`" if loss else "the loss"
    scaled = f"{bare}.scale({loss or 'loss'})"
    return Diagnosis(
        code="GG722",
        name="amp-scaler-misuse",
        severity="warning",
        headline=f"`{name}` steps with gradients {scale:g} times too small: {scaler} divides them, and {what} was never scaled",
        culprit=wording.span(finding.backward, f"runs on a loss that {scaler} has not multiplied", "culprit"),
        related=wording.spans(wording.span(book.step_site, f"divides the gradients by {scale:g}", "changed")),
        tensors=wording.facts(book.parameters(), incident.names),
        explanation=f"A GradScaler divides the gradients of an optimizer by its scale, {scale:g} here, in step() or unscale_(), as if the "
        "loss had been multiplied by it before backward(). This one was not. Adam hides it in part; SGD hardly moves.",
        fixes=[Fix(title=f"Call `{wording.short(scaled, 40)}.backward()`", safety="unsafe", patch=_patch(place, bare))],
        confidence="certain",
    )


def _receiver(place: ResolvedSite | None) -> str | None:
    """What backward() was called on, as written."""
    call = place.call if place is not None else None
    method = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
    return place.receiver if method and place is not None and not (place.callee_full_name or "").startswith("torch.") else None


def _patch(place: ResolvedSite | None, scaler: str) -> str | None:
    loss, call = _receiver(place), place.call if place is not None else None
    if loss is None or place is None or place.source is None or call is None or not isinstance(call.func, ast.Attribute):
        return None
    return replaced(place.source, [(call.func.value, f"{scaler}.scale({loss})")])
