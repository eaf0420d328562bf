"""A custom backward that gathers its gradients in a list: the line that fills the slot in question is named, where it is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, only, run_source

SLOTS = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grads = [None] * 3
        grads[0] = grad @ weight
        grads[1] = x.t() @ grad
        grads[2] = grad.sum(0)
        return tuple(grads)

weight, bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.zeros(4))
for it in range(2):
    Product.apply(torch.randn(5, 3), weight, bias).pow(2).mean().backward()
"""


def test_the_slot_is_named(tmp_path: Path) -> None:
    found = only(tmp_path, SLOTS, "GG402", "x.t() @ grad")
    assert "`weight`" in found.headline and "`grads[1]`" in found.fixes[0].title


def test_what_a_slot_is_filled_from_is_named(tmp_path: Path) -> None:
    source = SLOTS.replace("        grads[1] = x.t() @ grad\n", "        of_weight = x.t() @ grad\n        grads[1] = of_weight\n")
    found = only(tmp_path, source, "GG402", "x.t() @ grad")
    assert "`of_weight`" in found.fixes[0].title


@pytest.mark.parametrize(
    "filled",
    [
        "grads[1] = x.t() @ grad\n        if grad.dim() > 2:\n            grads[1] = grad\n",  # which of the two ran is not seen
        "for i in (1,):\n            grads[i] = x.t() @ grad\n",
    ],
)
def test_an_unknown_slot_is_not_blamed(tmp_path: Path, filled: str) -> None:
    only(tmp_path, SLOTS.replace("grads[1] = x.t() @ grad\n", filled), "GG402", "tuple(grads)")


@pytest.mark.parametrize("sound", ["grad.t() @ x", "(x.t() @ grad).t()"])
def test_the_right_way_round_is_silent(tmp_path: Path, sound: str) -> None:
    assert not run_source(tmp_path, HEAD + SLOTS.replace("x.t() @ grad", sound))
