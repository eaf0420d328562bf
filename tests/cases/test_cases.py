"""Every buggy program is diagnosed as an expert would, and every sound one is left in peace, at the default level."""

from __future__ import annotations

from pathlib import Path

import pytest
from case import Case, collect, load_everything, run

FAMILIES = ("seeds", "inplace", "lifetime", "nopath", "contract", "protocol", "numerics")
CASES = collect(*FAMILIES)
BUGGY = [case for case in CASES if not case.is_sound]
SOUND = [case for case in CASES if case.is_sound]


@pytest.fixture(autouse=True, scope="module")
def ready() -> None:
    load_everything()


@pytest.mark.parametrize("case", BUGGY, ids=lambda case: case.id)
def test_buggy_program_is_diagnosed(case: Case, tmp_path: Path) -> None:
    outcome = run(case, tmp_path, "standard")
    first = outcome.first
    assert first is not None, f"nothing was said; output:\n{outcome.output}"
    assert case.names_cause(first), first["name"]
    assert case.names_culprit(first), f"culprit {first['culprit']}, wanted {case.culprits}"
    assert [name for name in case.meta["names"] if name not in first["message"]] == []
    assert len(outcome.loud) <= 3


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.id)
def test_sound_program_is_left_in_peace(case: Case, tmp_path: Path) -> None:
    outcome = run(case, tmp_path, "standard")
    assert outcome.loud == []
    assert outcome.status == 0, outcome.output
