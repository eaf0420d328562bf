"""GG308: what is made to be differentiated (results of custom Functions, gradients with a graph), and nothing uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, only, said

FUNCTION = """
from torch.utils.checkpoint import checkpoint
class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
class Layer(nn.Module):
    def forward(self, x):
        return Flip.apply(x, 0.5)
def flipped(x):
    out = Flip.apply(x, 0.5)
    return out
layer, kept = Layer(), []
enc, judge = nn.Linear(4, 8), nn.Linear(8, 2)
opt = torch.optim.SGD([*enc.parameters(), *judge.parameters()], lr=0.01)
for step in range(12):
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    features = torch.relu(enc(x))
    {middle}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
LOSS = "loss = F.cross_entropy(judge({}), y)"


@pytest.mark.parametrize("made", ["Flip.apply(features, 0.5)", "flipped(features)", "layer(features)"])
def test_what_follows_uses_the_value_from_before_the_function(made: str, tmp_path: Path) -> None:
    source = FUNCTION.format(middle=f"other = {made}\n    {LOSS.format('features')}")
    diagnosis = only(tmp_path, source, "GG308", f"other = {made}")
    assert "`other` has gone through `Flip`" in diagnosis.headline
    patch = diagnosis.fixes[0].patch
    assert patch is not None and said(tmp_path, applied(source, patch)) == []


def test_the_result_is_dropped(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, FUNCTION.format(middle=f"layer(features)\n    {LOSS.format('features')}"), "GG308", "layer(features)")
    assert "the result of `layer(features)`" in diagnosis.headline


@pytest.mark.parametrize(
    "middle",
    [
        f"other = flipped(features)\n    {LOSS.format('other')}",
        f"features = features + 0; Double.apply(features)\n    {LOSS.format('features')}",
        f"other = layer(features)\n    {LOSS.format('other if step > 8 else features')}",
        f"kept[:] = [flipped(features)]\n    {LOSS.format('features')}",
        f"with torch.no_grad(): other = flipped(features)\n    {LOSS.format('features')}",
        LOSS.format("checkpoint(layer, features, use_reentrant=False)"),
        LOSS.format("checkpoint(flipped, features, use_reentrant=True)"),
        f"first, second = judge(flipped(features)), judge(features)\n    {LOSS.format('features')}",
    ],
)
def test_used_functions(middle: str, tmp_path: Path) -> None:
    assert said(tmp_path, FUNCTION.format(middle=middle)) == []


GRADIENTS = """
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
def slope_of(x):
    x = x.clone().requires_grad_(True)
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out, slope
def finish(loss):
    opt.zero_grad()
    loss.backward()
    opt.step()
{functions}
for step in range(12):
    {step}
"""


@pytest.mark.parametrize(
    ("functions", "step", "culprit", "name"),
    [
        (
            "",
            "out, slope = slope_of(torch.randn(8, 3)); term = slope.norm(dim=1).mean(); finish(out.pow(2).mean())",
            "out, slope = slope_of(torch.randn(8, 3))",
            "`term`",
        ),
        (
            "def begin():\n    out, slope = slope_of(torch.randn(8, 3))\n    loss = out.pow(2).mean()\n"
            "    total = loss + slope.pow(2).mean()\n    return loss",
            "finish(begin())",
            "out, slope = slope_of(torch.randn(8, 3))",
            "`total`",
        ),
        (
            "def terms():\n    out, slope = slope_of(torch.randn(8, 3))\n    return out.pow(2).mean(), slope.norm(dim=1).mean()",
            "loss, penalty = terms(); finish(loss)",
            "loss, penalty = terms()",
            "`penalty`",
        ),
    ],
)
def test_a_term_of_gradients_that_ends_in_a_variable(functions: str, step: str, culprit: str, name: str, tmp_path: Path) -> None:
    diagnosis = only(tmp_path, GRADIENTS.format(functions=functions, step=step), "GG308", culprit)
    assert name in diagnosis.headline


@pytest.mark.parametrize(
    ("functions", "step"),
    [
        ("", "out, slope = slope_of(torch.randn(8, 3)); finish(out.pow(2).mean() + slope.norm(dim=1).mean())"),
        ("seen = []", "out, slope = slope_of(torch.randn(8, 3)); seen.append(slope); finish(out.pow(2).mean())"),
        ("", "out, slope = slope_of(torch.randn(8, 3)); size = float(slope.norm()); finish(out.pow(2).mean())"),
    ],
)
def test_gradients_that_something_uses(functions: str, step: str, tmp_path: Path) -> None:
    assert said(tmp_path, GRADIENTS.format(functions=functions, step=step)) == []
