"""Who listens: the guarding session of each thread, if it has one.

The replaced functions (`gradguard.probes.patches`) are global; sessions are per thread. A thread without a session runs
PyTorch as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol


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
    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def protocol(self, happening: str, frame: FrameType, *facts: Any) -> None: ...
    def wants_forwards(self) -> bool: ...

    guards: list[Any]

    def run_checkpoint(self, function: Any, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    @property
    def tracing(self) -> bool: ...


class _Local(threading.local):
    listener: Listener | None = None


_local = _Local()


def listener() -> Listener | None:
    """This thread's session, None outside any guard."""
    session = _local.listener
    return session if session is not None and session.guards else None  # none are open when the last was left in another thread


def set_listener(value: Listener | None) -> None:
    """Starts or stops listening in this thread."""
    _local.listener = value
