"""Exceptions that a signal handler of the user's raises, such as a time limit: they may come anywhere, also within gradguard's code."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

from gradguard.safe_read import function_code, in_class, unless_loud


def from_handler(error: BaseException) -> bool:
    """Whether a handler in force for some signal raised this; such an exception is the training's, and no fault of gradguard's."""
    tb = error.__traceback__
    tb = None if tb is None else tb.tb_next  # the first entry is where it is caught
    if tb is None:
        return False
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    while tb is not None:
        if tb.tb_frame.f_code in codes:
            return True
        tb = tb.tb_next
    return False


def _code(handler: Any) -> Any:
    """The code of a handler: a function, a method, an object with `__call__`; None of one that is not Python's."""
    while isinstance(handler := unless_loud(handler), partial):
        handler = handler.func
    own = function_code(handler)
    return own if own is not None else function_code(in_class(type(handler), "__call__"))
