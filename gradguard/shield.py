"""What keeps a fault of gradguard's own away from the training."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gradguard.errors import GradGuardError, GradGuardWarning
from gradguard.probes.compilers import swap_callback
from gradguard.probes.hub import local
from gradguard.signals import from_handler

if TYPE_CHECKING:
    from gradguard.session import Session


class Shield:
    """Inside, what goes wrong in gradguard is reported and left behind; only a diagnosis gets out to the training."""

    __slots__ = ("_callbacks", "_session")

    def __init__(self, session: weakref.ref[Session]) -> None:
        self._session = session
        self._callbacks: list[Any] = []  # of Dynamo, which must not compile what runs here

    def __enter__(self) -> None:
        if local.compiled:
            self._callbacks.append(swap_callback(None))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if local.compiled:
            swap_callback(self._callbacks.pop())
        session = self._session()
        if session is None or not isinstance(error, Exception) or isinstance(error, (GradGuardError, GradGuardWarning)):
            return False
        if from_handler(error):
            return False
        session.fault(error)
        return True
