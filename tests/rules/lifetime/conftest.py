"""Runs a small program under the guard, as a module of its own, and gives back what was said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import Run, run_source


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(source, level=...)`: every diagnosis with its text; the program's own exceptions pass."""
    return lambda source, level="standard": run_source(tmp_path, source, level)
