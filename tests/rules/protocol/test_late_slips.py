"""What goes wrong late, while gradients are not followed: seen by the order of steps and backward calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import said

LATE = """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
def again(optimizer):
    go = optimizer.step
    go()
for step in range({steps}):
    {loss}
    opt.step()
    {after}
    opt.zero_grad()
"""
LOSS = "net(torch.randn(8, 4)).pow(2).mean().backward()"
SLIPS = {
    "steps twice": (LOSS, "if step >= 80: opt.step()", "opt.step()"),
    "steps twice in a loop": (LOSS, "for _ in range(step // 80): opt.step()", "opt.step()"),
    "steps twice in a function": (LOSS, "if step >= 80: again(opt)", "go()"),
    "no backward call": (f"if step < 80: {LOSS}", "pass", "opt.step()"),
}


@pytest.mark.parametrize(("loss", "after", "culprit"), SLIPS.values(), ids=SLIPS)
def test_a_step_without_new_gradients_is_seen_when_it_begins(tmp_path: Path, loss: str, after: str, culprit: str) -> None:
    found = said(tmp_path, LATE.format(loss=loss, after=after, steps=130))
    assert [(each.code, each.culprit.text if each.culprit is not None else None) for each in found] == [("GG606", culprit)]


def test_several_backward_calls_for_a_step_are_silent(tmp_path: Path) -> None:
    other = "if step >= 80: net(torch.randn(8, 4)).mean().backward()"
    assert (
        said(tmp_path, LATE.format(loss=LOSS, after="pass", steps=130).replace("    opt.step()\n", f"    {other}\n    opt.step()\n")) == []
    )
