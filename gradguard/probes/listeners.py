"""Who listens: the guarding session of each thread, if it has one.

The replaced functions (`gradguard.probes.torch_functions`) are global; sessions are per thread. A thread without a session runs
PyTorch as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from gradguard.instrumentation.event_buffer import Coast
from gradguard.instrumentation.fault_barrier import Shield


class Listener(Protocol):
    """What a session hears."""

    def run_backward(
        self, kind: str, original: Callable[..., Any], frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...
    def run_engine(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def run_python(
        self, original: Callable[..., Any], function: Callable[..., Any], relevant: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...
    def run_function(
        self, original: Callable[..., Any], cls: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...
    def coasted_failed(self, error: BaseException, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def coasted_returned(self, frame: FrameType, args: tuple[Any, ...]) -> None: ...
    def catch_up(self) -> None: ...
    def compiled_begins(self) -> None: ...
    def compiled_ends(self) -> None: ...
    def fault(self, error: BaseException) -> None: ...
    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def protocol(self, happening: str, frame: FrameType, *facts: Any) -> None: ...
    def wants_forwards(self) -> bool: ...

    guards: list[Any]
    lookout: Shield

    def mapped(self, frame: FrameType, given: Any, result: Any) -> None: ...
    def run_checkpoint(self, function: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    @property
    def tracing(self) -> bool: ...


class _Local(threading.local):
    """
    Attributes:
        listener: see `listener()`.
        coast: where this thread's events are written down in calm steps; None in all others.
        saving: the saved-tensor probe, while its hooks are on.
        compiled: how many compiled functions are under way, one within another (`gradguard.probes.compilers`).
    """

    listener: Listener | None = None
    coast: Coast | None = None
    saving: Any = None  # the saved-tensor probe where its hooks are in place
    compiled: int = 0


local = _Local()

compiling: set[int] = set()
"""The threads in which a compiled function is under way."""


def listener() -> Listener | None:
    """This thread's session, None outside any guard. It has caught up with what was only written down: it is told something."""
    session = local.listener
    if session is None or not session.guards:  # none are open when the last was left in another thread
        return None
    if local.coast is not None:
        session.catch_up()
    return session


def tracer() -> Listener | None:
    """This thread's session, if it traces the step under way."""
    session = local.listener
    return session if session is not None and session.tracing and session.guards else None


def idle_listener() -> Listener | None:
    """This thread's session, for a question that tells it nothing."""
    session = local.listener
    return session if session is not None and session.guards else None


def set_listener(value: Listener | None, coast: Coast | None = None) -> None:
    """Starts or stops listening in this thread."""
    local.listener = value
    local.coast = coast


def set_coast(coast: Coast | None) -> None:
    """Begins or ends a stretch of calm steps."""
    local.coast = coast
