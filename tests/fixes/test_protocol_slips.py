"""Slips in a training loop that raise nothing: which rule tells them, at which expression, that the patch mends them, and sound twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, only, said


def mended(folder: Path, source: str, diagnosis: Diagnosis) -> None:
    patch = diagnosis.fixes[0].patch
    assert patch is not None, diagnosis.fixes
    assert said(folder, applied(HEAD + source, patch).removeprefix(HEAD)) == []


CLIP = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
{made}
opt = torch.optim.SGD({given}, lr=0.01)
def train():
    for it in range(12):
        {again}
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_({clipped}, 0.1)
        opt.step()
train()
"""
FILTER = "filter(lambda p: p.requires_grad, net.parameters())"


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("made", [f"wanted = {FILTER}", "wanted = (p for p in net.parameters() if p.requires_grad)"])
def test_iterator_that_the_optimizer_has_gone_through(tmp_path: Path, made: str, level: str) -> None:
    source = CLIP.format(made=made, given="wanted", again="pass", clipped="wanted")
    diagnosis = only(tmp_path, source, "GG610", made, level)
    assert "`wanted` is an iterator that has been gone through" in diagnosis.headline
    mended(tmp_path, source, diagnosis)


@pytest.mark.parametrize(
    ("made", "again", "clipped"),
    [
        ("pass", f"wanted = {FILTER}", "wanted"),
        ("wanted = []", "pass", "wanted"),  # a group that happens to be empty
        ("pass", "wanted = (p for p in net.parameters() if p.grad is None and it > 99)", "wanted"),
        ("pass", "pass", "filter(lambda p: not p.requires_grad, net.parameters())"),
    ],
    ids=["anew", "empty list", "empty anew", "inline"],
)
def test_clipping_what_is_made_anew_or_is_a_list(tmp_path: Path, made: str, again: str, clipped: str) -> None:
    assert said(tmp_path, CLIP.format(made=made, given="net.parameters()", again=again, clipped=clipped)) == []


COSINE = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.{kind}
for epoch in range(5):
    for batch in range(16):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
        {inner}
    {outer}
"""


def test_cosine_whose_span_means_epochs(tmp_path: Path) -> None:
    source = COSINE.format(kind="CosineAnnealingLR(opt, T_max=5)", inner="scheduler.step()", outer="pass")
    diagnosis = only(tmp_path, source, "GG612", "scheduler.step()")
    assert "T_max of 5" in diagnosis.headline and "every 10 steps" in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.label == "called after every optimizer step"


@pytest.mark.parametrize(
    ("kind", "inner", "outer"),
    [
        ("CosineAnnealingLR(opt, T_max=5)", "pass", "scheduler.step()"),
        ("CosineAnnealingLR(opt, T_max=80)", "scheduler.step()", "pass"),
        ("CosineAnnealingLR(opt, T_max=40)", "scheduler.step()", "pass"),  # there and back once: a cycle that is meant
        ("CosineAnnealingWarmRestarts(opt, 5)", "scheduler.step()", "pass"),
    ],
)
def test_cosine_that_falls_once_or_says_that_it_restarts(tmp_path: Path, kind: str, inner: str, outer: str) -> None:
    assert said(tmp_path, COSINE.format(kind=kind, inner=inner, outer=outer)) == []


FROZEN = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.{optimizer}
for it in range(30):
    if it == 15:
        for p in net[0].parameters():
            p.requires_grad = False
    opt.zero_grad({none})
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
"""


@pytest.mark.parametrize("optimizer", ["Adam(net.parameters(), 0.01)", "SGD(net.parameters(), 0.01, momentum=0.9)"])
def test_frozen_with_a_gradient_of_zeros(tmp_path: Path, optimizer: str) -> None:
    source = FROZEN.format(optimizer=optimizer, none="set_to_none=False")
    diagnosis = only(tmp_path, source, "GG613", "p.requires_grad = False")
    assert "`net.0.weight`" in diagnosis.headline and "zeros" in diagnosis.headline
    mended(tmp_path, source, diagnosis)


@pytest.mark.parametrize(
    ("optimizer", "none"),
    [("Adam(net.parameters(), 0.01)", ""), ("SGD(net.parameters(), 0.01)", "set_to_none=False")],  # which does not move on zeros
)
def test_frozen_and_at_rest(tmp_path: Path, optimizer: str, none: str) -> None:
    assert said(tmp_path, FROZEN.format(optimizer=optimizer, none=none)) == []


STACKED = """
from torch.func import functional_call, stack_module_state, vmap

class Committee:
    def __init__(self):
        self.members = [nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)) for _ in range(4)]
        self.weights, self.buffers = stack_module_state(self.members)
        self.opt = torch.optim.Adam({given}, lr=0.01)

    def scores(self, x):
        one = lambda w, b: functional_call(self.members[0], (w, b), (x,))
        return vmap(one)(self.weights, self.buffers)

committee = Committee()
for it in range(12):
    committee.opt.zero_grad()
    committee.scores(torch.randn(8, 3)).pow(2).mean().backward()
    committee.opt.step()
"""
MEMBERS = "[p for m in self.members for p in m.parameters()]"


def test_optimizer_of_the_originals_of_stacked_parameters(tmp_path: Path) -> None:
    source = STACKED.format(given=MEMBERS)
    diagnosis = only(tmp_path, source, "GG604", f"torch.optim.Adam({MEMBERS}, lr=0.01)")
    assert "weights" in diagnosis.headline
    assert any(span.text == "self.weights, self.buffers = stack_module_state(self.members)" for span in diagnosis.related)


def test_optimizer_of_the_stack(tmp_path: Path) -> None:
    assert said(tmp_path, STACKED.format(given="self.weights.values()")) == []


BY_HAND = """
net = nn.Linear(3, 1)
def descend(params):
    kept = []
    with torch.no_grad():
        for p in params:
            {update}
    return kept
for it in range(30):
    net.zero_grad()
    net(torch.randn(8, 3)).pow(2).mean().backward()
    descend(net.parameters())
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_update_that_binds_the_loops_variable(tmp_path: Path, level: str) -> None:
    source = BY_HAND.format(update="p = p - 0.1 * p.grad")
    diagnosis = only(tmp_path, source, "GG611", "p = p - 0.1 * p.grad", level)
    assert "updates nothing" in diagnosis.headline and "`net.weight`" in diagnosis.explanation
    mended(tmp_path, source, diagnosis)


@pytest.mark.parametrize(
    "update",
    [
        "p -= 0.1 * p.grad",
        "p.data = p.data - 0.1 * p.grad",
        "q = p - 0.1 * p.grad\n            p.copy_(q)",
        "kept.append(p.grad.norm())",
    ],
)
def test_update_by_hand_that_is_kept(tmp_path: Path, update: str) -> None:
    assert said(tmp_path, BY_HAND.format(update=update)) == []


RATE = """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.0)
for it in range(40):
    {set}
    opt.zero_grad()
    net(torch.randn(8, 3)).pow(2).mean().backward()
    opt.step()
"""


def test_rate_in_an_attribute_of_the_optimizer(tmp_path: Path) -> None:
    source = RATE.format(set="opt.lr = 0.01 * min(1, it / 10)")
    diagnosis = only(tmp_path, source, "GG611", "opt.lr = 0.01 * min(1, it / 10)")
    assert "scheduler" not in diagnosis.explanation and "`opt.lr` is 0.01" in diagnosis.explanation
    mended(tmp_path, source, diagnosis)


def test_rate_that_is_never_set(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, RATE.format(set="pass"), "GG611", "torch.optim.SGD(net.parameters(), lr=0.0)")
    assert "scheduler" not in diagnosis.explanation and "Scheduler" not in diagnosis.fixes[0].title


def test_rate_that_is_kept_beside_the_groups(tmp_path: Path) -> None:
    assert said(tmp_path, RATE.format(set="opt.lr = opt.param_groups[0]['lr'] = 0.01")) == []


MODES = """
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
held_out = [torch.randn(8, 4) for _ in range(4)]
def look():
    {before}
    with torch.no_grad():
        for x in held_out:
            kept = net(x)
    {after}
for epoch in range(4):
    for it in range(5):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
    look()
"""


@pytest.mark.parametrize(("before", "after", "culprit"), [("net.eval", "pass", "net.eval"), ("net.eval()", "net.train", "net.train")])
def test_mode_that_is_only_named(tmp_path: Path, before: str, after: str, culprit: str) -> None:
    source = MODES.format(before=before, after=after)
    diagnosis = only(tmp_path, source, "GG609", culprit)
    patch = diagnosis.fixes[0].patch
    assert patch is not None and f"+    {culprit}()" in patch


def test_zero_grad_that_is_only_named(tmp_path: Path) -> None:
    source = RATE.replace("lr=0.0", "lr=0.01").replace("opt.zero_grad()", "opt.zero_grad").format(set="pass")
    diagnosis = only(tmp_path, source, "GG601", "opt.zero_grad")
    assert "`zero_grad` is named and never called" in diagnosis.headline
    mended(tmp_path, source, diagnosis)


RECORD = """
from dataclasses import dataclass

@dataclass
class Heads:
    score: nn.Module
    size: nn.Module

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.heads = {heads}

    def forward(self, x):
        h = self.body(x).tanh()
        return {score}(h).pow(2).mean() + {size}(h).pow(2).mean()

net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for it in range(40):
    opt.zero_grad()
    net(torch.randn(8, 4)).backward()
    opt.step()
"""


def test_modules_in_a_dataclass(tmp_path: Path) -> None:
    made = "Heads(nn.Linear(8, 1), nn.Linear(8, 2))"
    source = RECORD.format(heads=made, score="self.heads.score", size="self.heads.size")
    diagnosis = only(tmp_path, source, "GG603", f"self.heads = {made}")
    assert "`Heads`, which is no module" in diagnosis.headline and "`net.heads.score.weight`" in diagnosis.explanation
    assert {fact.name for fact in diagnosis.tensors} <= {f"net.heads.{h}.{p}" for h in ("score", "size") for p in ("weight", "bias")}
    made = "nn.ModuleDict({'score': nn.Linear(8, 1), 'size': nn.Linear(8, 2)})"
    assert said(tmp_path, RECORD.format(heads=made, score="self.heads['score']", size="self.heads['size']")) == []


def test_frozen_late_in_a_long_run(tmp_path: Path) -> None:
    source = FROZEN.format(optimizer="Adam(net.parameters(), 0.01)", none="set_to_none=False").replace("range(30)", "range(420)")
    only(tmp_path, source.replace("it == 15", "it == 300"), "GG613", "p.requires_grad = False")
    turns = source.replace("if it == 15:", "if True:").replace("= False", "= it % 3 != 0").replace("set_to_none=False", "")
    assert said(tmp_path, turns) == []
