"""The frames around an incident, with their variables; taken when a diagnosis is made, dropped with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import Any

from gradguard.core.callsite import USER_FILES, CallSite
from gradguard.core.safe_read import namespace, variables_of


class FrameView:
    """One frame: where it stood, and what its variables were."""

    def __init__(self, frame: FrameType, lasti: int | None = None) -> None:
        self.frame = frame
        self.site = CallSite(frame.f_code, frame.f_lasti if lasti is None else lasti)
        self._locals: dict[str, Any] | None = None
        self._globals: dict[str, Any] | None = None

    def dispose(self) -> None:
        """Lets go of the frame and its variables."""
        self._locals = self._globals = None
        del self.frame

    @property
    def code_name(self) -> str:
        return self.frame.f_code.co_name

    @property
    def is_user(self) -> bool:
        return USER_FILES[self.frame.f_code.co_filename]

    @property
    def globals(self) -> Mapping[str, Any]:
        """A copy of the variables of its file, of which those that cannot be looked at are UNKNOWN."""
        if self._globals is None:
            self._globals = namespace(self.frame.f_globals)
        return self._globals

    @property
    def scope(self) -> int:
        """The same for all frames that share their file's variables."""
        return id(self.frame.f_globals)

    @property
    def locals(self) -> dict[str, Any]:
        """A copy of the variables, of which those that cannot be looked at are UNKNOWN."""
        if self._locals is None:
            self._locals = variables_of(self.frame)
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
