"""A moving average of a network that binds a loop's variable instead of writing into the parameter; and the ways that write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source

AVERAGED = """
import copy

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fast = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.slow = copy.deepcopy(self.fast)
        for weight in self.slow.parameters():
            weight.requires_grad = FLAG

    def follow(self, m=0.9):
        for a, b in zip(self.fast.parameters(), self.slow.parameters()):
            UPDATE

pair = Pair()
opt = torch.optim.SGD(pair.fast.parameters(), lr=0.1)
for it in range(30):
    x = torch.randn(8, 4)
    with torch.no_grad():
        goal = pair.slow(x)
    opt.zero_grad()
    (F.mse_loss(pair.fast(x), goal) + F.cross_entropy(pair.fast(x), torch.arange(8) % 2)).backward()
    opt.step()
    with torch.no_grad():
        pair.follow()
"""


@pytest.mark.parametrize("flag", ["False", "True"])
def test_an_average_that_is_dropped_is_named(tmp_path: Path, flag: str) -> None:
    source = HEAD + AVERAGED.replace("UPDATE", "b = m * b + (1 - m) * a").replace("FLAG", flag)
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source)]
    assert diagnosis.code == "GG611" and diagnosis.culprit is not None
    assert diagnosis.culprit.text == "b = m * b + (1 - m) * a" and "`pair.slow`" in diagnosis.headline
    assert not run_source(tmp_path, applied(source, diagnosis.fixes[0].patch or ""))


@pytest.mark.parametrize(
    "update", ["b.mul_(m).add_(a, alpha=1 - m)", "b.data = m * b + (1 - m) * a", "new = m * b + (1 - m) * a; b.copy_(new)"]
)
def test_an_average_that_is_written_is_silent(tmp_path: Path, update: str) -> None:
    assert not run_source(tmp_path, HEAD + AVERAGED.replace("UPDATE", update).replace("FLAG", "False"))


def test_a_network_that_stays_as_it_is_on_purpose_is_silent(tmp_path: Path) -> None:
    assert not run_source(tmp_path, HEAD + AVERAGED.replace("UPDATE", "gap = (a - b).norm()").replace("FLAG", "False"))


SHADOW = """
class Average:
    def __init__(self, net):
        self.net = net
        self.shadow = {}
        for name, p in net.named_parameters():
            self.shadow[name] = p.data

    def update(self):
        for name, p in self.net.named_parameters():
            BLEND

net = nn.Linear(4, 2)
other = [torch.zeros_like(p) for p in net.parameters()]
average = Average(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(6):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    average.update()
"""


@pytest.mark.parametrize("blend", ["self.shadow[name].mul_(0.9).add_(p.data, alpha=0.1)", "self.shadow[name].lerp_(p.detach(), 0.1)"])
def test_a_shadow_in_the_weights_own_memory_is_named(tmp_path: Path, blend: str) -> None:
    source = HEAD + SHADOW.replace("BLEND", blend)
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source)]
    assert diagnosis.code == "GG615" and diagnosis.culprit is not None and diagnosis.culprit.text == "self.shadow[name] = p.data"
    assert not run_source(tmp_path, applied(source, diagnosis.fixes[0].patch or ""))


SHADOWS = {
    "list": ("kept = [p.detach() for p in net.parameters()]", "for s, p in zip(kept, net.parameters()): s.lerp_(p.data, 0.1)"),
    "dict": (
        "kept = {name: p.data for name, p in net.named_parameters()}",
        "for name, p in net.named_parameters(): kept[name].mul_(0.9).add_(p.detach(), alpha=0.1)",
    ),
    "state dict": (
        "kept = net.state_dict()", "for name, value in net.state_dict().items(): kept[name].mul_(0.9).add_(value, alpha=0.1)",
    ),
    "late": ("kept = [p.data for p in net.parameters()]", "if it >= 8: [s.copy_(p.detach()) for s, p in zip(kept, net.parameters())]"),
}  # fmt: skip
OWN = {
    "copies": ("kept = [p.detach().clone() for p in net.parameters()]", SHADOWS["list"][1]),
    "copied state": ("import copy\nkept = copy.deepcopy(net.state_dict())", SHADOWS["state dict"][1]),
    "decay by hand": ("kept = [p.data for p in net.parameters()]", "for s, p in zip(kept, net.parameters()): s.add_(p.data, alpha=-0.01)"),
    "clipped": ("kept = [p.data for p in net.parameters()]", "for s in kept: s.clamp_(-1, 1)"),
}


def shadowed(kept: str, update: str, steps: int = 16) -> str:
    return f"""{HEAD}
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
{kept}
for it in range({steps}):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    with torch.no_grad():
        {update}
"""


@pytest.mark.parametrize("name", ["list", "dict", "state dict", pytest.param("late", marks=pytest.mark.slow)])
def test_a_shadow_is_the_weights_however_it_is_kept(tmp_path: Path, name: str) -> None:
    source = shadowed(*SHADOWS[name], steps=30 if name == "late" else 16)
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source)]
    assert diagnosis.code == "GG615" and diagnosis.culprit is not None and diagnosis.culprit.text == SHADOWS[name][0]
    assert not run_source(tmp_path, applied(source, diagnosis.fixes[0].patch or ""))


@pytest.mark.parametrize("name", OWN)
def test_copies_and_other_writes_are_silent(tmp_path: Path, name: str) -> None:
    assert not run_source(tmp_path, shadowed(*OWN[name]))


@pytest.mark.parametrize("write", ["self.shadow[name].clamp_(-1, 1)", "self.shadow[name].lerp_(other[0].mean(), 0.01)"])
def test_weights_that_are_written_through_another_tensor_are_silent(tmp_path: Path, write: str) -> None:
    assert not run_source(tmp_path, HEAD + SHADOW.replace("BLEND", write))
