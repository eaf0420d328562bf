"""GG203 about a state that begins from a parameter: detached for good it would cut the parameter off, and the reset comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, run_source

MODULE = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 4))
        self.mix = nn.GRUCell(3, 4)
        self.state = {first}

    def forward(self, x):
        {before}
        self.state = self.mix(x, {used})
        return self.state.mean(){more}
{reset}
cell = Cell()
opt = torch.optim.SGD(cell.parameters(), lr=0.1)
for step in range(3):
    loss = sum(cell(torch.randn(1, 3)) for _ in range({times}))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
VARIABLE = """
start = nn.Parameter(torch.randn(1, 4))
mix = nn.GRUCell(3, 4)
opt = torch.optim.SGD([start, *mix.parameters()], lr=0.1)
state = start
for step in range(3):
    state = mix(torch.randn(1, 3), state)
    loss = state.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
EITHER = "self.start if self.state is None else self.state"


def module(first: str = "None", before: str = "pass", used: str = EITHER, more: str = "", reset: str = "", times: int = 3) -> str:
    return MODULE.format(first=first, before=before, used=used, more=more, reset=reset, times=times)


def told(folder: Path, source: str) -> Diagnosis:
    found = [diagnosis for diagnosis, _ in run_source(folder, HEAD + source)]
    assert [diagnosis.code for diagnosis in found] == ["GG203"]
    return found[0]


@pytest.mark.parametrize(
    ("source", "first"),
    [
        (module(), "(`self.state = None`)"),
        (module(times=1), "(`self.state = None`)"),
        (module(before="previous = self.state if self.state is not None else self.start", used="previous"), "(`self.state = None`)"),
        (VARIABLE, "set `state` back to its first value between"),
    ],
)
def test_the_reset_comes_first_and_what_stops_learning_is_said(tmp_path: Path, source: str, first: str) -> None:
    fixes = told(tmp_path, source).fixes
    assert first in fixes[0].title and "start` again" in fixes[0].title
    assert "start` has no other part in this loss" in (fixes[1].detail or "")
    assert "detach" in fixes[1].title


def test_a_method_that_empties_it_comes_first(tmp_path: Path) -> None:
    fixes = told(tmp_path, module(reset="\n    def forget(self):\n        self.state = None\n", times=1)).fixes
    assert "`forget()`" in fixes[0].title
    assert "start` has no other part in this loss" in (fixes[1].detail or "")


@pytest.mark.parametrize(
    "source",
    [
        module(used="torch.zeros(1, 4) if self.state is None else self.state"),
        module(more=" + self.start.mean()"),
        module(used="(self.start if self.state is None else self.state) * self.start"),
        VARIABLE.replace("state = start", "state = torch.zeros(1, 4)"),
    ],
)
def test_nothing_is_cut_off_where_this_step_reaches_all(tmp_path: Path, source: str) -> None:
    fixes = told(tmp_path, source).fixes
    assert "detach" in fixes[0].title
    assert not any("no other part" in (fix.detail or "") for fix in fixes)


def test_the_reset_as_written_repairs_it(tmp_path: Path) -> None:
    source = module().replace("    loss = sum(", "    cell.state = None\n    loss = sum(")
    assert run_source(tmp_path, HEAD + source) == []
