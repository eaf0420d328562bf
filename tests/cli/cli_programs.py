"""Runs a program by plain python and by `gradguard run`, and shows both outcomes in comparable form."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """Exit status (negative: killed by that signal) and what was printed."""

    status: int
    out: str
    err: str


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100", **extra}


def python(*arguments: str, cwd: Path, text: str | None = None, flags: tuple[str, ...] = (), **env: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, *flags, *arguments], cwd=cwd, input=text, capture_output=True, text=True, timeout=300, env=environment(**env)
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def guarded(*arguments: str, cwd: Path, text: str | None = None, flags: tuple[str, ...] = (), **env: str) -> Outcome:
    return python("-m", "gradguard", "run", *arguments, cwd=cwd, text=text, flags=flags, **env)


def assert_same(*arguments: str, cwd: Path, text: str | None = None, flags: tuple[str, ...] = (), **env: str) -> Outcome:
    """Run both ways; status, output and errors must be equal to the letter."""
    plain = python(*arguments, cwd=cwd, text=text, flags=flags, **env)
    under_guard = guarded(*arguments, cwd=cwd, text=text, flags=flags, **env)
    assert under_guard == plain
    return plain


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
