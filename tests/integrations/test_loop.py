"""Plain-loop adapters."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from gradguard import GradGuardError, gradguard
from gradguard.integrations.loop import guarded_steps


def batches(n: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=generator) for _ in range(n)]


def test_one_step_an_item_and_diagnoses_inside() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    with pytest.raises(GradGuardError) as caught:
        for batch in guarded_steps(batches(), model, optimizer, level="strict"):
            optimizer.zero_grad()
            shown = model(batch).exp()
            if seen == 2:
                shown += 1
            shown.mean().backward()
            optimizer.step()
            seen += 1
    assert seen == 2
    assert caught.value.diagnosis.code == "GG101"


def test_a_loop_left_early_leaves_no_guard_open() -> None:
    from gradguard.runtime.session import current_session

    guard = gradguard()
    for _ in guarded_steps(batches(), guard=guard):
        assert current_session().guards == [guard]
        break
    gc.collect()
    assert current_session().guards == []


def test_settings_belong_to_one_guard() -> None:
    with pytest.raises(TypeError, match="either a guard or settings"):
        next(guarded_steps(batches(), guard=gradguard(), level="strict"))


def test_a_guard_is_named_its_objects() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    guard = gradguard().watch(model, optimizer, scheduler, torch.amp.GradScaler("cpu"))
    assert guard.models == [model]
    assert guard.optimizers == [optimizer]
