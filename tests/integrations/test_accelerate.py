"""The accelerate adapter on the real Accelerator."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradguard import GradGuardError, GradGuardWarning

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def setting(**options: Any) -> tuple[Any, Any, Any, Any, Any]:
    from gradguard.integrations.accelerate import watch

    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    x = torch.randn(32, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return accelerator, *prepared, watch(accelerator, *prepared, level="strict")


def test_it_knows_what_stands_behind_the_wrappers() -> None:
    accelerator, model, optimizer, _, guard = setting()
    assert guard.models == [accelerator.unwrap_model(model)]
    assert guard.optimizers == [optimizer.optimizer]


def test_a_failing_step_is_diagnosed_through_accelerate() -> None:
    accelerator, model, optimizer, loader, guard = setting()

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        shown = model(x).exp()
        shown += 1  # the culprit
        accelerator.backward(nn.functional.mse_loss(shown, y))
        optimizer.step()

    with pytest.raises(GradGuardError) as caught:
        for x, y in loader:
            guard.step(step, x, y)
    found = caught.value.diagnosis
    assert found.code == "GG101"
    assert found.culprit is not None
    assert "the culprit" in Path(__file__).read_text().splitlines()[found.culprit.line - 1]


@pytest.mark.parametrize("bypassed", [True, False])
def test_backward_past_the_accelerator(bypassed: bool) -> None:
    accelerator, model, optimizer, loader, _ = setting(gradient_accumulation_steps=4)
    from gradguard.integrations.accelerate import watch

    guard = watch(accelerator, model, optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in loader:
            with guard, accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                if bypassed:
                    loss.backward()
                else:
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    told = [each.message for each in said if isinstance(each.message, GradGuardWarning)]
    if not bypassed:
        assert guard.diagnoses == []
        return
    [found] = guard.diagnoses
    assert len(told) == 1
    assert found.name == "accelerate-backward-bypassed"
    assert found.culprit is not None
    assert "loss.backward()" in Path(__file__).read_text().splitlines()[found.culprit.line - 1]
    assert "4 times" in found.headline
