"""Optimizer state whose shapes are not those of the parameters: what is said, and where it points."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradguard.core.errors import GradGuardError

_HEAD = """
import torch
from torch import nn
def data(): return torch.randn(4, 3)
"""
BROKEN = {
    "order_of_a_list": """
net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
first = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
net(data()).sum().backward()
first.step()
second = torch.optim.SGD(list(net.parameters())[::-1], lr=0.1, momentum=0.9)
second.load_state_dict(first.state_dict())  # <<
second.step()
""",
    "groups_exchanged_in_a_class": """
class Trainer:
    def __init__(self, saved=None):
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
        parts = [self.body, self.head] if saved is None else [self.head, self.body]
        self.optim = torch.optim.AdamW([{"params": part.parameters()} for part in parts], foreach=True)
        if saved is not None:
            self.optim.load_state_dict(saved)  # <<
    def fit(self):
        self.optim.zero_grad()
        self.head(self.body(data())).pow(2).mean().backward()
        self.optim.step()
trainer = Trainer()
trainer.fit()
Trainer(trainer.optim.state_dict()).fit()
""",
    "state_of_a_wider_model": """
def make(width):
    net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
    return net, torch.optim.RMSprop(net.parameters(), momentum=0.5)
def run(net, opt):
    net(data()).sum().backward()
    opt.step()
old, old_opt = make(6)
run(old, old_opt)
new, opt = make(4)
opt.load_state_dict(old_opt.state_dict())  # <<
run(new, opt)
""",
    "parameter_of_another_shape": """
net = nn.Linear(3, 4)
opt = torch.optim.Adam(net.parameters())
for step in range(3):
    opt.zero_grad()
    net(data()).sum().backward()
    opt.step()
    if step == 1:
        del net.weight.grad
        net.weight.data, net.bias.data = torch.randn(2, 3), torch.randn(2)  # <<
        net.bias.grad = None
""",
}


@pytest.mark.parametrize("level", ["watch", "standard"])
@pytest.mark.parametrize("name", BROKEN)
def test_the_load_or_the_new_shape_is_named(name: str, level: str, said: Callable[..., list]) -> None:
    source = _HEAD + BROKEN[name]
    marked = next(number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# <<"))
    with pytest.raises(GradGuardError) as caught:
        said(source, level)
    diagnosis = caught.value.diagnosis
    assert (diagnosis.code, diagnosis.name) == ("GG617", "optimizer-state-mismatch")
    if diagnosis.culprit is None:  # an assignment to `.data` is not seen where nothing is traced
        assert (name, level) == ("parameter_of_another_shape", "watch")
        assert diagnosis.confidence == "likely"
    else:
        assert diagnosis.culprit.line == marked


@pytest.mark.parametrize("level", ["watch", "standard"])
def test_other_shape_errors_of_a_step_are_no_matter_of_the_state(level: str, said: Callable[..., list]) -> None:
    source = """
net = nn.Linear(3, 4)
class Odd(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        return net.weight + torch.ones(7)
Odd(net.parameters(), lr=0.1, momentum=0.9).step()
"""
    with pytest.raises(RuntimeError) as caught:
        said(_HEAD + source, level)
    assert "GG617" not in str(caught.value)


def test_resumed_in_the_same_order(said: Callable[..., list]) -> None:
    source = """
def make():
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    return net, torch.optim.Adafactor([*net[1].parameters(), *net[0].parameters()])
net, opt = make()
for _ in range(2):
    for _ in range(2):
        opt.zero_grad()
        net(data()).pow(2).mean().backward()
        opt.step()
    saved = net.state_dict(), opt.state_dict()
    net, opt = make()
    net.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
"""
    assert said(_HEAD + source) == []


REFUSED = {
    "group_added_later": (
        """
def build():
    net = nn.ModuleDict({"body": nn.Linear(3, 5), "head": nn.Linear(5, 2)})
    return net, torch.optim.SGD(net["head"].parameters(), lr=0.1, momentum=0.9)
def widen(net, opt):
    opt.add_param_group({"params": net["body"].parameters()})
net, opt = build()
widen(net, opt)
saved = opt.state_dict()
net, opt = build()
opt.load_state_dict(saved)  # <<
""",
        ("1 group of 2 parameters", "2 groups, of 2 and 2 parameters"),
    ),
    "another_list": (
        """
net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
saved = torch.optim.Adam(net.parameters()).state_dict()
opt = torch.optim.Adam(net[1].parameters())  # <<
opt.load_state_dict(saved)
""",
        ("1 group of 2 parameters", "1 group of 4 parameters"),
    ),
    "groups_for_decay": (
        """
class Trainer:
    def __init__(self, net, decay, saved=None):
        kinds = [[p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() < 2]]
        groups = [{"params": kind} for kind in kinds] if decay else net.parameters()
        self.optim = torch.optim.AdamW(groups)  # <<
        if saved is not None:
            self.resume(saved)
    def resume(self, saved):
        self.optim.load_state_dict(saved)
net = nn.Linear(3, 4)
Trainer(net, False, Trainer(net, True).optim.state_dict())
""",
        ("1 group of 2 parameters", "2 groups, of 1 and 1 parameters"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_load_state_dict_refuses(name: str, said: Callable[..., list]) -> None:
    source, sizes = _HEAD + REFUSED[name][0], REFUSED[name][1]
    marked = next(number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# <<"))
    with pytest.raises(GradGuardError) as caught:
        said(source, "standard")
    diagnosis = caught.value.diagnosis
    assert diagnosis.code == "GG617" and diagnosis.culprit is not None and diagnosis.culprit.line == marked
    assert all(size in diagnosis.headline for size in sizes)


SHRUNK = """
weight = nn.Parameter(torch.randn(BEFORE, 3))
opt = torch.optim.OPTIMIZER([weight], lr=0.1)
for turn in range(2):
    opt.zero_grad()
    weight.pow(2).sum().backward()
    opt.step()
weight.data = torch.randn(AFTER, 3)
opt.step()
"""


@pytest.mark.parametrize("sizes", [(4, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_gradient_of_the_old_shape(sizes: tuple[int, int], optimizer: str, said: Callable[..., list]) -> None:
    """Where there is a state as well, a new optimizer alone is no repair; where there is none, PyTorch's own words are right."""
    source = _HEAD + SHRUNK.replace("BEFORE", str(sizes[0])).replace("AFTER", str(sizes[1])).replace("OPTIMIZER", optimizer)
    with pytest.raises(RuntimeError) as caught:
        said(source, "standard")
    if optimizer == "SGD":
        assert not isinstance(caught.value, GradGuardError)
        return
    assert isinstance(caught.value, GradGuardError) and caught.value.diagnosis.code == "GG617"
    assert "`.grad = None`" in caught.value.diagnosis.fixes[0].title and "`.grad` of `weight`" in caught.value.diagnosis.explanation
