"""`gradguard run --summary`: what a run did, printed when it ends."""

from __future__ import annotations

from pathlib import Path

from cli_programs import guarded

PROGRAM = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    net(torch.randn(8, 2)).pow(2).mean().backward()
    optimizer.step()
"""


def test_summary_is_of_the_run_that_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    outcome = guarded("--summary", "train.py", cwd=tmp_path)
    assert outcome.status == 0
    text = outcome.err
    assert "12 optimizer steps, 12 backward calls" in text
    assert "SGD: 12 steps, 4 parameters" in text


def test_nothing_is_summed_up_unasked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    outcome = guarded("train.py", cwd=tmp_path)
    assert outcome.status == 0
    assert "optimizer steps" not in outcome.err
