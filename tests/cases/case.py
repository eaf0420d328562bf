"""A case: a whole buggy program with its metadata block and its marked lines."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
_MARKER = re.compile(r"\s*# <- (?:culprit|related|raises)\b[^#\n]*")
_BLOCK = re.compile(r"^# /// case\n(?P<body>(?:#.*\n)+?)# ///$", re.MULTILINE)
PARTS = "_parts"  # ends the name of a program's second module
_RANK = {"error": 2, "warning": 1, "info": 0}


@dataclass
class Case:
    """One program; a twin (`*_fixed.py`) has no block and must stay silent. It may have a second module `<stem>_parts.py` beside it."""

    path: Path
    meta: dict[str, Any]
    culprits: set[tuple[str, int]] = field(default_factory=set)  # file name and line
    source: str | None = None  # stands in for the file's text

    @property
    def id(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def is_sound(self) -> bool:
        return not self.meta or self.meta["outcome"] == "healthy"

    @property
    def causes(self) -> set[str]:
        return {self.meta["cause"], *self.meta.get("also", [])}

    @property
    def plain(self) -> str:
        """The program as its author would have it: no block, no markers, every line where it was."""
        if self.source is not None:
            return self.source
        return _plain(self.path.read_text())

    @property
    def parts(self) -> Path | None:
        beside = self.path.with_name(f"{self.path.stem}{PARTS}.py")
        return beside if beside.exists() else None

    def write(self, folder: Path) -> Path:
        """Writes the program as `plain` has it, with its second module, and gives the script's path."""
        script = folder / self.path.name
        script.write_text(self.plain)
        if self.parts is not None:
            (folder / self.parts.name).write_text(_plain(self.parts.read_text()))
        return script

    def names_cause(self, diagnosis: dict[str, Any]) -> bool:
        return diagnosis["name"] in self.causes

    def names_culprit(self, diagnosis: dict[str, Any]) -> bool:
        """Whether the diagnosis points at a marked line; one line of a statement is as good as another."""
        place = diagnosis["culprit"]
        if place is None:
            return False
        name = Path(place["file"]).name
        return any((name, line) in self.culprits for line in range(place["line"], place["end_line"] + 1))


def _plain(text: str) -> str:
    return _MARKER.sub("", _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text))


def load(path: Path) -> Case:
    text = path.read_text()
    block = _BLOCK.search(text)
    meta = tomllib.loads("\n".join(line[1:].strip() for line in block["body"].splitlines())) if block else {}
    case = Case(path, meta)
    for file in filter(None, (path, case.parts)):
        case.culprits |= {(file.name, number) for number, line in enumerate(file.read_text().splitlines(), 1) if "# <- culprit" in line}
    return case


def collect(*families: str) -> list[Case]:
    return [load(path) for family in families for path in sorted((HERE / family).glob("*.py"))]


@dataclass
class Outcome:
    """What came of a run: the exit status, everything printed, and the report."""

    status: int
    output: str
    diagnoses: list[dict[str, Any]]

    @property
    def loud(self) -> list[dict[str, Any]]:
        return [diagnosis for diagnosis in self.diagnoses if _RANK[diagnosis["severity"]] >= 1]

    @property
    def first(self) -> dict[str, Any] | None:
        """The first diagnosis of the highest severity: the one a person reads."""
        return max(self.loud, key=lambda diagnosis: _RANK[diagnosis["severity"]], default=None)


def load_everything() -> None:
    """Readies this process to be the parent of many runs: what their forks would import is imported, and they use one thread.

    The integrations are left out, since what they import stays visible to the programs.
    """
    import torch
    import torch._dynamo  # optimizers import it late

    import gradguard as package
    from gradguard.rules.registry import all_rules

    torch.set_num_threads(1)  # a fork must not inherit a pool of threads that are not there
    for module in pkgutil.walk_packages(package.__path__, "gradguard.", onerror=lambda name: None):
        if not module.name.startswith(("gradguard.__main__", "gradguard.integrations", "gradguard.examples")):
            importlib.import_module(module.name)
    all_rules()


def run(case: Case, folder: Path, level: str, timeout: int = 120) -> Outcome:
    """Runs a case as `gradguard run` does, in a fork of a process in which torch is imported already.

    A program that has not ended after `timeout` seconds is killed by SIGALRM: its status is -14. Processes that it leaves running
    are killed.
    """
    from tests.cases.case import _run_guarded as guarded  # by this name in any process: tests here import `case` alone
    from tests.cases.zygote import run_apart

    script, report, printed = case.write(folder), folder / "report.jsonl", folder / "printed.txt"
    status = run_apart(guarded, (script, report, level), script.parent, timeout, printed)
    diagnoses = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return Outcome(status, printed.read_text(errors="replace"), diagnoses)


def _run_guarded(script: Path, report: Path, level: str) -> None:
    import warnings

    warnings.resetwarnings()
    warnings.simplefilter("default")

    from gradguard.cli.script import run_program
    from gradguard.runtime.guard import gradguard

    run_program(str(script), [], lambda: gradguard(level=level, report=report))


def forked(function: Callable[[], object], folder: Path, timeout: float, printed: Path | str = os.devnull) -> int:
    """Calls a function in a fork of this process and in a folder, as if that were a program of its own; gives its exit status.

    Args:
        timeout: in seconds, after which it is killed, and with it all that it has started.
        printed: where what is printed goes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.alarm(int(timeout))
        status = 1
        try:
            target = os.open(printed, os.O_CREAT | os.O_WRONLY)
            os.dup2(target, 1)
            os.dup2(target, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.chdir(folder)
            try:
                function()
                status = 0
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # not reaped yet: the group's number is still its own
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
