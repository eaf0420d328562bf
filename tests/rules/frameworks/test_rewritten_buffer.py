"""GG712 where a checkpointed function reads a buffer that is written in place before backward runs it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import run_source

HEAD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
"""
PROGRAM = """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("level", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.turns = 0

    def forward(self, x):
        h = self.inner(x)
        {start}
        kept = h[h[:, 0] > self.level]
        {end}
        return kept.sin().exp().sum()

    def rise(self, h):
        with torch.no_grad():
            {rise}

net = nn.ModuleList([Gate(), Gate()])
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    x = torch.randn(12, 6)
    opt.zero_grad()
    loss = sum(checkpoint(gate, x, use_reentrant=False) for gate in net)
    {between}
    loss.backward()
    opt.step()
"""
ADDED = "self.level += h.mean().abs() + 0.3"
COPIED = "self.level.copy_(self.level * 0.5 + h.abs().mean())"
OUTSIDE = "net[0].level.add_(0.5)"

IN_A_FUNCTION = (
    HEAD
    + """
@torch.no_grad()
def rise(gate, h):
    gate.level += h.mean().abs() + 0.3

def run(gate, x):
    h = gate.inner(x)
    kept = h[h[:, 0] > gate.level]
    rise(gate, h)
    return kept.sin().exp().sum()
"""
    + PROGRAM.format(start="return run(self, x)", end="pass", rise="pass", between="pass")
)


def program(start: str = "pass", end: str = "pass", rise: str = "pass", between: str = "pass") -> str:
    return HEAD + PROGRAM.format(start=start, end=end, rise=rise, between=between)


BROKEN = {
    "added to in a method": (program(end="self.rise(h)", rise=ADDED), ADDED),
    "copied into at the end": (program(end="self.rise(h)", rise=COPIED), COPIED),
    "raised in forward itself": (
        program(end="self.level.add_(h.detach().mean().abs() + 0.3)"),
        "self.level.add_(h.detach().mean().abs() + 0.3)",
    ),
    "written between forward and backward": (program(between=OUTSIDE), OUTSIDE),
    "added to in a method that goes by another name": (program(start="rise = self.rise", end="rise(h)", rise=ADDED), ADDED),
    "forward in a function": (IN_A_FUNCTION, "gate.level += h.mean().abs() + 0.3"),
    "beside one that is set anew in each run": (
        program(start="self.last.copy_(h.detach().mean())", end="self.rise(h)", rise="self.level += self.last.abs() + 0.3"),
        "self.level += self.last.abs() + 0.3",
    ),
}


@pytest.mark.parametrize("slug", BROKEN)
def test_the_write_is_told(slug: str, tmp_path: Path) -> None:
    source, text = BROKEN[slug]
    found = [diagnosis for diagnosis, _ in run_source(tmp_path, source)]
    assert [diagnosis.code for diagnosis in found] == ["GG712"]
    assert found[0].culprit is not None and found[0].culprit.text == text
    assert "`self.level` of `Gate`" in found[0].headline
    assert found[0].tensors[0].name == "level"


SOUND = {
    "set anew before it is read": program(start="self.level.copy_(h.detach().mean())"),
    "counted, and not read": program(end="self.last += 1"),
    "written after backward": program().replace("opt.step()", "opt.step(); net[0].level.add_(0.1)"),
}


@pytest.mark.parametrize("slug", SOUND)
def test_what_both_runs_see_is_not_told(slug: str, tmp_path: Path) -> None:
    assert run_source(tmp_path, SOUND[slug]) == []


@pytest.mark.parametrize("slug", SOUND)
def test_it_is_not_blamed_for_another_cause(slug: str, tmp_path: Path) -> None:
    counted = SOUND[slug].replace("return kept", "self.turns += 1\n        return (kept[1:] if self.turns % 2 == 0 else kept)")
    found = [diagnosis for diagnosis, _ in run_source(tmp_path, counted)]
    assert [diagnosis.code for diagnosis in found] == ["GG712"]
    assert "level" not in found[0].headline
    assert "last" not in found[0].headline
