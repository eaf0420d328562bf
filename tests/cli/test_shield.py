"""A failure inside gradguard is told and never becomes the program's failure."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from cli_programs import Outcome, python

LAUNCHER = """
import sys
from gradguard.core.errors import ConfigError
from gradguard.cli.script import run_program

class Guard:
    def __init__(self):
        self.fail("init")
    def __enter__(self):
        self.fail("enter")
        return self
    def __exit__(self, kind, error, trace):
        self.fail("exit")
    def fail(self, where):
        if where == sys.argv[-1]:
            raise {"init": TypeError, "enter": OSError, "exit": KeyError}[where]("inside " + where)
        if sys.argv[-1] == "config" and where == "init":
            raise ConfigError("level is wrong")

run_program("program.py", sys.argv[1:], Guard)
"""


def launched(folder: Path, program: str, fault: str) -> Outcome:
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "program.py").write_text(textwrap.dedent(program))
    return python("launcher.py", fault, cwd=folder)


@pytest.mark.parametrize("fault", ["init", "enter", "exit"])
def test_program_runs_to_its_own_end(tmp_path: Path, fault: str) -> None:
    ended = launched(tmp_path, "print('ran'); raise SystemExit(4)", fault)
    assert ended.status == 4 and ended.out == "ran\n"
    assert ended.err.startswith("gradguard: internal error") and f"inside {fault}" in ended.err and "Traceback" not in ended.err


def test_own_error_is_shown_although_the_guard_fails(tmp_path: Path) -> None:
    ended = launched(tmp_path, "raise ValueError('mine')", "exit")
    assert ended.status == 1
    assert ended.err.splitlines()[1] == "Traceback (most recent call last):"
    assert ended.err.splitlines()[-1] == "ValueError: mine"


def test_wrong_setting_stops_before_the_program(tmp_path: Path) -> None:
    ended = launched(tmp_path, "print('ran')", "config")
    assert (ended.status, ended.out, ended.err) == (2, "", "gradguard run: level is wrong\n")
