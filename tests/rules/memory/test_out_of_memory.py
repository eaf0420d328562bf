"""Memory that runs out: what holds it is told, by line, of real allocation failures in processes with a limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cases.case import load_everything
from tests.rules.memory import programs
from tests.rules.memory.limited import limited
from tests.rules.memory.programs import Program
from tests.running import applied

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
CODES = {
    "GG801": programs.KEPT,
    "GG802": {**programs.EVALUATION, **{f"outputs {name}": each for name, each in programs.OUTPUTS.items()}},
    "GG803": {**programs.HUGE, **{f"attention {name}": each for name, each in programs.ATTENTION.items()}},
    "GG804": programs.ACTIVATIONS,
    "GG805": programs.OPTIMIZER,
}
ALL = [pytest.param(code, program, id=f"{code}-{name}") for code, each in CODES.items() for name, program in each.items()]


@pytest.fixture(autouse=True, scope="module")
def ready() -> None:
    load_everything()


@pytest.mark.parametrize(("code", "program"), ALL)
def test_the_line_is_named(code: str, program: Program, tmp_path: Path) -> None:
    outcome = limited(tmp_path, program.broken(), program.mib)
    found = [(each["code"], (each["culprit"] or {}).get("text")) for each in outcome.diagnoses]
    assert found == [(code, program.culprit)], outcome.output
    assert "DefaultCPUAllocator: can't allocate memory" in outcome.diagnoses[0]["torch_message"]
    assert outcome.status == 1


@pytest.mark.parametrize(("code", "program"), ALL)
def test_its_sound_twin_is_silent_within_the_same_limit(code: str, program: Program, tmp_path: Path) -> None:
    outcome = limited(tmp_path, program.repaired(), program.mib)
    assert (outcome.status, outcome.diagnoses) == (0, []), outcome.output


@pytest.mark.parametrize("name", programs.NEEDED)
def test_graphs_that_a_backward_call_needs_are_activations(name: str, tmp_path: Path) -> None:
    outcome = limited(tmp_path, programs.NEEDED[name], 60)
    (found,) = outcome.diagnoses
    assert found["code"] == "GG804", outcome.output
    assert not any("no_grad" in fix["title"] or "detach" in fix["title"].lower() for fix in found["fixes"])


@pytest.mark.parametrize("level", ["watch", "strict", "forensic"])
@pytest.mark.parametrize("kind", ["KEPT", "EVALUATION", "OUTPUTS", "HUGE", "OPTIMIZER", "ATTENTION"])
def test_at_every_level(kind: str, level: str, tmp_path: Path) -> None:
    program: Program = next(iter(getattr(programs, kind).values()))
    outcome = limited(tmp_path, program.broken(), program.mib, level)
    (found,) = outcome.diagnoses
    assert found["culprit"]["text"] == program.culprit, outcome.output


REPAIRED = [("GG801", "list"), ("GG802", "sum"), ("GG802", "outputs list"), ("GG803", "difference"), ("GG803", "attention module")]


@pytest.mark.parametrize(("code", "name"), [*REPAIRED, ("GG805", "AdamW")])
def test_the_recommended_patch_repairs_the_program(code: str, name: str, tmp_path: Path) -> None:
    program = CODES[code][name]
    (found,) = limited(tmp_path, program.broken(), program.mib).diagnoses
    patch = found["fixes"][0]["patch"]
    assert patch is not None
    outcome = limited(tmp_path, applied(program.broken(), patch), program.mib)
    assert (outcome.status, outcome.diagnoses) == (0, []), outcome.output


def test_the_size_of_a_state_is_told_only_where_that_of_a_parameter_is_known(tmp_path: Path) -> None:
    program = programs.OPTIMIZER["Adam"]
    (found,) = limited(tmp_path, program.broken(), 90).diagnoses  # in the midst of the first weight's
    assert found["headline"].endswith("`opt` makes its state in its first step")
    (found,) = limited(tmp_path, program.broken(), 106).diagnoses  # of the second's
    assert found["headline"].endswith("`opt` makes its state of about 64.0 MiB in its first step")
