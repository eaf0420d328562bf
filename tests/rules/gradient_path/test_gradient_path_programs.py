"""Whole programs: what is said of each, and where it points; and silence on sound ones that look alike."""

from __future__ import annotations

from pathlib import Path

import gradient_path_harness as harness
import pytest

from gradguard.core.errors import GradGuardError
from gradguard.reporting.terminal.render import render_for_error

_UNTRACED_UNKNOWN = {"virtual_step_by_hand"}  # without a trace the write between the two graphs is not found: the call is named


def _ids(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", harness.programs("raises"), ids=_ids)
def test_a_failing_backward_is_explained(path: Path, tmp_path: Path) -> None:
    code, names, lines = harness.expected(path)
    found, error = harness.run(path, tmp_path)
    assert isinstance(error, GradGuardError)
    assert [diagnosis.code for diagnosis in found] == [code]
    assert found[0].culprit is not None and found[0].culprit.line in lines
    text = render_for_error(found[0])
    assert [name for name in names if name not in text] == []
    assert found[0].torch_message and found[0].fixes


@pytest.mark.parametrize("path", harness.programs("raises"), ids=_ids)
def test_untraced_the_source_tells(path: Path, tmp_path: Path) -> None:
    code, _, lines = harness.expected(path)
    found, error = harness.run(path, tmp_path, level="watch")
    assert isinstance(error, GradGuardError)
    assert [diagnosis.code for diagnosis in found] == [code]
    if path.stem not in _UNTRACED_UNKNOWN:
        assert found[0].culprit is not None and found[0].culprit.line in lines


@pytest.mark.parametrize("path", harness.programs("silent"), ids=_ids)
def test_a_silent_loss_of_the_path_is_warned_of_once(path: Path, tmp_path: Path) -> None:
    code, names, lines = harness.expected(path)
    found, error = harness.run(path, tmp_path)
    assert error is None
    loud = [diagnosis for diagnosis in found if diagnosis.severity != "info"]
    assert [diagnosis.code for diagnosis in loud if diagnosis.code.startswith("GG3")] == [code]
    diagnosis = next(item for item in loud if item.code == code)
    assert diagnosis.severity == "warning"
    assert diagnosis.culprit is not None and diagnosis.culprit.line in lines
    text = render_for_error(diagnosis)
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("path", harness.programs("sound"), ids=_ids)
def test_sound_look_alikes_are_left_alone(path: Path, tmp_path: Path) -> None:
    found, error = harness.run(path, tmp_path, level="strict")
    assert error is None
    assert [diagnosis.headline for diagnosis in found if diagnosis.code.startswith("GG3")] == []
