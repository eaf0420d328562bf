"""GG101: an array that shares a saved tensor's memory is written, however it got its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

PROGRAM = """
import numpy as np
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def threshold(array):
    array[array < 0.5] = 0.0
for step in range(3):
    probs, mask = torch.sigmoid(net(torch.randn(8, 4))), torch.randint(2, (8, 2)).float()
    loss = (probs - mask).abs().mean()
    {lines}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("lines", "culprit"),
    [
        ("pred = probs.detach().numpy(); pred[pred < 0.5] = 0.0", "pred[pred < 0.5] = 0.0"),
        ("pred, truth = probs.detach().numpy(), mask.numpy() > 0.5; pred[pred < 0.5] = 0.0", "pred[pred < 0.5] = 0.0"),
        ("(truth, pred), count = (mask.numpy(), probs.detach().numpy()), 1; flat, n = pred.ravel(), 2; flat[:] = 0.0", "flat[:] = 0.0"),
        ("first, *rest = probs.detach().numpy(); first[:] = 0.0", "first[:] = 0.0"),
        ("threshold(probs.detach().numpy())", "array[array < 0.5] = 0.0"),
    ],
)
def test_the_line_that_writes_the_array(lines: str, culprit: str, tmp_path: Path) -> None:
    only(tmp_path, PROGRAM.format(lines=lines), "GG101", culprit)


@pytest.mark.parametrize(
    "lines",
    [
        "pred, truth = probs.detach().numpy().copy(), mask.numpy(); pred[pred < 0.5] = 0.0",
        "pred, truth = probs.detach().numpy(), np.array(mask.numpy()); truth[:] = 0.0; hits = pred > 0.5",
        "pred, other = probs.detach().numpy(), np.zeros(3); other[:] = pred.max()",
    ],
)
def test_copies_and_other_arrays(lines: str, tmp_path: Path) -> None:
    assert said(tmp_path, PROGRAM.format(lines=lines)) == []
