"""Runs a small program under the guard, as a module of its own, and gives back what was said."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradguard import gradguard
from gradguard.diagnosis import Diagnosis
from gradguard.errors import GradGuardError

Run = Callable[..., list[tuple[Diagnosis, str]]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """`run(source, level=...)`: every diagnosis with its text; the program's own exceptions pass."""
    names: list[str] = []

    def runner(source: str, level: str = "standard") -> list[tuple[Diagnosis, str]]:
        name = f"program_{len(names)}_{tmp_path.name}"
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        names.append(name)
        texts: list[tuple[Diagnosis, str]] = []
        guard = gradguard(level=level)
        try:
            with guard:
                spec.loader.exec_module(module)
        except GradGuardError as error:
            texts.append((error.diagnosis, str(error)))
        texts += [(diagnosis, "") for diagnosis in guard.diagnoses if not any(diagnosis is known for known, _ in texts)]
        return texts

    yield runner
    for name in names:
        sys.modules.pop(name, None)
    linecache.clearcache()
