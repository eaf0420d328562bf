"""GG310: terms that a loss contains more than once, however it is summed up; and sums that look alike and are right."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from tests.running import said

PROGRAM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
    def forward(self, x):
        h = torch.relu(self.enc(x))
        return self.head(h), h
class Losses:
    def __init__(self):
        self.total = 0
    def add(self, value):
        self.total = self.total + value
def spread(h):
    return (h.mean(0) ** 2).sum()
def terms_of(out, h):
    found = {{"task": out.pow(2).mean(), "aux": h.abs().mean()}}
    found["total"] = found["task"] + found["aux"]
    return found
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(12):
    opt.zero_grad()
    out, h = net(torch.randn(8, 4))
    rest = sum(head(h).pow(2).mean() for head in net.heads)
{loss}
    opt.step()
"""
# the loss, the culprit, the names of what is in it twice
REPEATED = {
    "one after the other": (
        "reg = h.abs().mean()\nloss = out.pow(2).mean() + rest + reg\nloss = loss + reg\nloss.backward()", "loss = loss + reg", ["`reg`"],
    ),
    "in place": (
        "aux = spread(h)\nloss = out.pow(2).mean() + aux\nloss += rest\nloss += aux\nloss.backward()", "loss += aux", ["`aux`"],
    ),
    "a total among the terms": (
        "found = terms_of(out, h)\nloss = sum(found.values())\n(loss + rest).backward()",
        "loss = sum(found.values())", ["`found['task']`", "`found['aux']`"],
    ),
    "stacked": (
        "reg = h.abs().mean()\nboth = torch.stack([out.pow(2).mean() + rest, reg, reg])\n(both.sum() / 2).backward()",
        "both = torch.stack([out.pow(2).mean() + rest, reg, reg])", ["`reg`"],
    ),
    "in an object": (
        "losses = Losses()\nk = spread(h)\nlosses.add(out.pow(2).mean() + k)\nlosses.add(rest)\nlosses.add(k)\nlosses.total.backward()",
        "self.total = self.total + value", ["`k`"],
    ),
    "a sum that is not set back": (
        "total = out.pow(2).mean()\npart = 0.0\nfor head in net.heads:\n    part = part + head(h).pow(2).mean()\n    total = total + part\n"
        "total.backward()", "total = total + part", ["`part`"],
    ),
    "a sum that is not set back, in place": (
        "total, part = out.pow(2).mean(), torch.zeros(())\nfor head in net.heads:\n    part = torch.add(part, head(h).pow(2).mean())\n"
        "    total += part\ntotal.backward()", "total += part", ["`part`"],
    ),
}  # fmt: skip
ONCE = {
    "a weight": "reg = h.abs().mean()\n(out.pow(2).mean() + rest + 2 * reg).backward()",
    "another weight": "reg = h.abs().mean()\n(out.pow(2).mean() + rest + reg + 0.5 * reg).backward()",
    "also a factor": "reg = h.abs().mean()\n(out.pow(2).mean() + rest + reg + reg * reg + reg.sqrt()).backward()",
    "a difference": "reg = h.abs().mean()\n(out.pow(2).mean() + rest + reg - (reg - reg.detach())).backward()",
    "one term only": "loss = out.pow(2).mean() + 0 * rest.detach()\n(sum([loss] * 4) / 4).backward()",
    "each on its own": "total = rest\nfor _ in range(3):\n    total = total + net(torch.randn(8, 4))[0].pow(2).mean()\ntotal.backward()",
    "set back": (
        "total = out.pow(2).mean()\nfor head in net.heads:\n    part = 0.0\n    for row in head(h):\n        part += row.pow(2).sum()\n"
        "    total = total + part / 8\ntotal.backward()"
    ),
    "items of one tensor": "total = rest\nfor item in h.mean(0)[:3]:\n    total = total + 0.5 * item.exp() + item\ntotal.backward()",
    "parts of one call": "low, high = torch.aminmax(h)\nloss = low + high\n(loss + out.pow(2).mean() + rest).backward()",
    "two calls of one function": "(spread(h) + spread(h) + out.pow(2).mean() + rest).backward()",
    "a state that goes on": (
        "loss, z = rest, h\nfor _ in range(3):\n    z = z + torch.tanh(z)\n    loss = loss + net.head(z).pow(2).mean()\nloss.backward()"
    ),
    "a scalar state": "x, loss = out.mean(), rest\nfor _ in range(3):\n    x = x + 0.1\n    loss = loss + x.pow(2)\nloss.backward()",
    "a number of values": "loss = out.squeeze(1) + h.mean(1)\nloss = loss + h.mean(1)\n(loss.mean() + rest).backward()",
}


def program(loss: str) -> str:
    return PROGRAM.format(loss=indent(loss, "    "))


@pytest.mark.parametrize(("loss", "culprit", "names"), REPEATED.values(), ids=REPEATED)
def test_a_term_that_is_added_again(tmp_path: Path, loss: str, culprit: str, names: list[str]) -> None:
    (diagnosis,) = [each for each in said(tmp_path, program(loss)) if each.code != "GG605"]
    assert (diagnosis.code, diagnosis.culprit and diagnosis.culprit.text) == ("GG310", culprit)
    assert all(name in diagnosis.headline for name in names)


@pytest.mark.parametrize("loss", ONCE.values(), ids=ONCE)
def test_sums_that_have_each_term_once(tmp_path: Path, loss: str) -> None:
    assert [each.headline for each in said(tmp_path, program(loss)) if each.code == "GG310"] == []


@pytest.mark.parametrize("level", ["strict", "forensic"])
def test_at_other_levels(tmp_path: Path, level: str) -> None:
    assert "GG310" in {each.code for each in said(tmp_path, program(REPEATED["stacked"][0]), level)}
