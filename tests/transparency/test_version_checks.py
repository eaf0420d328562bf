"""PyTorch's own protection stays on: what it refuses without the guard it refuses under it.

Saved-tensor hooks switch version checks off (an in-place bug then gives a wrong gradient in silence), which is why gradguard has none
below level forensic, and repeats PyTorch's checks where it has.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.transparency.helpers import assert_transparent, guarding


def sigmoid_then_mul() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x.sigmoid()
    y.mul_(2)
    y.sum().backward()


def step_between() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def detached_in_place() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x * 2
    z = y.exp() * y
    y.detach_()
    y.add_(1)
    z.sum().backward()


def view_written() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    y = x * 1
    z = y.pow(2)
    y[0].zero_()
    torch.autograd.grad(z.sum(), x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def saved_by_a_function() -> None:
    x = torch.randn(3, requires_grad=True) * 1
    y = Square.apply(x)
    x.add_(1)
    y.sum().backward()


def second_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = x.exp().sum()
    loss.backward()
    loss.backward()


def leaf_in_place() -> None:
    x = torch.randn(3, requires_grad=True)
    x.add_(1)


def parameter_through_out() -> None:
    w = torch.randn(3, requires_grad=True)
    y = w * w
    with torch.no_grad():
        torch.add(w, 1, out=w)
    y.sum().backward()


@pytest.mark.parametrize(
    "program",
    [
        sigmoid_then_mul,
        step_between,
        detached_in_place,
        view_written,
        saved_by_a_function,
        second_backward,
        leaf_in_place,
        parameter_through_out,
    ],
)
def test_what_pytorch_refuses_is_refused_in_the_same_words(program: Callable[[], None]) -> None:
    bare = assert_transparent(program, fails=True)
    assert bare.error is not None
    assert bare.error[0] is RuntimeError


@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
def test_nothing_is_hooked_into_saved_tensors(level: str) -> None:
    x = torch.randn(4, requires_grad=True)
    with guarding(level):
        y = x.sigmoid()
        slot = y.grad_fn._raw_saved_result  # type: ignore[union-attr]
        assert slot.unpack_hook is None
        z = x.exp()
        assert (x * z).grad_fn._saved_other is z  # type: ignore[union-attr]


def test_the_users_register_hooks_on_saved_tensors_work(level: str) -> None:
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append("pack")
        return tensor * 2

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append("unpack")
        return tensor

    x = torch.ones(3, requires_grad=True)
    with guarding(level):
        y = x.pow(2)
        y.grad_fn._raw_saved_self.register_hooks(pack, unpack)  # type: ignore[union-attr]
        y.sum().backward()
    assert seen == ["pack", "unpack"]
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0, 4.0]
