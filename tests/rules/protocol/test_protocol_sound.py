"""Loops that look odd and are sound are left in peace, at every level."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.rules.protocol.protocol_programs_sound import SOUND, source_of


@pytest.mark.parametrize(
    "level", [pytest.param("watch", marks=pytest.mark.slow), "standard", pytest.param("strict", marks=pytest.mark.slow), "forensic"]
)
@pytest.mark.parametrize("name", SOUND)
def test_sound_loop_is_left_in_peace(said: Callable[..., list[Diagnosis]], name: str, level: str) -> None:
    found = said(source_of(name), level)
    assert not found, [(diagnosis.name, diagnosis.headline) for diagnosis in found]
