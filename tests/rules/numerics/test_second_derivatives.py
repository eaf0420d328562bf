"""A slope that is infinite at one point and is differentiated again: the op that was differentiated is named, not a division nearby."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

RADIAL = """
class Radial(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, p):
        r = RADIUS
        return self.net(r) / 2.0

net = Radial()
opt = torch.optim.Adam(net.parameters())
points = torch.tensor([[0.0, 0.0], [0.5, 1.0], [-1.0, 0.3]])
for it in range(3):
    p = points.clone().requires_grad_(True)
    slope = torch.autograd.grad(net(p).sum(), p, create_graph=True)[0]
    loss = (slope.pow(2).sum(1) - 1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("radius", ["torch.sqrt(p.pow(2).sum(1, keepdim=True))"])
def test_the_root_is_named(tmp_path: Path, radius: str) -> None:
    diagnosis = run_source(tmp_path, HEAD + RADIAL.replace("RADIUS", radius))[0][0]
    assert diagnosis.code == "GG501" and diagnosis.culprit is not None and diagnosis.culprit.text == radius
    assert "the derivative of `torch.sqrt(" in diagnosis.headline and "create_graph=True" in " ".join(diagnosis.notes)
    assert not any("was not traced" in note for note in diagnosis.notes)


def test_a_root_that_is_kept_off_zero_is_silent(tmp_path: Path) -> None:
    assert not run_source(tmp_path, HEAD + RADIAL.replace("RADIUS", "torch.sqrt(p.pow(2).sum(1, keepdim=True) + 1e-6)"))
