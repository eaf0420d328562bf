"""Keeps warnings where they belong.

A warning from C++ is attributed to the innermost Python frame (TORCH_FACTS 14): under the op probe that is the probe's own.
While the probe is on, such warnings are taken at the point where Python shows them and issued again at the user's line,
under the user's filters.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

from gradguard.callsite import user_frame
from gradguard.probes import ops as _ops

_PROBE_FILE = _ops.__file__
_FILTER = ("always", None, Warning, None, 0)
_installed: dict[str, Any] = {}


def install() -> None:
    """Starts re-attributing; once a process, idempotent."""
    original = getattr(warnings, "_showwarnmsg", None)  # what C's warn_explicit calls last; private, hence the check
    if original is None or _installed:
        return
    _installed["original"] = original

    def show(message: Any) -> None:
        if message.filename != _PROBE_FILE:
            original(message)
            return
        frame = user_frame(sys._getframe(1))
        if frame is None:
            original(message)
            return
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(
            message.message,
            message.category,
            frame.f_code.co_filename,
            frame.f_lineno,
            frame.f_globals.get("__name__", "<unknown>"),
            registry,
            source=message.source,
        )

    _installed["show"] = show
    _set(warnings, show)
    # our own line must not be subject to "once per location": every user line counts for itself
    warnings.filterwarnings("always", module=r"gradguard\.probes\.ops$")
    getattr(_ops, "__warningregistry__", {}).clear()


def remove() -> None:
    """Stops, if nobody else has replaced the function since."""
    if not _installed:
        return
    if getattr(warnings, "_showwarnmsg", None) is _installed.get("show"):
        _set(warnings, _installed["original"])
    warnings.filters[:] = [entry for entry in warnings.filters if not _is_ours(entry)]  # type: ignore[index]
    invalidate = getattr(warnings, "_filters_mutated", None) or getattr(warnings, "_filters_mutated_lock_held", None)
    if invalidate is not None:
        invalidate()
    _installed.clear()


def _is_ours(entry: Any) -> bool:
    module = entry[3]
    return getattr(module, "pattern", module) == r"gradguard\.probes\.ops$"


def _set(module: ModuleType, function: Any) -> None:
    setattr(module, "_showwarnmsg", function)  # noqa: B010  (a private name mypy does not know)
