"""Thresholds and windows under a rule's own key: the same program is told earlier, later or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import gradguard
from gradguard.runtime.guard import Guard
from gradguard.runtime.session import current_session

Program = Callable[[Guard], None]


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _cleared_too_early(guard: Guard) -> None:
    model, optimizer = _parts()
    with guard:
        for _ in range(12):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.zero_grad()
            model(torch.randn(8, 4)).abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _kept_losses(guard: Guard) -> None:
    model, optimizer = _parts()
    losses = []
    with guard:
        for _ in range(100):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)


def _clipped_too_late(guard: Guard) -> None:
    model, optimizer = _parts()
    with guard:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _rate_of_zero(guard: Guard) -> None:
    model, optimizer = _parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 10))
    with guard:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()


def _vanished_rate(guard: Guard) -> None:
    model, optimizer = _parts()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with guard:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize(
    ("program", "code", "options"),
    [
        (_cleared_too_early, "GG602", {"times": 50}),
        (_kept_losses, "GG608", {"age": 64}),
        (_clipped_too_late, "GG610", {"times": 50}),
        (_rate_of_zero, "GG611", {"steps": 200}),
        (_vanished_rate, "GG612", {"vanished": 1e-30}),
        (_vanished_rate, "GG612", {"steps": 200}),
    ],
)
def test_a_threshold_beyond_what_the_run_shows_silences_it(program: Program, code: str, options: dict[str, Any]) -> None:
    for chosen, told in (({}, True), (options, False)):
        current_session()._runs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guard = gradguard(rules={code: chosen}) if chosen else gradguard()
            program(guard)
        assert (code in [diagnosis.code for diagnosis in guard.diagnoses]) is told, chosen


def test_it_is_told_sooner_where_less_is_asked_for() -> None:
    steps = []
    for times in (2, 6):
        current_session()._runs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guard = gradguard(rules={"GG610": {"times": times}})
            _clipped_too_late(guard)
        steps.append(next(diagnosis.step for diagnosis in guard.diagnoses if diagnosis.code == "GG610"))
    assert steps[0] < steps[1]
