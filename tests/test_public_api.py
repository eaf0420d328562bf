"""What `from gradguard import ...` offers: documented, typed (`make types`), and enough for a program."""

from __future__ import annotations

import inspect
import runpy
import warnings
from pathlib import Path
from typing import get_args

import pytest

import gradguard

PROGRAM = Path(__file__).parent / "public_api_program.py"


def test_the_program_runs_and_needs_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = runpy.run_path(str(PROGRAM))
    assert set(gradguard.__all__) <= names.keys()
    assert all(names[name] is getattr(gradguard, name) for name in gradguard.__all__)
    assert set(gradguard.__all__) <= set(dir(gradguard))


def test_every_name_is_documented() -> None:
    for name in gradguard.__all__:
        value = getattr(gradguard, name)
        parts = get_args(value) or (value,)  # a union of protocols
        for part in parts:
            if inspect.isclass(part) or inspect.isfunction(part):
                assert inspect.getdoc(part), name
    for name, member in vars(gradguard.Guard).items():
        if not name.startswith("_"):
            assert inspect.getdoc(member), name


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'guard_all'"):
        gradguard.guard_all  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="from gradguard import gradguard"):
        gradguard()  # type: ignore[operator]
