"""A reset that zeroes a state in place keeps its graph: the fix is there, and repairs the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source

CELL = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.state = torch.zeros(2, 4)
    def reset(self):
        RESET
    def forward(self, x):
        self.state = torch.tanh(self.a(x) + self.state)
        return self.state

net = Cell()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net.reset()
    for _ in range(2):
        out = net(torch.randn(2, 4))
    opt.zero_grad()
    out.sum().backward()
    opt.step()
"""


@pytest.mark.parametrize("reset", ["self.state.zero_()", "self.state.fill_(0.5)", "cell = self; cell.state.zero_()"])
def test_the_reset_is_mended(tmp_path: Path, reset: str) -> None:
    source = HEAD + CELL.replace("RESET", reset)
    found, text = run_source(tmp_path, source)[0]
    assert found.code == "GG203" and "keeps the graph" in text, text
    assert not run_source(tmp_path, applied(source, found.fixes[0].patch or "")), text
