"""FSDP2 (`fully_shard`) with activation checkpointing and autocast, DTensor parameters, tensor parallel and a pipeline: two gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
PROGRAM = Path(__file__).with_name("sharded_program.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["sharded", "meta", "dtensor", "tensor parallel", "pipeline"])
@pytest.mark.parametrize("level", ["watch", "standard", "strict", "forensic"])
def test_same_parameters_and_collectives_and_nothing_said(ranks: list[dict[str, Any]], kind: str, level: str) -> None:
    for rank in ranks:
        bare, guarded = rank[kind]["None"], rank[kind][level]
        assert guarded["parameters"] == bare["parameters"]
        assert guarded["said"] == []
        assert guarded["collectives"] == bare["collectives"] and sum(bare["collectives"]) > 10


@pytest.mark.parametrize("level", ["watch", "strict"])
def test_a_write_in_a_sharded_checkpointed_model_is_named(ranks: list[dict[str, Any]], level: str) -> None:
    said = ranks[0]["broken"][level]["said"]
    assert [diagnosis["code"] for diagnosis in said] == ["GG101"]
    assert said[0]["culprit"]["text"].strip() == "chance += 1"
    assert "`chance`" in said[0]["headline"]


@pytest.mark.parametrize("kind", ["again", "in place", "no path", "not finite", "shape", "leaf", "not a scalar"])
@pytest.mark.parametrize("level", ["watch", "standard", "strict", "forensic"])
def test_a_diagnosis_on_one_rank_alone_does_not_communicate(ranks: list[dict[str, Any]], kind: str, level: str) -> None:
    alone, other = (rank["alone"][level][kind] for rank in ranks)
    assert alone["collectives"] == 0
    assert other == {"said": [], "collectives": 0}
