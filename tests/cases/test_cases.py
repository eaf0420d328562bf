"""Every buggy program is diagnosed as an expert would, and every sound one is left in peace, at the default level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from case import Case, collect, run

import gradguard.reporters.terminal  # the parent of all forks has everything imported

FAMILIES = ("seeds", "inplace", "lifetime", "nopath", "contract")
CASES = collect(*FAMILIES)
BUGGY = [case for case in CASES if not case.is_sound]
SOUND = [case for case in CASES if case.is_sound]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)  # a fork must not inherit a pool of threads that are not there


@pytest.mark.parametrize("case", BUGGY, ids=lambda case: case.id)
def test_buggy_program_is_diagnosed(case: Case, tmp_path: Path) -> None:
    outcome = run(case, tmp_path, "standard")
    first = outcome.first
    assert first is not None, f"nothing was said; output:\n{outcome.output}"
    assert first["name"] in case.causes
    place = first["culprit"]
    assert place is not None and Path(place["file"]).name == case.path.name
    assert case.culprits & set(range(place["line"], place["end_line"] + 1)), f"culprit line {place['line']}, wanted {case.culprits}"
    assert [name for name in case.meta["names"] if name not in first["message"]] == []
    assert len(outcome.loud) <= 3


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.id)
def test_sound_program_is_left_in_peace(case: Case, tmp_path: Path) -> None:
    outcome = run(case, tmp_path, "standard")
    assert outcome.loud == []
    assert outcome.status == 0, outcome.output
