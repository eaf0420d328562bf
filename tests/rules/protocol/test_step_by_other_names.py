"""GG607: the condition that keeps a step from being reached, however the step is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

PROGRAM = """
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(20):
    for step in range(3):
        (net(torch.randn(8, 4)).pow(2).mean() / {every}).backward()
        if (step + 1) % {every} == 0:
            {call}
            net.zero_grad()
"""
CALLS = ["optimizer.step()", "go = optimizer.step; go()", "update = optimizer; update.step()"]


@pytest.mark.parametrize("call", CALLS)
def test_a_step_that_is_never_reached(call: str, tmp_path: Path) -> None:
    diagnosis = only(tmp_path, PROGRAM.format(every=8, call=call), "GG607", "(step + 1) % 8 == 0")
    assert "nothing calls" not in diagnosis.headline


@pytest.mark.parametrize("call", CALLS)
def test_a_step_that_is_reached(call: str, tmp_path: Path) -> None:
    assert said(tmp_path, PROGRAM.format(every=3, call=call)) == []
