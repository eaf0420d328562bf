"""Losses that are made of derivatives: a bias that only adds a constant gets no gradient, and nothing is wrong with that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

FORCES = """
class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
        self.shift = nn.Linear(3, 1)

    def forward(self, x):
        return self.net(x).sum() + SHIFT

model = Potential()
opt = torch.optim.Adam(MODEL.parameters(), lr=1e-2)
for it in range(30):
    x = torch.randn(8, 3, requires_grad=True)
    force = -torch.autograd.grad(model(x), x, create_graph=True)[0]
    loss = (force + x.detach()).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_constant_of_an_energy_is_silent(tmp_path: Path) -> None:
    assert not run_source(tmp_path, HEAD + FORCES.replace("SHIFT", "0").replace("MODEL", "model.net"))


@pytest.mark.parametrize("shift", ["self.shift(x).detach().sum()", "self.shift(x.detach()).data.sum()"])
def test_a_part_that_is_cut_off_is_still_named(tmp_path: Path, shift: str) -> None:
    codes = [each.code for each, _ in run_source(tmp_path, HEAD + FORCES.replace("SHIFT", shift).replace("MODEL", "model"))]
    assert codes == ["GG605"]
