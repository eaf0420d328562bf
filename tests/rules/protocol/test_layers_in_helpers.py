"""GG605: layers that nothing calls, in a class whose forward is written in functions that the object is handed to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

CELL = """
def gates(cell, x, h):
    i = torch.sigmoid(cell.ix(x) + cell.ih(h))
    f = torch.sigmoid({forget})
    return i, f
def run(owner, x, h):
    i, f = gates(owner, x, h)
    return i * torch.tanh(owner.out(x)) + f * h
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.ix, self.ih, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.fx, self.fh = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x, h):
        {forward}
cell, h = Cell(), torch.zeros(8, 4)
opt = torch.optim.SGD(cell.parameters(), lr=0.1)
for step in range(20):
    opt.zero_grad()
    cell(torch.randn(8, 4), h).pow(2).mean().backward()
    opt.step()
"""
DIRECT = """i = torch.sigmoid(self.ix(x) + self.ih(h))
        f = torch.sigmoid({forget})
        return i * torch.tanh(self.out(x)) + f * h"""


@pytest.mark.parametrize(
    ("forward", "culprit"),
    [
        (DIRECT.format(forget="self.ix(x) + self.ih(h)"), "f = torch.sigmoid(self.ix(x) + self.ih(h))"),
        ("return run(self, x, h)", "f = torch.sigmoid(cell.ix(x) + cell.ih(h))"),
        ("work = run\n        return work(self, x=x, h=h)", "f = torch.sigmoid(cell.ix(x) + cell.ih(h))"),
    ],
)
def test_layers_that_nothing_calls(forward: str, culprit: str, tmp_path: Path) -> None:
    diagnosis = only(tmp_path, CELL.format(forget="cell.ix(x) + cell.ih(h)", forward=forward), "GG605", culprit)
    assert diagnosis.headline.startswith("`fx` and `fh` of `Cell` never get a gradient")


@pytest.mark.parametrize("forward", [DIRECT.format(forget="self.fx(x) + self.fh(h)"), "return run(self, x, h)"])
def test_layers_that_are_called(forward: str, tmp_path: Path) -> None:
    assert said(tmp_path, CELL.format(forget="cell.fx(x) + cell.fh(h)", forward=forward)) == []
