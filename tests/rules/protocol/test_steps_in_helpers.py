"""GG606: one line steps twice on the gradients of one backward: no line is called the second, and the call that repeats it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import said

TRAINING = """
net = nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
def update():
    optimizer.step()
for _ in range(8):
    optimizer.zero_grad()
    net(torch.randn(4, 3)).pow(2).mean().backward()
    {steps}
"""
IN_A_HELPER = "update(); update()"
CLIPPED = "update(); nn.utils.clip_grad_norm_(net.parameters(), 1.0); update()"
IN_A_LOOP = "[optimizer.step() for _ in range(2)]"


@pytest.mark.parametrize("steps, again", [(IN_A_HELPER, "update()"), (CLIPPED, "update()"), (IN_A_LOOP, None)])
def test_one_line_that_steps_twice(steps: str, again: str | None, tmp_path: Path) -> None:
    (found,) = said(tmp_path, TRAINING.format(steps=steps))
    assert found.code == "GG606" and found.culprit is not None and found.culprit.text == "optimizer.step()"
    assert found.fixes[0].title == "Run this `step()` once for each backward()"
    assert found.fixes[0].patch is None
    assert again is None or again in [span.text for span in found.related]


@pytest.mark.parametrize("steps", ["update()", "optimizer.step()", "[update() for _ in range(1)]"])
def test_one_step_for_each_backward(steps: str, tmp_path: Path) -> None:
    assert not said(tmp_path, TRAINING.format(steps=steps))
