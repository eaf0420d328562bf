"""`gradguard memory`: what held memory at the fullest moment, as text, JSON lines and a page."""

from __future__ import annotations

import json
from pathlib import Path

from cli_programs import guarded, python

PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(4)))
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    hidden = net(torch.randn(256, 64))
    loss = hidden.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained")
"""
SAVED = 4 * 256 * (64 + 512) * 4 + 256 * 64 * 4  # the inputs of eight linear layers, and of `pow`


def test_text_json_lines_and_a_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    outcome = python("-m", "gradguard", "memory", "--report", "memory.jsonl", "--html", "memory.html", "train.py", cwd=tmp_path)
    assert outcome.status == 0 and outcome.out == "trained\n"
    text = outcome.err
    assert "memory at step" in text and "as backward began" in text
    assert "train.py:8" in text and "hidden = net(torch.randn(256, 64))" in text
    assert "Checkpoint each of `net.*`" in text
    records = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    sums = records[0]
    parameters = sums["kinds"]["parameters"]
    assert sums["kinds"]["saved"] == SAVED
    assert sums["kinds"]["optimizer state"] == 2 * parameters + 4 * 16 and sums["gradients"] == parameters
    for kind in ("line", "module", "operation"):
        assert sum(record["nbytes"] for record in records if record["memory"] == kind) == SAVED
    lines = {record["line"]: record["nbytes"] for record in records if record["memory"] == "line"}
    assert set(lines) == {8, 9}
    [checkpointing] = [record for record in records if record["memory"] == "saving" and "net.*" in record["title"]]
    assert checkpointing["nbytes"] == 3 * 256 * 512 * 4
    page = (tmp_path / "memory.html").read_text()
    assert "<svg" in page and "train.py" in page and "<script" not in page and "http" not in page


def test_a_program_without_backward_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nprint(torch.ones(2).sum())\n")
    outcome = python("-m", "gradguard", "memory", "train.py", cwd=tmp_path)
    assert outcome.status == 0 and "no backward call was seen" in outcome.err


def test_run_prints_it_where_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    assert "saved for backward by module" in guarded("--memory", "train.py", cwd=tmp_path).err
