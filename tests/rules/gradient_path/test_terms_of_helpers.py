"""GG308: a term through numpy, in a sum that a helper makes and returns, alone or among others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

PROGRAM = """
import numpy as np
def distance(predicted, target):
    p = np.abs(np.fft.rfft({cut}))
    return torch.from_numpy(np.asarray((p - np.abs(np.fft.rfft(target.numpy()))) ** 2)).float().mean()
net = nn.Linear(8, 8)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
def finish(loss):
    opt.zero_grad()
    loss.backward()
    opt.step()
{functions}
for step in range(4):
    x = torch.randn(4, 8)
    {step}
"""
WAYS = {
    "in the loop": ("", "out = net(x); far = distance(out, x); loss = out.pow(2).mean() + far; finish(loss)"),
    "one result": (
        "def total(x):\n    out = net(x)\n    return out.pow(2).mean() + distance(out, x)",
        "finish(total(x))",
    ),
    "of several results": (
        "def begin(x):\n    out = net(x)\n    level = out.pow(2).mean()\n    far = distance(out, x)\n    loss = level + 0.1 * far\n"
        "    return level, far, loss",
        "level, far, loss = begin(x); finish(loss)",
    ),
}


@pytest.mark.parametrize(("functions", "step"), WAYS.values(), ids=WAYS)
def test_a_term_through_numpy(functions: str, step: str, tmp_path: Path) -> None:
    only(tmp_path, PROGRAM.format(cut="predicted.detach().numpy()", functions=functions, step=step), "GG308", "predicted.detach()")


@pytest.mark.parametrize(
    ("functions", "step"),
    [
        ("", "out = net(x); loss = out.pow(2).mean(); far = distance(out, x); finish(loss)"),
        (
            "def begin(x):\n    out = net(x)\n    loss = out.pow(2).mean() + 0.5\n    return loss, loss.detach() + distance(out, x)",
            "loss, shown = begin(x); finish(loss)",
        ),
    ],
)
def test_what_is_only_shown(functions: str, step: str, tmp_path: Path) -> None:
    assert said(tmp_path, PROGRAM.format(cut="predicted.detach().numpy()", functions=functions, step=step)) == []
