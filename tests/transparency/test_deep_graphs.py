"""Chains of 60,000 nodes: PyTorch frees nodes that anybody has looked at recursively, and a stack overflows where all were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradguard import gradguard
from tests.cases.zygote import run_apart


def _step(spoilt: bool) -> None:
    scale, x = nn.Parameter(torch.ones(2)), torch.ones(2)
    for _ in range(30_000):
        x = torch.sin(x * scale)
    kept = torch.sigmoid(x)
    loss = kept.sum()
    if spoilt:
        kept.mul_(2)
    loss.backward()


def _train(level: str) -> None:
    with gradguard(level=level):
        _step(spoilt=False)
        try:
            _step(spoilt=True)
        except RuntimeError:
            return
    raise AssertionError("not reached")


@pytest.mark.parametrize("level", ["watch", "standard", "strict", "forensic"])
def test_training_goes_on_after_a_diagnosis(level: str, tmp_path: Path) -> None:
    printed = tmp_path / "printed.txt"
    assert run_apart(_train, (level,), tmp_path, 120, printed) == 0, printed.read_text()
