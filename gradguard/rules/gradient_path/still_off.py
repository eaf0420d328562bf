"""Grad mode is off at the very moment at which backward is called: by the block around the call, by a statement that left it off, or by
the library that calls the user's function."""

from __future__ import annotations

import torch

from gradguard.evidence.source import resolve
from gradguard.rules.gradient_path import switches
from gradguard.rules.gradient_path.origins import Origin
from gradguard.rules.gradient_path.switches import Switch
from gradguard.rules.incident import Incident


def still_off(incident: Incident) -> Origin | None:
    """Untraced: what has switched it off, where just one thing can have."""
    for view in incident.user_frames[:12]:
        around = switches.block_around(resolve(view.site))
        if around is not None:
            return Origin("inference" if switches.is_inference(around.text) else "no_grad", "no_grad", None, around, certain=False)
    left = switches.left_off_in(incident.sources)
    if left:
        return Origin("no_grad", "no_grad", None, left[0], certain=False) if len(left) == 1 else None
    return _by_a_library(incident)


def _by_a_library(incident: Incident) -> Origin | None:
    """The user's function that a library has called with grad mode off, such as a validation step."""
    frames = list(incident.frames)
    start = next((i for i, view in enumerate(frames) if view.is_user), None)
    if start is None:
        return None
    end = next((i for i in range(start, len(frames)) if not frames[i].is_user), None)
    if end is None or not any(view.is_user for view in frames[end:]):
        return None
    place = resolve(frames[end - 1].site)
    if place is None:
        return None
    kind = "inference" if torch.is_inference_mode_enabled() else "no_grad"
    return Origin(kind, kind, place, Switch("caller", place.span(), "torch.enable_grad()", place.function))
