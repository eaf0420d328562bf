"""Parts put in place of trained ones under a computed name or an index, after the optimizer was made (GG604)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

SWAPPED = """
class Scaled(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)
def swap(parent):
    for name, child in parent.named_children():
        if type(child) is nn.Linear and child.out_features == 8:
            new = Scaled(child.in_features, child.out_features)
            new.load_state_dict(child.state_dict())
            setattr(parent, name, new)
        else:
            swap(child)
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())
def main():
    net = Body()
    {before}
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    {after}
    for _ in range(30):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
main()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_parts_with_loaded_weights_set_by_a_computed_name(tmp_path: Path, level: str) -> None:
    diagnosis = only(tmp_path, SWAPPED.format(before="pass", after="swap(net)"), "GG604", "swap(net)", level)
    assert "`net.first.weight`" in diagnosis.headline and "`opt`" in diagnosis.headline
    assert any(span.text == "setattr(parent, name, new)" for span in diagnosis.related)


def test_parts_set_before_the_optimizer_is_made(tmp_path: Path) -> None:
    assert said(tmp_path, SWAPPED.format(before="swap(net)", after="pass")) == []


HEAD_BY_INDEX = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10))
    def forward(self, x):
        return self.layers(x)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
net.layers[2] = nn.Linear(8, 3)
for _ in range(30):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
"""


def test_a_layer_put_in_by_its_index(tmp_path: Path) -> None:
    only(tmp_path, HEAD_BY_INDEX, "GG604", "net.layers[2] = nn.Linear(8, 3)")


# a network with loaded weights that gradients only pass: nobody means to train it
CRITIC = """
judge = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
judge.load_state_dict(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).state_dict())
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(30):
    opt.zero_grad()
    judge(net(torch.randn(8, 4))).pow(2).mean().backward()
    opt.step()
"""


def test_a_loaded_network_that_is_only_passed(tmp_path: Path) -> None:
    assert said(tmp_path, CRITIC) == []
