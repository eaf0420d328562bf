"""Functions of torch's that a program has wrapped run once a call, and give what they give without a guard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from gradguard import gradguard
from tests.transparency.helpers import guarding

LEVELS = ["watch", "standard", "strict", "forensic"]
WRAPPED: list[tuple[Any, str]] = [
    (torch.Tensor, "backward"),
    (torch.Tensor, "add"),
    (torch.Tensor, "mul_"),
    (torch.Tensor, "split"),
    (torch.Tensor, "register_hook"),
    (torch.autograd, "backward"),
    (torch, "einsum"),
    (torch, "norm"),
    (torch, "cat"),
    (F, "relu"),
    (F, "gelu"),
    (F, "softmax"),
    (F, "layer_norm"),
    (F, "dropout"),
    (F, "cross_entropy"),
    (nn.init, "uniform_"),
]


class _Counting:
    """A wrapper without a name, and one with the function's own."""

    def __init__(self, function: Callable[..., Any], counts: dict[str, int], name: str) -> None:
        self.function, self.counts, self.name = function, counts, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.counts[self.name] = self.counts.get(self.name, 0) + 1
        return self.function(*args, **kwargs)

    def as_function(self) -> Callable[..., Any]:
        @functools.wraps(self.function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return wrapper


@contextmanager
def wrapped(counts: dict[str, int], named: bool) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name in WRAPPED]
    for owner, name, original in originals:
        counting = _Counting(original, counts, name)
        setattr(owner, name, counting.as_function() if named or owner is torch.Tensor else counting)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def train() -> list[float]:
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    losses = []
    for _ in range(4):
        weight.grad = None
        x = F.layer_norm(F.gelu(F.relu(weight)), (4,))
        a, b = F.dropout(F.softmax(x, 1), 0.1).split(2, dim=1)
        y = torch.cat([a.add(b), 1 - a], dim=1) + torch.einsum("ij,kj->ik", x, x)
        y = y.clone().mul_(2) + torch.norm(weight)
        y.register_hook(lambda gradient: gradient * 2)
        nn.init.uniform_(torch.empty(3))
        loss = F.cross_entropy(y, torch.tensor([0, 1, 2, 3]))
        loss.backward()
        assert weight.grad is not None
        losses += [loss.item(), weight.grad.sum().item()]
    return losses


class Plain(TorchFunctionMode):
    """A mode of the user's that only looks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("named", [True, False], ids=["wraps", "object"])
@pytest.mark.parametrize("mode", [nullcontext, Plain], ids=["alone", "under a mode"])
def test_a_wrapper_runs_as_often_as_without_a_guard(named: bool, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    counts: dict[str, int] = {}
    with wrapped(counts, named), mode():
        expected = train()
    for level in LEVELS:
        guarded: dict[str, int] = {}
        with gradguard(level=level, actions__silent="log"), wrapped(guarded, named), mode():
            assert train() == expected, level
        assert guarded == counts, level


def test_a_wrapper_put_on_before_the_guard_is_entered() -> None:
    counts: dict[str, int] = {}
    guarded: dict[str, int] = {}
    with wrapped(counts, True):
        expected = train()
    with wrapped(guarded, True), gradguard(level="strict", actions__silent="log"):
        assert train() == expected
    assert guarded == counts


def test_what_c_hands_over_is_not_taken_for_the_function_that_calls_it(level: str) -> None:
    """`GradScaler.unscale_` makes a `torch.device`, which goes through the function modes too."""

    def scaled_steps() -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).pow(2).mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [p.tolist() for p in model.parameters()]

    bare = scaled_steps()
    with guarding(level):
        assert scaled_steps() == bare
