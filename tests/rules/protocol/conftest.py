"""Runs a small training program as a file of its own under a guard of its own, and gives back what was said."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gradguard.core.diagnosis import Diagnosis
from gradguard.runtime.session import current_session

_DRIVER = """
from gradguard import gradguard
with gradguard(level=LEVEL):
    exec(CODE, SPACE)
"""


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Callable[..., list[Diagnosis]]]:
    """`said(source, level=...)`: every diagnosis of severity warning or above; the program's own exceptions pass."""

    def run(source: str, level: str = "standard") -> list[Diagnosis]:
        path, driver = tmp_path / "program.py", tmp_path / "driver.py"
        path.write_text(source)
        driver.write_text(_DRIVER)
        torch.manual_seed(0)
        space = {"__name__": "__main__", "__file__": str(path)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # the driver's own line makes the guard: each program has a run of its own
            names = {"LEVEL": level, "CODE": compile(source, str(path), "exec"), "SPACE": space}
            exec(compile(_DRIVER, str(driver), "exec"), names)
        assert not current_session().faulty
        found = [getattr(warning.message, "diagnosis", None) for warning in caught]
        return [diagnosis for diagnosis in found if diagnosis is not None and diagnosis.severity != "info"]

    yield run
    linecache.clearcache()
