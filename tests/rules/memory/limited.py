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
from gradguard.instrumentation.refusals import reserve
from tests.cases.case import Outcome
from tests.cases.zygote import run_apart

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

    status = run_apart(_program, (script, mib, level, report, settings), folder, 60, printed)
    diagnoses = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return Outcome(status, printed.read_text(errors="replace"), diagnoses)


def _program(script: Path, mib: int, level: str, report: Path, settings: dict[str, Any]) -> None:
    gc.freeze()  # what the parent has is none of the program's: looked through, every page of it would be copied
    if level == "bare":
        limit(mib)
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
        return
    run_program(str(script), [], lambda: entered(mib, level=level, report=report, **settings))


def entered(mib: int, **settings: Any) -> gradguard:
    """A guard, made before the limit is set."""
    guard = gradguard(**settings)
    limit(mib)
    return guard


def limit(mib: int) -> None:
    """From now on this process may have `mib` MiB of memory more than it uses: what it has free is used up, and none is kept for later."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
    reserve.fill()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_mapped(), most))
    for size in (8 << 20, 1 << 20, 1 << 18):
        while libc.malloc(size):  # from any arena that a thread has left
            pass
    resource.setrlimit(resource.RLIMIT_AS, (_mapped() + (mib << 20), most))


def _mapped() -> int:
    """The bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
