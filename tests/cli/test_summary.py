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


def test_an_interrupted_run_is_summed_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "net = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(10):\n"
        "    loss = net(torch.randn(3, 2)).mean()\n"
        "    opt.zero_grad()\n"
        "    loss.backward()\n"
        "    opt.step()\n"
        "    if step == 5:\n"
        "        raise KeyboardInterrupt\n"
    )
    outcome = guarded("--summary", "train.py", cwd=tmp_path)
    assert outcome.err.count("6 optimizer steps, 6 backward calls") == 1
    assert "KeyboardInterrupt" in outcome.err
    assert outcome.status in (-2, 130)


def test_errors_that_the_program_caught_are_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "net = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(6):\n"
        "    out = torch.sigmoid(net(torch.randn(3, 2)))\n"
        "    if step % 2:\n"
        "        out *= 2\n"
        "    opt.zero_grad()\n"
        "    try:\n"
        "        out.mean().backward()\n"
        "    except RuntimeError:\n"
        "        continue\n"
        "    opt.step()\n"
    )
    outcome = guarded("--summary", "train.py", cwd=tmp_path)
    assert "GG101 inplace-modified-saved-tensor" in outcome.err
    assert "train.py:7, 3 times" in outcome.err
