"""Layers that are made where they are called, and parameters that are replaced: named, and silent on what is meant to be new each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

FRESH = """
class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Linear(4, 7)
        self.high = nn.Linear(7, 3)

    def forward(self, x):
        h = self.low(x).relu()
        LAYER

net = Joint()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(16):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    opt.step()
"""

COPIED = """
import copy

def project(x):
    return nn.Linear(4, 4)(x).detach()

net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(20):
    fast = copy.deepcopy(net)
    x = project(torch.randn(8, 4))
    F.mse_loss(fast(x), x[:, :1]).backward()
    with torch.no_grad():
        for p in fast.parameters():
            p -= 0.1 * p.grad
    opt.zero_grad()
    F.mse_loss(net(x), x[:, :1]).backward()
    opt.step()
"""

SWAPPED = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(12, 4), nn.Linear(4, 2)

    def load(self, vectors):
        SWAP

    def forward(self, x):
        return self.out(self.table(x))

net = Words()
opt = torch.optim.Adam(net.parameters())
net.load(torch.randn(12, 4))
for it in range(30):
    opt.zero_grad()
    F.cross_entropy(net(torch.randint(0, 12, (8, 3))), torch.arange(8) % 2).backward()
    opt.step()
"""

SEVERAL = """
from collections import OrderedDict

nets = OrderedDict(one=nn.Linear(3, 2), two=nn.Linear(3, 2))
opts = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
for it in range(15):
    for name, net in nets.items():
        opts[name].zero_grad()
        net(torch.randn(4, 3)).pow(2).mean().backward()
        if name in STEPPED:
            opts[name].step()
"""


@pytest.mark.parametrize("layer", ["return nn.Linear(7, 5)(h)", "last = nn.Linear(7, 5)\n        return last(h)"])
def test_a_layer_made_in_forward_is_named(tmp_path: Path, layer: str) -> None:
    (diagnosis,) = [each for each, _ in run_source(tmp_path, HEAD + FRESH.replace("LAYER", layer))]
    assert diagnosis.code == "GG603" and diagnosis.culprit is not None and diagnosis.culprit.text == "nn.Linear(7, 5)"
    assert "Joint.forward" in diagnosis.headline and "`opt`" in diagnosis.headline


def test_a_layer_made_once_is_silent(tmp_path: Path) -> None:
    assert not run_source(tmp_path, HEAD + FRESH.replace("LAYER", "return self.high(h)"))


def test_copies_that_are_fitted_by_hand_are_silent(tmp_path: Path) -> None:
    assert not run_source(tmp_path, HEAD + COPIED)


def test_a_parameter_that_is_replaced_is_named_where_it_is(tmp_path: Path) -> None:
    swap = "self.table.weight = nn.Parameter(vectors)"
    diagnosis = run_source(tmp_path, HEAD + SWAPPED.replace("SWAP", swap))[0][0]
    assert diagnosis.code == "GG604" and diagnosis.culprit is not None and diagnosis.culprit.text == swap
    assert not run_source(tmp_path, HEAD + SWAPPED.replace("SWAP", "self.table.weight.data.copy_(vectors)"))


def test_an_optimizer_in_a_dict_is_not_called_by_the_dicts_name(tmp_path: Path) -> None:
    diagnosis = run_source(tmp_path, HEAD + SEVERAL.replace("STEPPED", "['two']"))[0][0]
    assert diagnosis.code == "GG607" and "`opts['one']`" in diagnosis.headline
    assert not run_source(tmp_path, HEAD + SEVERAL.replace("STEPPED", "['one', 'two']"))
