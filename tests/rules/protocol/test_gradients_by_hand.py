"""GG606 where gradients are handed over by hand: once and never again, or to copies that no optimizer has."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from tests.running import said

WORKER = """
shared, local = nn.Linear(4, 2), nn.Linear(4, 2)
opt = torch.optim.SGD(shared.parameters(), lr=0.1)
def hand_over(ours, theirs):
    for p, q in zip(theirs.parameters(), ours.parameters()):
        if p.grad is not None:
            return
        p._grad = q.grad
def give(p, q):
    if p.grad is None:
        setattr(p, "grad", q.grad)
for step in range(20):
    local.load_state_dict(shared.state_dict())
    local.zero_grad()
    local(torch.randn(8, 4)).pow(2).mean().backward()
{give}
    opt.step()
"""
PAIRS = "for p, q in zip(shared.parameters(), local.parameters()):\n    "
ONCE = {
    "where there is none": (PAIRS + "if p.grad is None:\n        p.grad = q.grad", "if p.grad is None"),
    "unless there is one": (PAIRS + "if p.grad is not None:\n        continue\n    p.grad = q.grad", "if p.grad is not None"),
    "in a function": ("hand_over(local, shared)", "if p.grad is not None"),
}
EACH_TIME = {
    "always": PAIRS + "p.grad = q.grad",
    "in a function": PAIRS + "p.grad = None\n    give(p, q)",
    "copied": PAIRS + "if p.grad is None:\n        p.grad = torch.zeros_like(p)\n    p.grad.copy_(q.grad)",
}
ASIDE = """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
{copies}
for step in range(20):
    opt.zero_grad()
    found = torch.autograd.grad(net(torch.randn(8, 4)).pow(2).mean(), list(net.parameters()))
{give}
    opt.step()
"""
TO_COPIES = {
    "a list": ("kept = [p.detach() for p in net.parameters()]", "for p, g in zip(kept, found):\n    p.grad = g", "p.grad = g"),
    "a dict": (
        "kept = dict(net.state_dict())", "for name, g in zip(kept, found):\n    kept[name].grad = g", "kept[name].grad = g",
    ),
    "a function": (
        "kept = [p.data for p in net.parameters()]\ndef put(tensor, value):\n    tensor.grad = value",
        "for p, g in zip(kept, found):\n    put(p, g)", "tensor.grad = value",
    ),
}  # fmt: skip


def worker(give: str) -> str:
    # of two places that may set a gradient none is blamed: the helpers are there where they are called
    source = WORKER.format(give=indent(give, "    "))
    for name, end in (("hand_over", "def give"), ("give", "for step")):
        if f"{name}(" not in give:
            source = source[: source.index(f"def {name}(")] + source[source.index(end) :]
    return source


@pytest.mark.parametrize(("give", "culprit"), ONCE.values(), ids=ONCE)
def test_a_gradient_that_is_handed_over_once(tmp_path: Path, give: str, culprit: str) -> None:
    (diagnosis,) = said(tmp_path, worker(give))
    assert (diagnosis.code, diagnosis.culprit and diagnosis.culprit.text) == ("GG606", culprit)
    assert "set by hand" in diagnosis.headline


@pytest.mark.parametrize("give", EACH_TIME.values(), ids=EACH_TIME)
def test_gradients_that_are_handed_over_each_time(tmp_path: Path, give: str) -> None:
    assert said(tmp_path, worker(give)) == []


@pytest.mark.parametrize(("copies", "give", "culprit"), TO_COPIES.values(), ids=TO_COPIES)
def test_gradients_that_copies_get(tmp_path: Path, copies: str, give: str, culprit: str) -> None:
    found = said(tmp_path, ASIDE.format(copies=copies, give=indent(give, "    ")))
    assert [(each.code, each.culprit and each.culprit.text) for each in found] == [("GG606", culprit)]
    assert "kept`, which are copies" in found[0].headline


def test_gradients_that_the_parameters_get(tmp_path: Path) -> None:
    give = "for p, g in zip(net.parameters(), found):\n    p.grad = g"
    assert said(tmp_path, ASIDE.format(copies="kept = [p.detach() for p in net.parameters()]", give=indent(give, "    "))) == []
