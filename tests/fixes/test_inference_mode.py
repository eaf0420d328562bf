"""Derivatives asked for inside inference mode, which switching grad mode on does not end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradguard.core.errors import GradGuardError
from tests.integrations.lit import lightning, loader, regressor, trainer
from tests.running import only, said

FORCES = """
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)

def forces(pos):
    with torch.enable_grad():
        pos = pos.clone().requires_grad_(True)
        return torch.autograd.grad(net(pos).sum(), pos)[0]

{evaluate}

for it in range(4):
    x = torch.randn(8, 3)
    opt.zero_grad()
    net(x).pow(2).mean().backward()
    opt.step()
    evaluate(x)
"""
BLOCK = """
def evaluate(x):
    with torch.{mode}():
        return net(x).mean() + forces(x).mean()
"""
DECORATED = """
@torch.{mode}()
def evaluate(x):
    with torch.enable_grad():
        return forces(x).mean()
"""


@pytest.mark.parametrize("level", ["standard", "watch", "strict"])
@pytest.mark.parametrize("evaluate", [BLOCK, DECORATED])
def test_grad_mode_switched_on_inside(evaluate: str, level: str, tmp_path: Path) -> None:
    found = only(tmp_path, FORCES.format(evaluate=evaluate.format(mode="inference_mode")), "GG305", "torch.inference_mode()", level)
    assert found.related, "the call that has no graph to follow is shown too"
    assert said(tmp_path, FORCES.format(evaluate=evaluate.format(mode="no_grad")), level) == []


def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_(True)
        torch.autograd.grad(self(x).sum(), x)


@pytest.mark.filterwarnings("ignore:(?s)(?!.*GG).*")
@pytest.mark.parametrize("inference", [True, False])
def test_evaluation_by_lightning(inference: bool, tmp_path: Path) -> None:
    from gradguard import gradguard

    pl = lightning()
    model = regressor(pl, validation_step=validation_step)
    runner = trainer(pl, tmp_path, inference_mode=inference)
    with gradguard() as guard:
        if not inference:
            runner.validate(model, loader(), verbose=False)
            assert guard.diagnoses == []
            return
        with pytest.raises(GradGuardError) as caught:
            runner.validate(model, loader(), verbose=False)
    assert caught.value.diagnosis.code == "GG305"
    assert "validation_step" in str(caught.value) and "inference_mode=False" in str(caught.value)


def test_the_trainer_that_could_have_been_told(tmp_path: Path) -> None:
    lightning()
    program = """
import pytorch_lightning as pl
from tests.integrations.lit import loader, regressor

def validation_step(self, batch, batch_idx):
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_(True)
        torch.autograd.grad(self(x).sum(), x)

quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
runner = pl.Trainer({option}accelerator="cpu", **quiet)
runner.validate(regressor(pl, validation_step=validation_step), loader(), verbose=False)
"""
    found = only(tmp_path, program.format(option=""), "GG305", 'pl.Trainer(accelerator="cpu", **quiet)')
    assert found.fixes[0].title == "Pass `inference_mode=False` to `pl.Trainer(...)`"
    assert any("validation_step" in (span.label or "") for span in found.related)
    assert said(tmp_path, program.format(option="inference_mode=False, ")) == []
