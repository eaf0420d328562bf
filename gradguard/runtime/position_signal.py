"""SIGUSR1 asks a rank where it is, also while its training thread waits in C++, where no handler of Python's would run.

The handler is faulthandler's, in C: it writes into a pipe that the watching thread reads. What Python knows of the signal stays as it
is (`signal.getsignal`). A program that handles the signal itself, now or later, keeps its handler.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

from gradguard.core.foreign_exceptions import internal_error

_SIGNAL = getattr(signal, "SIGUSR1", None)
_STATUS = Path("/proc/self/status")
_CHUNK = 1 << 16
_EVERY = 1.0  # seconds


class Bell:
    """The signal's way to this process's watching thread; silent where the signal is the program's own."""

    def __init__(self) -> None:
        self._hung = False
        self._until = 0.0
        self._pipe = os.pipe() if _SIGNAL is not None else None
        for end in self._pipe or ():
            os.set_blocking(end, False)

    def hang(self) -> None:
        """Handles the signal from now on, if it may: a guard is entered. Of guards around single steps, one a second does."""
        if self._hung or self._pipe is None or _SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        now = time.monotonic()
        if now >= self._until:
            self._until = now + _EVERY
            if _free():
                faulthandler.register(_SIGNAL, file=self._pipe[1], all_threads=False)
                self._hung = True

    def rung(self) -> bool:
        """Whether the signal has come since the last call."""
        if self._pipe is None:
            return False
        try:
            return bool(os.read(self._pipe[0], _CHUNK))
        except BlockingIOError:
            return False

    def remove(self) -> None:
        """The signal is as it was before."""
        if self._hung and _SIGNAL is not None:
            self._hung = False
            if signal.getsignal(_SIGNAL) is signal.SIG_DFL:  # else the program has put its own handler there
                faulthandler.unregister(_SIGNAL)

    def __del__(self) -> None:
        self.remove()
        for end in self._pipe or ():  # no thread reads or writes any more
            os.close(end)


def _free() -> bool:
    """Whether nothing handles the signal, neither in Python nor in C."""
    if _SIGNAL is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return False
    try:
        caught = next(line for line in _STATUS.read_text().splitlines() if line.startswith("SigCgt:"))
    except internal_error(OSError, StopIteration):  # C cannot be asked here
        return False
    return not int(caught.split()[1], 16) >> (int(_SIGNAL) - 1) & 1
