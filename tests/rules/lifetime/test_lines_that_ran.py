"""Each line that is told is one that ran: a store under a condition that was false carries nothing, and what comes later did nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.running import only

CARRIED = """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)
    def forward(self, x, state):
        h, state = self.cell(x, state)
        return self.out(h), state

def train(cut):
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = None
    for step in range(4):
        {switch}
        scores, state = model(torch.randn(3, 6, 4), state)
        loss = scores.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

train(cut=False)
"""


@pytest.mark.parametrize(
    "switch",
    [
        "if state is not None and cut:\n            state = tuple(part.detach() for part in state)",
        "if cut and step:\n            h, c = state\n            state = (h.detach(), c.detach())",
        "state = [part.detach() for part in state] if cut else state",
    ],
)
def test_carried_state(switch: str, tmp_path: Path) -> None:
    only(tmp_path, CARRIED.format(switch=switch), "GG203", "scores, state = model(torch.randn(3, 6, 4), state)")


def test_a_layer_that_will_be_replaced_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "surgery_elsewhere.py").write_text("from torch import nn\n\n\ndef operate(net):\n    setattr(net, '1', nn.Linear(8, 2))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        source = """
from surgery_elsewhere import operate
net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
operate(net)
for step in range(20):
    opt.zero_grad()
    net(torch.randn(6, 4)).pow(2).mean().backward()
    opt.step()
net[1] = nn.Linear(8, 3)
"""
        found = only(tmp_path, source, "GG604", "opt = torch.optim.SGD(net.parameters(), lr=0.1)".partition(" = ")[2])
        assert not any(span.text and "nn.Linear(8, 3)" in span.text for span in found.related)
    finally:
        sys.modules.pop("surgery_elsewhere", None)
