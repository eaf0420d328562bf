"""Nothing is recorded at the very moment at which backward is called: by the block around the call, by a statement that left it off, or
by the library that calls the user's function."""

from __future__ import annotations

import ast
import inspect

import torch

from gradguard.analysis.history import grad_mode_switches
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.history.grad_mode_switches import Switch
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.expressions import argument
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.syntax import load
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import attributes

_OPTION = "inference_mode"  # what Lightning's Trainer calls the choice between inference mode and no_grad


def still_off(incident: Incident) -> Origin | None:
    """Untraced: what has switched it off, where just one thing can have."""
    only_inference = torch.is_grad_enabled()  # grad mode was switched on again, which does not end inference mode
    for view in incident.user_frames[:12]:
        place = resolve(view.site)
        around = grad_mode_switches.inference_around(place) if only_inference else grad_mode_switches.block_around(place)
        if around is not None:
            return Origin(
                "inference" if grad_mode_switches.is_inference(around.text) else "no_grad", "no_grad", None, around, certain=False
            )
    left = [] if only_inference else grad_mode_switches.left_off_in(incident.sources)
    if left:
        return Origin("no_grad", "no_grad", None, left[0], certain=False) if len(left) == 1 else None
    return _by_a_library(incident)


def _by_a_library(incident: Incident) -> Origin | None:
    """The user's function that a library has called with grad mode off, such as a validation step."""
    frames = list(incident.frames)
    start = next((i for i, view in enumerate(frames) if view.is_user), None)
    if start is None:
        return None
    end = next((i for i in range(start, len(frames)) if not _passes(frames, i)), None)
    if end is None or not any(view.is_user for view in frames[end:]):
        return None
    inner = [view for view in frames[start:end] if view.is_user]
    place = resolve(inner[-1].site)
    if place is None:
        return None
    kind = "inference" if torch.is_inference_mode_enabled() else "no_grad"
    # with grad mode off as well, its option alone would not help
    also = _runner_made(frames[end:]) if kind == "inference" and torch.is_grad_enabled() else None
    return Origin(kind, kind, place, Switch("caller", place.span(), "torch.enable_grad()", place.function, () if also is None else (also,)))


def _passes(frames: list[FrameView], i: int) -> bool:
    """Whether a frame belongs to the user's own run of calls: the user's code, or the wrapper by which torch decorates it."""
    if frames[i].is_user:
        return True
    wrapper = frames[i].frame.f_globals.get("__name__") == "torch.utils._contextlib"
    return wrapper and i + 1 < len(frames) and frames[i + 1].is_user


def _runner_made(frames: list[FrameView]) -> SourceSpan | None:
    """The call that made the object whose method runs the user's function, if it could have been told to stay out of inference mode."""
    view = next((view for view in frames if view.is_user), None)
    place = None if view is None else resolve(view.site)
    if view is None or place is None or place.call is None or not isinstance(place.call.func, ast.Attribute):
        return None
    receiver = place.call.func.value
    runner = _value(view, receiver)
    if runner is None or not _has_option(type(runner)):
        return None
    source, name = load(view.frame.f_code.co_filename), type(runner).__name__
    made = calls_in([source], name) if source is not None else []
    if source is None or len(made) != 1 or argument(made[0][1], _OPTION) is not None:
        return None
    return source.span_of(made[0][1], f"evaluates in inference mode, unless told `{_OPTION}=False`", "culprit")


def _value(view: FrameView, node: ast.expr) -> object | None:
    """What a name, or an attribute of `self`, stands for in a frame. Runs no code of the user's."""
    if isinstance(node, ast.Name):
        return view.locals.get(node.id, view.globals.get(node.id))
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return attributes(_value(view, node.value)).get(node.attr)
    return None


def _has_option(cls: type) -> bool:
    try:
        return _OPTION in inspect.signature(cls).parameters
    except (TypeError, ValueError):
        return False
