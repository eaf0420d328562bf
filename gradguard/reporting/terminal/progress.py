"""A line on a terminal that says what is waited for, and for how long; nothing where nobody looks."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

from gradguard.core.foreign_exceptions import internal_error
from gradguard.reporting.terminal.layout import cells, one_line
from gradguard.reporting.terminal.render import encodable, is_terminal, terminal_width

_TICK = 1.0


class Progress:
    """Shows `text` with the seconds gone by, redrawn each second and wiped away in the end.

    Args:
        text: one line, cut to the terminal's width.
        wanted: False: nothing is shown.
    """

    def __init__(self, text: str, wanted: bool = True) -> None:
        self._text = one_line(text)
        self._stream = sys.stderr
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = wanted and self._stream is not None and os.environ.get("TERM") != "dumb" and is_terminal(self._stream)

    def __enter__(self) -> Progress:
        if self._shown:
            self._thread = threading.Thread(target=self._tick, name="gradguard-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _tick(self) -> None:
        began = time.monotonic()
        width = terminal_width(self._stream) - 1
        try:
            while not self._over.wait(_TICK):
                seconds = f" ({time.monotonic() - began:.0f} s)"
                text = self._text
                while text and cells(text) + len(seconds) > width:
                    text = text[:-1]
                self._stream.write(f"\r\x1b[2K{encodable(text, self._stream)}{seconds}")
                self._stream.flush()
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
        except internal_error(OSError, ValueError):  # the terminal is gone
            pass
