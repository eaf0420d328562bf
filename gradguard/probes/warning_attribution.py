"""Keeps warnings where they belong.

A warning names the frame it was raised in, or one so many frames further out: C++ names the innermost Python frame,
Python code counts with `stacklevel`. The op probe and the replaced functions stand in between. While they
do, such warnings are taken where Python shows them and issued again for the frame that would have been named without
gradguard, under the user's filters for that place.
"""

from __future__ import annotations

import re
import sys
import warnings
from types import FrameType
from typing import Any

import torch.overrides

from gradguard.core.callsite import PACKAGE_DIR
from gradguard.core.errors import GradGuardWarning
from gradguard.core.foreign_exceptions import internal_error
from gradguard.probes.diversions import originals
from gradguard.probes.listeners import idle_listener
from gradguard.torch_compat.private_api import call_alone

_OVERRIDES = torch.overrides.__file__
# whatever is said of a line of gradguard's must come through, whichever filters the user has: it is issued again
_FILTER: Any = ("always", None, Warning, re.compile(r"gradguard\."), 0)
# what Python calls after each change of the filters; the second is Python 3.14's
_CHANGED = ("_filters_mutated", "_filters_mutated_lock_held")
_installed: dict[str, Any] = {}


def install() -> None:
    """Starts re-attributing; once a process, idempotent."""
    original = getattr(warnings, "_showwarnmsg", None)  # what C's warn_explicit calls last; private, hence the check
    if original is None or _installed:
        return

    def show(message: Any) -> None:
        innermost = sys._getframe(1)
        # what was issued again below comes by here a second time; gradguard's own stand where they belong
        settled = innermost.f_code is show.__code__ or isinstance(message.message, GradGuardWarning)
        try:
            place = None if settled else _meant(innermost, message)
        except internal_error():  # a warning with the wrong line is better than none
            place = None
        if place is None:
            original(message)
            return
        wrong, frame = place
        _forget(wrong, message)
        warnings.warn_explicit(
            message.message,
            message.category,
            frame.f_code.co_filename,
            frame.f_lineno,
            frame.f_globals.get("__name__", "<unknown>"),
            frame.f_globals.setdefault("__warningregistry__", {}),
            source=message.source,
        )

    _installed.update(original=original, show=show)
    setattr(warnings, "_showwarnmsg", show)  # noqa: B010  (a private name mypy does not know)
    name = next((name for name in _CHANGED if hasattr(warnings, name)), None)
    if name is not None:
        changed_before = getattr(warnings, name)

        def changed() -> None:
            if _installed and idle_listener() is not None:
                _to_the_front()
            changed_before()

        _installed.update(name=name, changed=changed_before, new_changed=changed)
        setattr(warnings, name, changed)
    keep()


def keep() -> None:
    """Puts the filter first again, which filters set since outrank and leaving `warnings.catch_warnings()` takes away; 0.1 µs where
    it stands. While a guard is open, every change of the filters does so by itself."""
    filters = warnings.filters
    if _installed and (not filters or filters[0] is not _FILTER):
        _to_the_front()
        _installed.get("changed", lambda: None)()


def _to_the_front() -> None:
    filters: Any = warnings.filters
    if _FILTER in filters:
        filters.remove(_FILTER)
    filters.insert(0, _FILTER)


def remove() -> None:
    """Stops, if nobody else has replaced the function since."""
    if not _installed:
        return
    if getattr(warnings, "_showwarnmsg", None) is _installed["show"]:
        setattr(warnings, "_showwarnmsg", _installed["original"])  # noqa: B010
    if "name" in _installed and getattr(warnings, _installed["name"]) is _installed["new_changed"]:
        setattr(warnings, _installed["name"], _installed["changed"])
    if _FILTER in warnings.filters:
        warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]
        _installed.get("changed", lambda: None)()
    _installed.clear()


def _meant(frame: FrameType | None, message: Any) -> tuple[FrameType, FrameType] | None:
    """The frame a warning names and the one it would have named without gradguard; None where they are the same."""
    frames: list[FrameType] = []
    named = -1
    own = False
    while frame is not None:
        frames.append(frame)
        own = own or _is_own(frame)
        if frame.f_code.co_filename == message.filename and frame.f_lineno == message.lineno:
            named = len(frames) - 1
            break
        frame = frame.f_back
    if named < 0 or not own:
        return None
    outer = frames[named].f_back
    while outer is not None:
        frames.append(outer)
        outer = outer.f_back
    without = _without_own(frames)
    return (frames[named], without[named]) if named < len(without) else None


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE_DIR) or frame.f_code in originals


def _without_own(frames: list[FrameType]) -> list[FrameType]:
    """The frames, innermost first, less what would not be there without gradguard."""
    kept: list[FrameType] = []
    i = 0
    while i < len(frames):
        if not _is_own(frames[i]):
            kept.append(frames[i])
            i += 1
            continue
        short = False
        while i < len(frames) and _is_own(frames[i]):
            short = short or frames[i].f_code is call_alone.__code__
            i += 1
        # a torch function written in Python asks the mode through `handle_torch_function`, and the mode calls it again
        again = i if short else i + 1
        asked = short or (i < len(frames) and frames[i].f_code.co_filename == _OVERRIDES)
        if again < len(frames) and asked and kept and kept[-1].f_code is frames[again].f_code:
            i = again + 1
    return kept


def _forget(wrong: FrameType, message: Any) -> None:
    """Python noted that it has said this, at the wrong place; for "once" at no place at all."""
    text = str(message.message)
    for registry in (wrong.f_globals.get("__warningregistry__"), getattr(warnings, "onceregistry", None)):
        if isinstance(registry, dict):
            for key in ((text, message.category), (text, message.category, 0), (text, message.category, message.lineno)):
                registry.pop(key, None)
