"""Memory that grows from step to step without a graph: told within a few steps where it is of no use, and nothing said where it may be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.case import load_everything
from tests.rules.memory.limited import limited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
LOOP = """
import collections, random
import numpy as np
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 256)
        self.head = nn.Linear(256, 1)
        self.hoard = {store}
    def forward(self, x):
        h = torch.relu(self.inner(x))
        {put}
        return self.head(h)
kept, i = [], 0
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
def step():
    x = torch.randn(1024, 64)
    {read}
    loss = net(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
for i in range(12):
    step()
{end}
"""
DEQUE, TABLE, CACHE = "collections.deque()", "collections.defaultdict(list)", "self.hoard[x] if x in self.hoard else h.detach()"
GROWING = {  # what it is kept in, and the statement that keeps it
    "list": ("[]", "self.hoard.append(h.detach())"),
    "array": ("[]", "self.hoard += [h.detach().numpy().copy()]"),
    "tuple in deque": (DEQUE, "self.hoard.append((h.detach(), len(self.hoard)))"),
    "dict of lists": (TABLE, 'self.hoard["h"].append(h.detach())'),
    "dict by number": ("{}", "self.hoard[len(self.hoard)] = h.detach()"),
    "tensors as keys": ("{}", f"self.hoard[x] = {CACHE}"),
}
SOUND = {  # also what is done with it in each step, and at the end
    "read at the end": ("[]", "self.hoard.append(h.detach())", "pass", "print(len(torch.cat(net.hoard)))"),
    "replay buffer": ("[]", "self.hoard.append(h.detach())", "random.choice(net.hoard)", ""),
    "bounded": ("collections.deque(maxlen=20)", "self.hoard.append(h.detach())", "pass", ""),
    "emptied": ("[]", "self.hoard.append(h.detach())", "if i % 6 == 5: net.hoard.clear()", ""),
    "numbers": ("[]", "self.hoard.append(h.mean().item())", "pass", ""),
    "cache by number": ("{}", "self.hoard[i % 9] = self.hoard.get(i % 9, h.detach())", "pass", ""),
    "keys that come back": ("{}", f"self.hoard[x] = {CACHE}", "kept.append(x)", "torch.cat(kept)"),
    "handed on": ("[]", "self.hoard.append(h.detach())", "pass", "print([each for each in (net.hoard,)])"),
}


@pytest.fixture(autouse=True, scope="module")
def ready() -> None:
    load_everything()


def _found(folder: Path, store: str, put: str, read: str, end: str) -> list[dict[str, Any]]:
    source = LOOP.format(store=store, put=put, read=read, end=end)
    return limited(folder, source, 4096).diagnoses


@pytest.mark.parametrize("name", GROWING)
def test_what_is_never_read_is_told_within_a_few_steps(name: str, tmp_path: Path) -> None:
    store, put = GROWING[name]
    (found,) = _found(tmp_path, store, put, "pass", "")
    assert (found["code"], found["culprit"]["text"]) == ("GG807", put)
    assert found["step"] <= 7
    assert "`self.hoard` grows by 1." in found["headline"]


@pytest.mark.parametrize("name", SOUND)
def test_what_may_be_meant_is_not_told(name: str, tmp_path: Path) -> None:
    assert _found(tmp_path, *SOUND[name]) == []
