"""Hinges that are closed because a margin is kept, beside those behind which nothing learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

MARGIN = """
maker = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6))
judge = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))
train_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
train_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)

def energy(x):
    return (judge(x) - x).pow(2).sum(1).mean()

for it in range(60):
    made = maker(torch.randn(16, 2)) + 9.0
    loss = {loss}
    loss.backward()
    train_judge.step()
    judge.zero_grad(); maker.zero_grad()
    if {apart}:
        energy(maker(torch.randn(16, 2))).backward()
        train_maker.step()
        judge.zero_grad(); maker.zero_grad()
"""


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_a_margin_that_is_kept_is_silent(level: str, tmp_path: Path) -> None:
    source = MARGIN.format(loss="energy(torch.rand(16, 6)) + torch.relu(3 - energy(made))", apart=True)
    assert run_source(tmp_path, HEAD + source, level) == []


def test_a_margin_behind_which_nobody_else_trains_the_maker(tmp_path: Path) -> None:
    source = MARGIN.format(loss="energy(torch.rand(16, 6)) + torch.relu(3 - energy(made))", apart=False)
    (found,) = [diagnosis for diagnosis, _ in run_source(tmp_path, HEAD + source) if diagnosis.code == "GG504"]
    assert "maker." in found.headline and "judge." not in found.headline
