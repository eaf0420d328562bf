"""GG602, what is left of an accumulation when an epoch ends, and its sound look-alikes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

HEAD = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
"""
AT_THE_TOP = """
for epoch in range(4):
    opt.zero_grad()
    for i, batch in enumerate(data.split(4), 1):
        (net(batch).pow(2).mean() / 4).backward()
        if i % 4 == 0:
            opt.step()
            opt.zero_grad()
"""
IN_A_CLASS = """
class Trainer:
    def __init__(self):
        self.pending = 0
    def begin(self):
        net.zero_grad()
        self.pending = 0
    def feed(self, batch):
        loss = net(batch).abs().mean()
        loss.backward()
        self.pending += 1
        if self.pending == 3:
            opt.step()
            opt.zero_grad()
            self.pending = 0

trainer = Trainer()
for epoch in range(5):
    trainer.begin()
    for batch in data.split(4):
        trainer.feed(batch)
"""
AT_THE_END = """
def epoch_of(batches):
    waiting = 0
    while batches:
        (net(batches.pop()) - 1).pow(2).mean().backward()
        waiting += 1
        if waiting == 2:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            for p in net.parameters():
                p.grad = None
            waiting = 0
    opt.zero_grad()

for _ in range(5):
    epoch_of(list(data[:36].split(4)))
"""


@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
@pytest.mark.parametrize(
    ("program", "culprit", "left"),
    [
        (AT_THE_TOP, "opt.zero_grad()", "the last 2 backward calls"),
        (IN_A_CLASS, "net.zero_grad()", "the last backward call"),
        (AT_THE_END, "opt.zero_grad()", "the last backward call"),
    ],
    ids=["top", "class", "end"],
)
def test_the_rest_is_lost(program: str, culprit: str, left: str, level: str, tmp_path: Path) -> None:
    found = only(tmp_path, HEAD + program, "GG602", culprit, level)
    assert left in found.headline
    assert found.confidence == "likely"


@pytest.mark.parametrize(
    "program",
    [
        AT_THE_TOP.replace("if i % 4 == 0:", "if i % 4 == 0 or i == 10:"),
        AT_THE_TOP.replace("data.split(4)", "data.split(5)"),
        AT_THE_TOP.replace("    opt.zero_grad()\n    for", "    for"),  # the rest counts in the next epoch
        """
spoilt = {3, 14, 31}
since = 0
for i in range(48):
    loss = net(data[i % 40][None]).pow(2).mean()
    loss.backward()
    since += 1
    if i in spoilt:  # given up now and then
        opt.zero_grad()
        since = 0
    elif since == 3:
        opt.step()
        opt.zero_grad()
        since = 0
""",
        """
def backward(batch):
    net(batch).pow(2).mean().backward()

for epoch in range(4):
    for batch in data[:10].split(5):  # how large gradients are, batch by batch
        backward(batch)
        print(net[0].weight.grad.norm())
        opt.zero_grad()
    for i, batch in enumerate(data[:32].split(4), 1):
        backward(batch)
        if i % 4 == 0:
            opt.step()
            opt.zero_grad()
""",
    ],
    ids=["stepped", "divides", "carried", "given_up", "measured"],
)
def test_sound_look_alikes(program: str, tmp_path: Path) -> None:
    assert said(tmp_path, HEAD + program, "strict") == []
