"""Calm steps: what is odd is still seen in them, and where it is."""

from __future__ import annotations

import gc
import linecache
import math
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import gradguard
from gradguard.core.diagnosis import Diagnosis
from gradguard.probes import replicas
from gradguard.probes.listeners import local
from gradguard.rules import spans
from gradguard.runtime.session import current_session

STEPS = 150


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the process may have left replicas or an Accelerator that accumulates, with which no step is calm."""
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    monkeypatch.setattr(replicas, "known", weakref.WeakKeyDictionary())
    current_session()._runs.clear()  # guards made at one line of this file share their run


def _trained(spoil: Any, level: str = "watch") -> tuple[list[Diagnosis], list[bool]]:
    """A loop whose step number 120 is spoilt; what was said, and which steps were calm."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    calm = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gradguard(level=level) as guard:
            for step in range(STEPS):
                x = torch.randn(8, 4)
                optimizer.zero_grad()
                loss = spoil(model(x), x) if step >= 120 else model(x).pow(2).mean()
                loss.backward()
                calm.append(local.coast is not None)
                optimizer.step()
    return guard.diagnoses, calm


def test_most_steps_of_a_healthy_loop_are_calm_and_nothing_is_said() -> None:
    said, calm = _trained(lambda y, x: y.pow(2).mean())
    assert said == []
    assert sum(calm) > STEPS // 3


@pytest.mark.parametrize("level", ["watch", "standard"])
def test_sound_training_is_not_searched_for_among_all_objects_alive(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a tenth of a second in a process with a framework: as long as hundreds of small steps."""
    searches = []
    every_object = gc.get_objects

    def counted(*args: Any, **kwargs: Any) -> list[Any]:
        searches.append(sys._getframe(1).f_code)
        return every_object(*args, **kwargs)

    monkeypatch.setattr(gc, "get_objects", counted)
    monkeypatch.setattr(spans, "loaded_files", lambda: ())  # other tests' files, in which there is what has to be looked for
    monkeypatch.setattr(linecache, "cache", {})
    said, _ = _trained(lambda y, x: y.pow(2).mean(), level)
    assert said == []
    assert searches == []


def test_a_loss_that_is_not_finite_is_seen_in_its_own_step() -> None:
    def spoil(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (y.detach() * 0 - 1).sqrt().mean() + y.mean()  # spoilt

    said, calm = _trained(spoil)
    assert any(calm[112:120])
    assert said[0].code == "GG501"
    assert said[0].step == 121
    assert said[0].culprit is not None and "sqrt" in said[0].culprit.text


def test_a_gradient_that_overflows_is_seen_within_some_steps() -> None:
    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * math.inf

    said, _ = _trained(lambda y, x: Overflow.apply(y).pow(2).mean())  # type: ignore[no-untyped-call]
    assert said, "nothing was said"
    assert said[0].code in ("GG501", "GG502")


def test_an_error_in_a_calm_step_is_diagnosed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(RuntimeError, match="GG101"), gradguard(level="watch"):
        for step in range(100):
            optimizer.zero_grad()
            y = model(torch.randn(8, 4)).sigmoid()
            loss = y.pow(2).mean()
            if step == 90:
                assert local.coast is not None
                y += 1
            loss.backward()
            optimizer.step()


def test_guards_of_two_levels_made_at_one_line_keep_their_runs() -> None:
    guards = [gradguard(level=level) for level in ("watch", "strict")]
    runs = []
    for _ in range(3):
        for guard in guards:
            with guard:
                runs.append(guard.run)
    assert runs[0] is runs[2] is runs[4]
    assert runs[1] is runs[3] is runs[5]
    assert runs[0] is not runs[1]
