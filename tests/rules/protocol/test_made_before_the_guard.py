"""An optimizer that was made before the guard was entered is known from its first zero_grad() on."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import gradguard


class Forwarding(torch.optim.Optimizer):
    """Lets another optimizer do everything, and has its groups; `Optimizer.__init__` is not called."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Sharing(torch.optim.Optimizer):
    """Has the groups of another optimizer, and lets it step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def _train(steps: Any) -> list[str]:
    torch.manual_seed(0)
    actor, critic = nn.Linear(3, 1), nn.Linear(3, 1)
    first, second = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
    first, second, stepped = steps(first, second)
    with gradguard() as guard:
        for _ in range(24):
            x = torch.randn(4, 3)
            first.zero_grad()
            actor(x).pow(2).mean().backward()
            first.step()
            second.zero_grad()
            (critic(x) - 1).pow(2).mean().backward()
            stepped.step()
    return [each.headline for each in guard.diagnoses]


def test_the_one_that_never_steps_is_named() -> None:
    with pytest.warns(UserWarning, match="GG607"):
        (headline,) = _train(lambda first, second: (first, second, first))
    assert headline.startswith("`second` never steps: after its backward `first.step()` is called a second time")


@pytest.mark.parametrize("wrap", [Forwarding, Sharing])
def test_an_optimizer_that_steps_by_another_is_not_taken_for_one_that_never_does(wrap: Any, recwarn: pytest.WarningsRecorder) -> None:
    def steps(first: Any, second: Any) -> Any:
        wrapped = wrap(second)
        return first, wrapped, wrapped

    assert _train(steps) == []


@pytest.mark.parametrize("finalizing", [False, True])
def test_parameters_are_not_looked_at_while_the_interpreter_ends(finalizing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view made then outlives its base's Python object, and PyTorch aborts."""
    with gradguard() as guard:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
        ledger = guard.run.ledger
        monkeypatch.setattr(sys, "is_finalizing", lambda: finalizing)
        ended = len(ledger.ended)
        del optimizer
        gc.collect()
        assert len(ledger.ended) - ended == (not finalizing)
        monkeypatch.undo()
