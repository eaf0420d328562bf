"""The callback in a Lightning fit on two ranks: same weights bit for bit, one diagnosis with names, nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
PROGRAM = Path(__file__).with_name("lightning_ddp_program.py")


def fit(folder: Path, level: str, kind: str) -> list[dict[str, Any]]:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "LOCAL_", "NODE_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(folder), level, kind],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    files = sorted(folder.glob("rank*.json"))
    assert files, done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


def test_two_ranks_end_with_the_same_weights(tmp_path: Path) -> None:
    bare = fit(tmp_path / "bare", "bare", "sound")
    for level in ("standard", "strict"):
        guarded = fit(tmp_path / level, level, "sound")
        assert len(guarded) == len(bare) == 2
        for one, other in zip(bare, guarded, strict=True):
            assert one["parameters"] == other["parameters"]
            assert other["said"] == [] and other["error"] == ""


def test_a_failing_step_is_named_on_its_rank(tmp_path: Path) -> None:
    first = fit(tmp_path / "broken", "standard", "inplace")[0]
    assert [diagnosis["code"] for diagnosis in first["said"]] == ["GG101"]
    assert first["said"][0]["culprit"]["text"].strip() == "hidden *= 2"
    assert "error[GG101]" in first["error"]


def test_a_branch_without_gradient_is_named(tmp_path: Path) -> None:
    first = fit(tmp_path / "unused", "standard", "unused")[0]
    assert [diagnosis["code"] for diagnosis in first["said"]][:1] == ["GG701"], first
    assert "spare.weight" in first["said"][0]["headline"] + json.dumps(first["said"][0]["tensors"])


def test_a_backward_past_manual_backward_is_named(tmp_path: Path) -> None:
    ranks = fit(tmp_path / "bypassed", "standard", "bypassed")
    said = [diagnosis for rank in ranks for diagnosis in rank["said"]]
    assert {diagnosis["code"] for diagnosis in said} == {"GG743"}  # each rank keeps what it found; one of them speaks
    assert said[0]["culprit"]["text"].strip() == "loss.backward()"
    assert "self.manual_backward(loss)" in said[0]["fixes"][0]["patch"]
    assert ranks[0]["parameters"] != ranks[1]["parameters"]


def test_manual_backward_is_silent(tmp_path: Path) -> None:
    first, second = fit(tmp_path / "manual", "standard", "manual")
    assert first["parameters"] == second["parameters"]
    assert first["said"] == second["said"] == []
