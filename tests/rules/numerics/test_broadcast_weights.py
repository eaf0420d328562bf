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


REGRESSION = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters())
data = torch.randn(12, 5)
class Mine(nn.Module):
    def forward(self, prediction, target):
        return F.smooth_l1_loss(prediction, target)
def squared(prediction, target):
    error = target - prediction
    return torch.square(error).mean()
criterion, mine = nn.MSELoss(), Mine()
for it in range(4):
    x, y = data[:, :4], data[:, 4]
    p = net(x)
    loss = LOSS
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


# the loss, and what is said of the column
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("F.mse_loss(p, y)", "`p` is [12, 1]"),
        ("criterion(p, y)", "`p` is [12, 1]"),
        ("F.l1_loss(input=p, target=y, reduction='none').sum() / 12", "`p` is [12, 1]"),
        ("mine(p, y)", "`prediction` is [12, 1]"),
        ("F.huber_loss(y, p)", "`p` is [12, 1]"),
        ("F.mse_loss(p.squeeze(1), data[:, 4:])", "`data[:, 4:]` is [12, 1]"),
        ("torch.stack([criterion(p, y), p.pow(2).mean()]).sum()", "`p` is [12, 1]"),
        ("squared(p, y)", "`prediction` is [12, 1]"),
        ("((p - y) ** 2).mean()", "`p` is [12, 1]"),
        ("torch.sub(p, y).abs().sum()", "`p` is [12, 1]"),
        ("(p.squeeze(1) - data[:, 4:]).pow(2).mean()", "`data[:, 4:]` is [12, 1]"),
        ("(p.view(12, -1) - y).pow(2).mean()", "`p.view(12, -1)` is [12, 1]"),
        ("(F.softplus(p) - p * y).mean()", "`p` is [12, 1]"),
    ],
)
def test_a_column_against_a_row_is_named_however_the_loss_is_written(tmp_path: Path, loss: str, said: str) -> None:
    source = HEAD + REGRESSION.replace("LOSS", loss)
    found = [each for each, _ in run_source(tmp_path, source)]
    assert [each.code for each in found] == ["GG505"]
    assert said in found[0].headline and "table of all pairs, [12, 12]" in found[0].headline
    assert found[0].culprit is not None and found[0].culprit.text in source
    assert not run_source(tmp_path, applied(source, found[0].fixes[0].patch or ""))


@pytest.mark.parametrize(
    "loss",
    [
        "F.mse_loss(p.squeeze(1), y)",
        "F.mse_loss(p, y[:, None])",
        "F.mse_loss(p.view(3, 4), y.view(3, 4))",
        "criterion(p, y.new_zeros(1).expand(12, 1))",
        "F.mse_loss(p, torch.zeros(()))",
        "F.mse_loss(p.expand(12, 3), x[:, :3]) + F.l1_loss(p, x.mean(1, keepdim=True))",
        "(p.squeeze(1) - y[:, None]).abs().mean() - (p - p.squeeze(1)).abs().mean() / 2",  # an energy distance
        "(p.squeeze(1) - y.reshape(-1, 1)).abs().mean()",
        "(p.squeeze(1).view(-1, 1) - y).abs().mean()",
        "(p.squeeze(1).unsqueeze(1) - y).abs().mean()",
        "(p.squeeze(1) - x.norm(dim=1, keepdim=True)).abs().mean()",
        "(-(p - y) ** 2).exp().mean() + p.mean()",  # a kernel between two samples
        "(p * y).pow(2).mean()",
    ],
)
def test_equal_shapes_and_pairs_on_purpose_are_silent(tmp_path: Path, loss: str) -> None:
    assert not run_source(tmp_path, HEAD + REGRESSION.replace("LOSS", loss), "strict")
