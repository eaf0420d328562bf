"""The fault barrier: gradguard's own exceptions end here and cost the part that raised them, never the training.

What has failed is told from the traceback: the innermost object whose class has a `PART`, a name for people. A rule is named by
whoever asks it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import FunctionType, TracebackType
from typing import Any, TypeVar, cast

from gradguard.core.callsite import PACKAGE_DIR
from gradguard.core.foreign_exceptions import internal_error, is_internal
from gradguard.torch_compat.private_api import functions_on, quiet

_LOGGER = logging.getLogger("gradguard")
_DEBUG = bool(os.environ.get("GRADGUARD_DEBUG"))
_Method = TypeVar("_Method", bound=Callable[..., Any])
_HINT = "please report it with the traceback that GRADGUARD_DEBUG=1 adds"


class Compiler:
    """How a block of gradguard's is kept from being compiled; `gradguard.probes.compilers` knows how."""

    running: Callable[[], int] = staticmethod(lambda: 0)  # whether Dynamo compiles what this thread runs
    swap: Callable[[Any], Any] = staticmethod(lambda callback: None)  # exchanges its callback


class Shield:
    """A block of gradguard's: what goes wrong inside is reported and left behind; diagnoses and foreign exceptions get out.

    Args:
        session: of the thread.
        lasting: whether the block keeps account of something that cannot be relied on once it has failed.
    """

    __slots__ = ("_callbacks", "_lasting", "_quiet", "_session")

    def __init__(self, session: weakref.ref[Any], lasting: bool = True) -> None:
        self._session = session
        self._lasting = lasting
        self._callbacks: list[Any] = []  # of Dynamo, which must not compile what runs here
        self._quiet: list[AbstractContextManager[Any]] = []  # no mode and no subclass of the user's sees what is asked of tensors

    def __enter__(self) -> None:
        hidden: AbstractContextManager[Any] | None = None
        entered, on = len(self._quiet), functions_on()
        try:
            hidden = quiet()
            hidden.__enter__()
            self._quiet.append(hidden)
            if Compiler.running():
                self._callbacks.append(Compiler.swap(None))
        except BaseException:  # from outside: `__exit__` will not be called
            del self._quiet[entered:]
            if hidden is not None and on and not functions_on():
                hidden.__exit__(None, None, None)
            raise

    def reset(self) -> None:
        """No block is open: what one has left behind is taken back, whose `__exit__` an exception from outside met at its start."""
        if self._quiet and not functions_on():
            self._quiet[0].__exit__(None, None, None)
        self._quiet.clear()
        self._callbacks.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        # each is put back before it is forgotten: an exception from outside may come in between
        if self._callbacks and Compiler.running():
            Compiler.swap(self._callbacks[-1])
            del self._callbacks[-1]
        if self._quiet:
            self._quiet[-1].__exit__(None, None, None)
            del self._quiet[-1]
        if error is None or not is_internal(error):
            return False
        session = self._session()
        if session is None:
            return False
        session.fault(error, lasting=self._lasting)
        return True


class _Local(threading.local):
    session: weakref.ref[Any] | None = None


in_thread = _Local()  # the session, for parts that stand below it


def barred(method: _Method) -> _Method:
    """For the methods in which a part takes note of something: once one has failed, none of this object's does anything."""

    @wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "failed", False):
            return None
        try:
            return method(self, *args, **kwargs)
        except internal_error() as error:
            self.failed = True
            session = None if in_thread.session is None else in_thread.session()
            if session is not None:
                session.fault(error)
            return None

    return cast(_Method, noting)


def failed_part(error: BaseException, handled: bool) -> Any:
    """The innermost object with a `PART` among those whose methods the exception came through; None where there is none.

    Args:
        error: the exception.
        handled: whether it is enough that a function had the object at hand.
    """
    found = None
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename.startswith(PACKAGE_DIR):
            known = tb.tb_frame.f_locals
            at_hand = [known.get("self"), *(known.values() if handled else ())]
            found = next((value for value in at_hand if _is_part(value)), found)
        tb = tb.tb_next
    return found


def _is_part(value: Any) -> bool:
    return any("PART" in vars(kind) and kind.__module__.startswith("gradguard.") for kind in type(value).__mro__)


def mute(part: Any, but: tuple[str, ...] = ()) -> None:
    """Makes every method of this one object do nothing, those named and those in its class's `GOES_ON` apart: methods that the program's
    own values pass through."""
    but += getattr(part, "GOES_ON", ())
    for kind in type(part).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType) and not name.startswith("__") and name not in but:
                setattr(part, name, _nothing)


def unmute(part: Any) -> None:
    """Undoes `mute`, for a part that outlives the run in which it failed."""
    for name, value in list(vars(part).items()):
        if value is _nothing:
            delattr(part, name)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _place(error: BaseException) -> tuple[Any, int]:
    tb = error.__traceback__
    if tb is None:
        return type(error), 0
    while tb.tb_next is not None:
        tb = tb.tb_next
    return id(tb.tb_frame.f_code), tb.tb_lineno  # by identity: Dynamo makes code that has no hash


_told: set[tuple[Any, int]] = set()


def say(what: str, consequence: str, error: BaseException) -> None:
    """Logs a fault, once for each place at which one arises; never raises."""
    try:
        place = _place(error)
        if place in _told:
            return
        _told.add(place)
        _LOGGER.error(
            "gradguard: %s had an internal fault, %s; training goes on (%s: %s); %s",
            what,
            consequence,
            type(error).__name__,
            error,
            _HINT,
            exc_info=error if _DEBUG else None,
        )
    except internal_error():
        pass
