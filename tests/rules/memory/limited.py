"""Runs a program under the guard in a fork that may have no more than so much memory in addition to what it has."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
from pathlib import Path
from typing import Any

from gradguard import gradguard
from gradguard.cli.script import run_program
from tests.cases.case import Outcome, forked

_MMAP_THRESHOLD = -3  # of glibc's mallopt
HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
"""


def limited(folder: Path, source: str, mib: int, level: str = "standard", **settings: Any) -> Outcome:
    """What the guard said of a program that could not have more than `mib` MiB: everything printed, and the report."""
    script, report, printed = folder / "program.py", folder / "report.jsonl", folder / "printed.txt"
    for old in (report, printed):
        old.unlink(missing_ok=True)
    script.write_text(HEAD + source)

    def program() -> None:
        gc.freeze()  # what the parent has is none of the program's: looked through, every page of it would be copied
        if level == "bare":
            limit(mib)
            exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
            return
        run_program(str(script), [], lambda: entered(mib, level=level, report=report, **settings))

    status = forked(program, folder, 60, printed)
    diagnoses = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return Outcome(status, printed.read_text(errors="replace"), diagnoses)


def entered(mib: int, **settings: Any) -> gradguard:
    """A guard, made before the limit is set."""
    guard = gradguard(**settings)
    limit(mib)
    return guard


def limit(mib: int) -> None:
    """From now on this process may have `mib` MiB of address space more than it has, of which no freed block is kept for later."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
