"""GG603 where an optimizer has nothing but frozen parameters: that is said, early, and once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import said

PROGRAM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x):
        return self.head(self.body(x))

net = Net()
{freeze}
opt = torch.optim.SGD({given}, lr=0.05)
{other}
for step in range({steps}):
    opt.zero_grad()
    net(torch.randn(16, 4)).pow(2).mean().backward()
    opt.step()
{after}
"""
LOOP = "for p in net.body.parameters():\n    p.requires_grad = False"


def program(freeze: str, given: str, other: str = "", steps: int = 30, after: str = "") -> str:
    return PROGRAM.format(freeze=freeze, given=given, other=other, steps=steps, after=after)


@pytest.mark.parametrize(
    ("freeze", "given"),
    [
        (LOOP, "net.body.parameters()"),
        ("net.body.requires_grad_(False)", "[{'params': net.body.parameters()}]"),
        (LOOP, "[p for p in net.parameters() if not p.requires_grad]"),
    ],
)
def test_all_that_it_was_given_is_frozen(tmp_path: Path, freeze: str, given: str) -> None:
    found = said(tmp_path, program(freeze, given))
    assert [diagnosis.code for diagnosis in found] == ["GG603"]
    assert found[0].headline.startswith("every parameter of `opt` is frozen")
    assert "net.head.1.weight" in found[0].headline or "net.head" in found[0].headline
    assert found[0].culprit is not None and found[0].culprit.text == f"torch.optim.SGD({given}, lr=0.05)"
    assert found[0].step is not None and found[0].step <= 20


@pytest.mark.parametrize(
    "source",
    [
        program("net.body.requires_grad_(False).eval()", "[p for p in net.parameters() if p.requires_grad]"),
        program("net.body.requires_grad_(False).eval()", "net.parameters()"),
        program(  # a stage in which the other optimizer trains
            "net.body.requires_grad_(False)",
            "net.body.parameters()",
            "second = torch.optim.SGD(net.head.parameters(), lr=0.05)",
            after="    second.step()\n    second.zero_grad()",
        ),
        program(  # the rest is updated by hand
            "net.body.requires_grad_(False)",
            "net.body.parameters()",
            after="    for p in net.head.parameters():\n        p.data -= 0.05 * p.grad\n        p.grad = None",
        ),
    ],
)
def test_other_frozen_parts(tmp_path: Path, source: str) -> None:
    assert [each.code for each in said(tmp_path, source) if each.code in ("GG603", "GG604")] == []
