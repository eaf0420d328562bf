"""A GradScaler divides what it has not multiplied; and the ways of scaling that are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, only, said

TWO = """
net, critic = nn.Linear(4, 1), nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
other = torch.optim.SGD(critic.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for it in range(6):
    x = torch.randn(8, 4)
    other.zero_grad()
    scaler.scale(critic(x).pow(2).mean()).backward()
    scaler.step(other)
    opt.zero_grad()
    first, second = net(x).abs().mean(), net(x).pow(2).mean()
    {backward}
    scaler.step(opt)
    scaler.update()
"""


@pytest.mark.parametrize("level", ["standard", "watch", "strict"])
@pytest.mark.parametrize("unscale", ["", "; scaler.unscale_(opt)"])
def test_backward_without_the_scale(unscale: str, level: str, tmp_path: Path) -> None:
    source = TWO.format(backward="second.backward()" + unscale)
    found = only(tmp_path, source, "GG722", "second.backward()", level)
    assert "64 times too small" in found.headline and "`second`" in found.headline
    patch = found.fixes[0].patch
    assert patch is not None and said(tmp_path, applied(source, patch), level) == []


@pytest.mark.parametrize("level", ["standard", "watch", "strict"])
@pytest.mark.parametrize(
    "backward",
    [
        "a, b = scaler.scale([first, second]); a.backward(); b.backward()",
        "total = scaler.scale(first) + scaler.scale(second); total.backward()",
        "s = [scaler.scale(each) for each in (first, second, first)]; (s[0] + s[1]).backward(retain_graph=True); s[2].sum().backward()",
        "(second * scaler.get_scale()).backward()",
        "second.backward(); [p.grad.mul_(scaler.get_scale()) for p in net.parameters()]",
    ],
)
def test_sound_ways_of_scaling(backward: str, level: str, tmp_path: Path) -> None:
    assert said(tmp_path, TWO.format(backward=backward), level) == []


def test_a_step_of_its_own_needs_no_scale(tmp_path: Path) -> None:
    plain = TWO.format(backward="second.backward()").replace("scaler.step(opt)", "opt.step()")
    assert said(tmp_path, plain) == []


def test_backward_within_backward(tmp_path: Path) -> None:
    blocks = TWO.replace("net, critic", "from torch.utils.checkpoint import checkpoint\nnet, critic").replace(
        "nn.Linear(4, 1), nn", "nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)), nn"
    )
    forward = "h = checkpoint(net[0], x.requires_grad_(), use_reentrant=True); h = checkpoint(net[1], h, use_reentrant=True)"
    source = blocks.format(backward=f"{forward}; scaler.scale(net[2](h).pow(2).mean()).backward()")
    assert said(tmp_path, source, "strict") == []
