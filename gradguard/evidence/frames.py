"""The frames around an incident, with their variables; taken when a diagnosis is made, dropped with it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import Any

from gradguard.callsite import USER_FILES, CallSite

_CO_NEWLOCALS = 0x2


class FrameView:
    """One frame: where it stood, and what its variables were."""

    def __init__(self, frame: FrameType, lasti: int | None = None) -> None:
        self.frame = frame
        self.site = CallSite(frame.f_code, frame.f_lasti if lasti is None else lasti)
        self._locals: dict[str, Any] | None = None

    def dispose(self) -> None:
        """Lets go of the frame and its variables."""
        self._locals = None
        del self.frame

    @property
    def code_name(self) -> str:
        return self.frame.f_code.co_name

    @property
    def is_user(self) -> bool:
        return USER_FILES[self.frame.f_code.co_filename]

    @property
    def globals(self) -> Mapping[str, Any]:
        return self.frame.f_globals

    @property
    def locals(self) -> dict[str, Any]:
        """A copy of the variables. Python up to 3.12 caches them in the frame, which would keep tensors alive: undone here."""
        if self._locals is None:
            snapshot = self.frame.f_locals
            self._locals = dict(snapshot)
            if sys.version_info < (3, 13) and self.frame.f_code.co_flags & _CO_NEWLOCALS and isinstance(snapshot, dict):
                snapshot.clear()
        return self._locals

    @property
    def is_module_level(self) -> bool:
        return self.frame.f_code.co_name == "<module>"


def live_frames(frame: FrameType | None) -> list[FrameView]:
    """The frames from `frame` outwards, innermost first."""
    views = []
    while frame is not None:
        views.append(FrameView(frame))
        frame = frame.f_back
    return views


def traceback_frames(tb: TracebackType | None) -> list[FrameView]:
    """The frames an exception passed, innermost first, followed by those that still surround them."""
    inner: list[FrameView] = []
    outer: FrameType | None = None
    while tb is not None:
        if not inner:
            outer = tb.tb_frame.f_back
        inner.append(FrameView(tb.tb_frame, tb.tb_lasti))
        tb = tb.tb_next
    return inner[::-1] + live_frames(outer)


def user_frames(views: Iterable[FrameView]) -> list[FrameView]:
    """Only the user's."""
    return [view for view in views if view.is_user]
