"""Divisors that a name seems to keep from zero and a number does not: the line in the helper is found by what the numbers are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

LOOP = """
{helper}
total, count = torch.zeros(4), torch.zeros(4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for it in range(3):
    w = {call}
    loss = (net(torch.randn(8, 4)) * w.sum()).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
OWNER = """
class Weight:
    def __init__(self, eps):
        self.eps = eps
    def __call__(self, total, count):
        return total / (count + self.eps)
weight = Weight(0.0)
"""


@pytest.mark.parametrize(
    ("helper", "call", "line"),
    [
        (
            "def weight(total, count, steps=0):\n    return total / (count + steps)",
            "weight(total, count)",
            "return total / (count + steps)",
        ),
        (
            "def weight(total, count, eps=1e-8):\n    return total / (eps + count)",
            "weight(total, count, 0.0)",
            "return total / (eps + count)",
        ),
        (
            "def weight(total, count, *, eps=1e-8):\n    return total / (count + eps)",
            "weight(total, count, eps=0)",
            "return total / (count + eps)",
        ),
        (OWNER, "weight(total, count)", "return total / (count + self.eps)"),
        (
            "def weight(total, count):\n    least = 0\n    return total / count.clamp(min=least)",
            "weight(total, count)",
            "return total / count.clamp(min=least)",
        ),
    ],
)
def test_a_number_that_is_0_keeps_nothing_from_0(tmp_path: Path, helper: str, call: str, line: str) -> None:
    found = [each for each, _ in run_source(tmp_path, HEAD + LOOP.format(helper=helper, call=call))]
    assert found[0].code == "GG501" and found[0].culprit is not None and found[0].culprit.text == line


@pytest.mark.parametrize(
    "divisor",
    [
        "(count + smooth)",
        "(smooth + count.sum())",
        "(count + 1e-8)",
        "count.clamp(min=smooth)",
        "(count + torch.finfo(count.dtype).eps)",
        "(count + 2 * smooth)",
    ],
)
def test_a_divisor_that_is_guarded_is_not_the_line(tmp_path: Path, divisor: str) -> None:
    helper = (
        f"def scaled(total, count, smooth=1e-6):\n    return total / {divisor}\n"
        "def weight(total, count):\n    rate = scaled(total, count)\n    return (rate - rate.mean()) / rate.std()"
    )
    found = [each for each, _ in run_source(tmp_path, HEAD + LOOP.format(helper=helper, call="weight(total, count)"))]
    assert found[0].code == "GG501" and found[0].culprit is not None and found[0].culprit.text == "return (rate - rate.mean()) / rate.std()"
