"""Losses of shape [n, 1] times weights of shape [n]: a table whose mean knows the weights' sum only; and tables that are meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source

WEIGHTED = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters())
for it in range(6):
    x = torch.randn(12, 4)
    error = F.mse_loss(net(x), x[:, :1], reduction="none")
    weight = torch.rand(WEIGHTS)
    loss = LOSS
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("loss", ["(error * weight).mean()", "(weight * error).sum() / 12"])
def test_weights_against_a_column_of_losses_are_named(tmp_path: Path, loss: str) -> None:
    source = HEAD + WEIGHTED.replace("WEIGHTS", "12").replace("LOSS", loss)
    found = [each for each, _ in run_source(tmp_path, source)]
    assert found[0].code == "GG505" and "their product is a table" in found[0].headline
    assert "`weight` is [12]" in found[0].headline and "`error` is [12, 1]" in found[0].headline
    assert not run_source(tmp_path, applied(source, found[0].fixes[0].patch or ""))


@pytest.mark.parametrize(
    ("weights", "loss"),
    [
        ("12, 1", "(error * weight).mean()"),
        ("12", "(error.squeeze(1) * weight).mean()"),
        ("12", "(net(x) * weight).softmax(1).diagonal().log().mean()"),  # scores of all pairs
        ("12", "((net(x) * weight).tanh() * torch.eye(12)).sum()"),
        ("12", "(error.sum(1, keepdim=True) * weight).mean()"),  # a column that was made one
    ],
)
def test_tables_that_are_meant_and_equal_shapes_are_silent(tmp_path: Path, weights: str, loss: str) -> None:
    assert not run_source(tmp_path, HEAD + WEIGHTED.replace("WEIGHTS", weights).replace("LOSS", loss))
