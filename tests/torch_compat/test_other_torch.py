"""A torch that is built otherwise than the one at hand: what can be watched there is watched, and the rest is said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradguard import GradGuardError, gradguard
from gradguard.probes import torch_functions
from gradguard.torch_compat import saved_tensors


@pytest.fixture
def anew() -> Iterator[None]:
    torch_functions.uninstall()
    yield
    torch_functions.uninstall()


def a_failing_step() -> None:
    hidden = nn.Linear(3, 2)(torch.ones(2, 3)).sigmoid()
    hidden += 1
    hidden.sum().backward()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_what_cannot_be_replaced_is_done_without(anew: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def unfit(original: Any) -> Any:
        raise AttributeError("no __func__")

    monkeypatch.setattr(torch_functions, "_apply", unfit)
    with caplog.at_level(logging.ERROR, "gradguard"):
        for _ in range(2):
            with pytest.raises(GradGuardError, match="GG101"), gradguard():
                a_failing_step()
    assert ["cannot watch apply" in record.getMessage() for record in caplog.records] == [True]


def test_a_class_method_of_c(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `Function.apply` is one in torch 2.14: a descriptor without the plain function in it."""

    class InC:
        def __init__(self, method: Any) -> None:
            self.method = method

        def __get__(self, instance: Any, owner: Any) -> Any:
            return self.method.__get__(instance, owner)

    original = vars(torch.autograd.Function)["apply"]
    monkeypatch.setattr(torch.autograd.Function, "apply", InC(original))
    x = torch.ones(2, requires_grad=True)
    with gradguard(level="strict") as guard:
        Double.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0] and guard.diagnoses == []
    assert type(vars(torch.autograd.Function)["apply"]) is classmethod
    torch_functions.uninstall()
    assert type(vars(torch.autograd.Function)["apply"]) is InC


@pytest.fixture
def hidden_slots(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.10 and older, whose `SavedTensor` shows nothing."""
    monkeypatch.setattr(saved_tensors, "SHOWN", False)
    monkeypatch.setattr(saved_tensors, "_hooks_entered", False)


def a_write_by_numpy(probabilities: torch.Tensor) -> None:
    array = probabilities.detach().numpy()
    array[0] = 1.0
    probabilities.sum().backward()


def test_saved_values_are_unpacked_where_the_slot_does_not_show_them(hidden_slots: None) -> None:
    with pytest.warns(match="GG101"), gradguard() as guard:
        a_write_by_numpy(nn.Linear(3, 2)(torch.ones(2, 3)).sigmoid())
    [found] = guard.diagnoses
    assert found.culprit is not None and found.culprit.text == "array[0] = 1.0"


def test_what_hooks_may_hold_is_not_unpacked(hidden_slots: None) -> None:
    runs = []
    layer = nn.Linear(3, 2)

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return layer(x).sigmoid() * 2

    with gradguard(level="forensic") as guard:
        a_write_by_numpy(checkpoint(block, torch.ones(2, 3), use_reentrant=False))
    assert len(runs) == 2 and guard.diagnoses == []  # forward, and once again in backward
