"""The line that says what is waited for: drawn, cut and wiped away on a terminal, and nowhere else."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.cells import cell_len

from gradguard.reporting.terminal import progress
from gradguard.reporting.terminal.progress import Progress


class Stream(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, terminal: bool, drawn: threading.Event | None = None) -> None:
        super().__init__()
        self.terminal, self.drawn = terminal, drawn

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.drawn is not None and " s)" in text:
            self.drawn.set()
        return super().write(text)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TICK", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")


def test_a_line_is_drawn_and_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = threading.Event()
    stream = Stream(True, drawn)
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("gradguard: running the program again\nwith a change in a file of a long name"):
        assert drawn.wait(10)
    shown = stream.getvalue()
    assert shown.endswith("\r\x1b[2K") and "\n" not in shown
    lines = [line for line in re.split(r"\r\x1b\[2K", shown) if line]
    assert lines and all(cell_len(line) <= 39 and re.fullmatch(r"gradguard: running .* \(\d+ s\)", line) for line in lines)


@pytest.mark.parametrize(("terminal", "wanted", "term"), [(False, True, "xterm"), (True, False, "xterm"), (True, True, "dumb")])
def test_nothing_is_drawn_elsewhere(monkeypatch: pytest.MonkeyPatch, terminal: bool, wanted: bool, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("gradguard: waiting", wanted=wanted) as line:
        assert line._thread is None
    assert stream.getvalue() == ""
    monkeypatch.setattr("sys.stderr", None)
    with Progress("gradguard: waiting"):
        pass
