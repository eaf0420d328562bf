"""GG603 where layers are made at each call, inside of a forward or outside: seen as they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import said

NET = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)
    def forward(self, h):
        return self.out(h)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(4, 4)
    def forward(self, x):
        return {forward}
def head(h):
    return nn.Linear(4, 1)(h)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(40):
    opt.zero_grad()
    {loss}.pow(2).mean().backward()
    opt.step()
"""
X = "torch.randn(8, 4)"
ANEW = {
    "in forward": ("Head()(self.enc(x))", f"net({X})", "Head()", "call in `Net.forward`"),
    "in a function": ("self.enc(x)", f"head(net({X}))", "nn.Linear(4, 1)", "call in `head`"),
    "in the loop": ("self.enc(x)", f"nn.Sequential(nn.Tanh(), Head())(net({X}))", "Head()", "each step"),
    "in a variable": ("self.enc(x)", f"layer = nn.Linear(4, 2); layer(net({X}))", "nn.Linear(4, 2)", "each step"),
}
OWN = {
    "frozen": f"Head().requires_grad_(False)(net({X}))",
    "without parameters": f"nn.Tanh()(net({X}))",
}


@pytest.mark.parametrize(("forward", "loss", "culprit", "when"), ANEW.values(), ids=ANEW)
def test_a_layer_that_is_made_anew(tmp_path: Path, forward: str, loss: str, culprit: str, when: str) -> None:
    found = said(tmp_path, NET.format(forward=forward, loss=loss))
    assert [(each.code, each.culprit and each.culprit.text) for each in found] == [("GG603", culprit)]
    assert "made anew" in found[0].headline and when in found[0].headline


@pytest.mark.parametrize("loss", OWN.values(), ids=OWN)
def test_layers_that_need_no_optimizer(tmp_path: Path, loss: str) -> None:
    assert said(tmp_path, NET.format(forward="self.enc(x)", loss=loss)) == []
