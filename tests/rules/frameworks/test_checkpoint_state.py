"""GG712: a checkpointed function depends on Python state that is another one when backward runs it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import said

HEAD = """
import random
from torch.utils.checkpoint import checkpoint
lin, extra, head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
x = torch.randn(4, 8, requires_grad=True)
"""
BROKEN = {
    "a counter": (
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.gate, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0
    def forward(self, x):
        self.calls += 1
        h = torch.relu(self.lin(x))
        if self.calls % 2 == 1:
            h = h * torch.sigmoid(self.gate(h))
        return h
block = Block()
head(checkpoint(block, x, use_reentrant=False)).mean().backward()
""",
        "self.calls += 1",
        "`self.calls`, which it changes itself",
    ),
    "a counter behind helpers": (
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.gate, self.n = nn.Linear(8, 8), nn.Linear(8, 8), 0
    def count(self):
        self.n = self.n + 1
    def due(self):
        return self.n % 2 == 1
    def forward(self, x):
        self.count()
        h = torch.relu(self.lin(x))
        return h * torch.sigmoid(self.gate(h)) if self.due() else h
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda h: block(h), x, use_reentrant=False)
        return x
head(Net()(x)).mean().backward()
""",
        "self.n = self.n + 1",
        "`self.n`, which it changes itself",
    ),
    "an item of a dict": (
        """
state = {"warm": True}
def block(x):
    h = torch.relu(lin(x))
    if state["warm"]:
        h = torch.tanh(extra(h))
    return h
state["warm"] = True
out = checkpoint(block, x, use_reentrant=False)
state["warm"] = False
head(out).mean().backward()
""",
        'state["warm"] = False',
        '`state["warm"]`, which changes in between',
    ),
    "a global flag": (
        """
warm = True
def cool():
    global warm
    warm = False
def block(x):
    h = torch.relu(lin(x))
    return torch.tanh(extra(h)) if warm else h
out = checkpoint(block, x, use_reentrant=False)
cool()
head(out).mean().backward()
""",
        "warm = False",
        "`warm`, which changes in between",
    ),
    "a configuration": (
        """
class Config:
    depth = 2
class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.layers = config, nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def run(self, x):
        for layer in self.layers[: self.config.depth]:
            x = torch.relu(layer(x))
        return x
    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)
def shrink(config):
    config.depth = max(config.depth - 1, 1)
config = Config()
config.depth = 2
out = Net(config)(x)
shrink(config)
head(out).mean().backward()
""",
        "config.depth = max(config.depth - 1, 1)",
        "`self.config.depth`, which changes in between",
    ),
}


@pytest.mark.parametrize("level", ["standard", "forensic"])
@pytest.mark.parametrize(("source", "culprit", "words"), BROKEN.values(), ids=BROKEN)
def test_state_that_decides_what_is_computed(source: str, culprit: str, words: str, level: str, tmp_path: Path) -> None:
    diagnosis = said(tmp_path, HEAD + source, level)[0]
    assert diagnosis.code == "GG712" and words in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == culprit


COUNTED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.gate, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0
    def forward(self, x):
        self.calls += 1
        h = torch.relu(self.lin(x))
        {more}
        return h
block = Block()
"""


def test_a_counter_that_decides_nothing_is_not_blamed(tmp_path: Path) -> None:
    more = "h = torch.tanh(self.gate(h)) if random.random() < flips.pop() else h"
    source = HEAD + "flips = [-1.0, 2.0]\n" + COUNTED.format(more=more)
    diagnosis = said(tmp_path, source + "head(checkpoint(block, x, use_reentrant=False)).mean().backward()")[0]
    assert diagnosis.code == "GG712" and "self.calls" not in diagnosis.headline


def test_of_two_places_none_is_known_to_have_changed_it(tmp_path: Path) -> None:
    source = BROKEN["an item of a dict"][0].replace("head(out)", 'if not state["warm"]:\n    state["warm"] = False\nhead(out)')
    diagnosis = said(tmp_path, HEAD + source)[0]
    assert diagnosis.code == "GG712" and diagnosis.culprit is None and '`state["warm"]`' in diagnosis.headline


def test_counters_of_sound_checkpoints(tmp_path: Path) -> None:
    source = HEAD + COUNTED.format(more="h = torch.tanh(self.gate(h))")
    assert said(tmp_path, source + "head(checkpoint(block, x, use_reentrant=False)).mean().backward()") == []
