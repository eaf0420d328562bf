"""Exceptions that are not gradguard's, though they surface in its code: a signal handler's (time limits), or one sent to the
thread (`PyThreadState_SetAsyncExc`). They may arrive at any line, and belong to the training.

Every broad `except` of the package is an `except internal_error():`, which such exceptions pass; a test holds that.
"""

from __future__ import annotations

import dis
import signal
import sys
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType, TracebackType
from typing import Any

from gradguard.core.callsite import PACKAGE_DIR, USER_FILES
from gradguard.core.errors import GradGuardError, GradGuardWarning
from gradguard.core.safe_read import function_code, in_class, unless_loud, variables_of

_RAISING = frozenset(dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in dis.opmap)
# what C code raises without a word
_SAID_BY_TYPE = (
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    StopAsyncIteration,
    StopIteration,
    TypeError,
    ValueError,
)


def internal_error(*kinds: type[Exception]) -> type[Exception] | tuple[type[Exception], ...]:
    """For `except internal_error() as error:`, which catches every Exception (or these kinds), diagnoses and foreign ones apart.

    Python evaluates the expression only once there is an exception to match.
    """
    error = sys.exc_info()[1]
    return () if error is not None and not is_internal(error) else kinds or Exception


def is_internal(error: BaseException) -> bool:
    """Whether an exception that surfaced in gradguard is a failure of its own: no diagnosis, and not foreign."""
    if not isinstance(error, Exception) or isinstance(error, (GradGuardError, GradGuardWarning)):
        return False
    try:
        return not is_foreign(error)
    except Exception:  # nothing stands below this
        return True


def is_foreign(error: BaseException) -> bool:
    """Whether a signal handler raised this exception or another thread sent it, as far as its traceback tells."""
    tb = error.__traceback__
    if tb is None or (tb.tb_next is None and error.args and type(error).__module__ == "builtins"):  # raised by C, called right there
        return False
    handlers: list[Any] | None = None
    user_ran = False
    last = tb
    while last.tb_next is not None:
        last = last.tb_next
        filename = last.tb_frame.f_code.co_filename
        if not filename.startswith(PACKAGE_DIR):
            if handlers is None:
                handlers = [_code(signal.getsignal(number)) for number in signal.valid_signals()]
            if any(last.tb_frame.f_code is code for code in handlers) or _was_given_a_signal(last.tb_frame):
                return True
            user_ran = user_ran or USER_FILES[filename]
    return _was_sent(error, last, user_ran)


def _was_given_a_signal(frame: FrameType) -> bool:
    """Whether a frame is of a handler, whatever is in force by now: called with a signal's number and the frame it interrupted."""
    code, caller = frame.f_code, frame.f_back
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)]
    values: list[Any] = []
    variables = variables_of(frame)
    for name in names:
        value = variables.get(name)
        values += value if type(value) is tuple else (value,)
    return any(second is caller and issubclass(type(first), int) for first, second in pairwise(values))


def _was_sent(error: BaseException, last: TracebackType, user_ran: bool) -> bool:
    """Whether the interpreter itself raised this between two instructions, as of `PyThreadState_SetAsyncExc`: an exception without
    arguments, or of a class of the user's that no code of the user's raised."""
    kind = type(error)
    if error.__cause__ is not None or was_raised_at(last.tb_frame.f_code, last.tb_lasti):
        return False
    if not error.args:
        return not isinstance(error, _SAID_BY_TYPE)
    if user_ran or kind.__module__ == "builtins":
        return False
    return USER_FILES[getattr(sys.modules.get(kind.__module__), "__file__", None) or "<string>"]


def was_raised_at(code: CodeType, lasti: int) -> bool:
    """Whether an instruction is a `raise`."""
    return code.co_code[lasti] in _RAISING


def _code(handler: Any) -> Any:
    """The code of a handler: a function, a method, an object with `__call__`; None of one that is not Python's."""
    while isinstance(handler := unless_loud(handler), partial):
        handler = handler.func
    own = function_code(handler)
    return own if own is not None else function_code(in_class(type(handler), "__call__"))
