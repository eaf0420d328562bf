"""`gradguard run --format json|sarif|github`: what a program reads of a run, on stdout when it ends.

JSON and SARIF have stdout to themselves: what the guarded program, its children and libraries in C write there goes to stderr, by way
of the file descriptor. Annotations for GitHub are lines among others, which its runner picks out of a step's output.

What is printed is read from the report, which workers of the program write too; where none is asked for there is one for this long, in a
temporary folder.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

import gradguard
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.foreign_exceptions import internal_error
from gradguard.reporting.jsonl import REPORT_VERSION, from_record

Output = Literal["json", "sarif", "github"]


class MachineOutput:
    """Prints what a run has found, when the process ends.

    Args:
        kind: how.
    """

    def __init__(self, kind: Output) -> None:
        self._write = {"json": _as_json, "sarif": _as_sarif, "github": _as_github}[kind]
        self._owner = os.getpid()
        self._folder = os.getcwd()
        self._descriptor = _set_stdout_apart() if kind in ("json", "sarif") else None
        self._own: str | None = None
        self._report: Path | None = None
        self._from = 0
        atexit.register(self._print)  # functions that are registered later run before: what is said until the very end is in it

    def report(self) -> Path:
        """A report for a run that has none."""
        self._own = tempfile.mkdtemp(prefix="gradguard-")
        return Path(self._own, "report.jsonl")

    def read_from(self, report: Path) -> None:
        """The run's report is known; what stands in it is of earlier runs."""
        self._report = report
        self._from = report.stat().st_size if report.is_file() else 0

    def _print(self) -> None:
        if os.getpid() != self._owner or self._report is None:  # a fork of the program's; or the program was not started
            return
        try:
            text = self._write(self._records(), self._folder).encode()
            if sys.stdout is not None:
                sys.stdout.flush()
            descriptor = 1 if self._descriptor is None else self._descriptor
            while text:
                text = text[os.write(descriptor, text) :]
        except internal_error(OSError, ValueError) as error:
            if not isinstance(error, BrokenPipeError):  # whoever reads has gone
                print(f"gradguard: cannot print what was found: {error}", file=sys.stderr)
        finally:
            if self._own is not None:
                shutil.rmtree(self._own, ignore_errors=True)

    def _records(self) -> list[dict[str, object]]:
        if self._report is None or not self._report.is_file():
            return []
        with self._report.open("rb") as file:
            file.seek(self._from)
            return [json.loads(line) for line in file.read().splitlines() if line.strip()]


def _set_stdout_apart() -> int:
    """Where stdout led; from here on what is written there goes to stderr."""
    if sys.stdout is not None:
        sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure") and os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # as Python has it where stdout is a terminal from the start
    return kept


def _diagnoses(records: list[dict[str, object]]) -> list[Diagnosis]:
    return [from_record(record) for record in records]


def _as_json(records: list[dict[str, object]], folder: str) -> str:
    known = {"schema_version": REPORT_VERSION, "gradguard": gradguard.__version__, "diagnoses": records}
    return json.dumps(known, separators=(",", ":")) + "\n"


def _as_sarif(records: list[dict[str, object]], folder: str) -> str:
    from gradguard.cli.sarif_command import log_of

    return json.dumps(log_of(_diagnoses(records), folder), indent=2) + "\n"


def _as_github(records: list[dict[str, object]], folder: str) -> str:
    from gradguard.reporting.github import commands, workspace_of

    lines = commands(_diagnoses(records), workspace_of(folder))
    return "".join(f"\n{line}" for line in lines) + "\n" if lines else ""  # the first begins a line, whatever a progress bar has left
