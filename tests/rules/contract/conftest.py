"""Runs a small program under the guard, as a file of its own, and gives back what was said."""

from __future__ import annotations

import linecache
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradguard import gradguard
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError

Said = list[tuple[Diagnosis, str]]


@pytest.fixture
def run_contract(tmp_path: Path) -> Iterator[Callable[..., Said]]:
    """`run(source, level=...)`: every diagnosis with its text; the program's own exceptions pass."""
    count = 0

    def runner(source: str, level: str = "standard") -> Said:
        nonlocal count
        count += 1
        path = tmp_path / f"program_{count}.py"
        path.write_text(source)
        said: Said = []
        guard = gradguard(level=level)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with guard:
                    runpy.run_path(str(path), run_name="__main__")
            except GradGuardError as error:
                said.append((error.diagnosis, str(error)))
        for warning in caught:
            diagnosis = getattr(warning.message, "diagnosis", None)
            if diagnosis is not None:
                said.append((diagnosis, str(warning.message)))
        return said

    yield runner
    linecache.clearcache()
