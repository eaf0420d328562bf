"""Checkpointed functions that decide by a random draw: which generators are put back, and which are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

PROGRAM = """
import random
import numpy as np
from torch.utils.checkpoint import checkpoint

own = torch.Generator().manual_seed(3)
numbers, coin = np.random.default_rng(0), random.random

def heads(p):
    return random.uniform(0, 1) < p

def tails(owner, p):
    return owner.rng.random() < p

def either(layers, chance):
    return len(layers) == 6 and chance(0, 1) < 0.5

class Coin:
    def random(self):
        return 1.0

class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6))
        self.weight = random.random()
        self.rng, self.legacy, self.numbers = random.Random(3), np.random.RandomState(3), np.random.default_rng(3)
        self.generator, self.fair = torch.Generator().manual_seed(3), Coin()
        self.calls = 0

    def forward(self, x):
        {before}
        for layer in self.layers:
            {inside}
            if {skips}:
                continue
            x = layer(x)
        return x

random.seed(0), np.random.seed(0)
stage, head = Stage(), nn.Linear(6, 1)
opt = torch.optim.SGD([*stage.parameters(), *head.parameters()], lr=0.01)
for it in range(8):
    opt.zero_grad()
    x = torch.randn(4, 6, requires_grad=True)
    head(checkpoint(stage, x, use_reentrant=False)).pow(2).mean().backward()
    opt.step()
"""


def program(skips: str, inside: str = "pass", before: str = "pass") -> str:
    return HEAD + PROGRAM.format(skips=skips, inside=inside, before=before)


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("skips", "inside", "culprit"),
    [
        ("self.training and random.random() < 0.5", "pass", "random.random()"),
        ("draw > 0.5", "draw = np.random.rand()", "np.random.rand()"),
        ("torch.rand(1, generator=own) < 0.5", "pass", "torch.rand(1, generator=own)"),
        ("self.rng.random() < 0.5", "pass", "self.rng.random()"),
        ("self.fair.random() < 0.5 or self.rng.betavariate(1, 1) < 0.5", "pass", "self.rng.betavariate(1, 1)"),
        ("self.legacy.rand() < 0.5", "pass", "self.legacy.rand()"),
        ("self.numbers.integers(2)", "pass", "self.numbers.integers(2)"),
        ("numbers.random() < 0.5", "pass", "numbers.random()"),
        ("torch.zeros(1).uniform_(generator=self.generator) < 0.5", "pass", "torch.zeros(1).uniform_(generator=self.generator)"),
        ("coin() < 0.5", "pass", "coin()"),
        ("heads(0.5)", "pass", "random.uniform(0, 1)"),
        ("tails(self, 0.5)", "pass", "owner.rng.random()"),
        ("tails(p=0.5, owner=self)", "pass", "owner.rng.random()"),
        ("either(self.layers, self.rng.uniform)", "pass", "chance(0, 1)"),
    ],
)
def test_a_draw_that_is_not_repeated(skips: str, inside: str, culprit: str, level: str, tmp_path: Path) -> None:
    [(found, text)] = run_source(tmp_path, program(skips, inside), level)
    assert found.code == "GG712" and found.confidence == "likely"
    assert found.culprit is not None and found.culprit.text == culprit
    assert f"`{culprit}` draws from a random state that is not restored" in text
    assert "Draw before the checkpoint" in found.fixes[0].title


def test_a_draw_that_decides_nothing_is_not_blamed(tmp_path: Path) -> None:
    counted = program("self.calls % 2", inside="x = x * (1 + 0.01 * random.random())", before="self.calls += 1")
    [(found, text)] = run_source(tmp_path, counted)
    assert found.code == "GG712" and found.culprit is not None and found.culprit.text == "self.calls += 1"
    assert "random.random()" not in text


def test_two_draws_are_both_shown(tmp_path: Path) -> None:
    [(found, _)] = run_source(tmp_path, program("random.random() < 0.3", inside="x = x if np.random.rand() < 0.5 else layer(x)"))
    assert found.code == "GG712" and found.culprit is None
    assert [span.text for span in found.related][:2] == ["np.random.rand()", "random.random()"]


@pytest.mark.parametrize("skips", ["torch.rand(()) < 0.5", "torch.rand(1).item() < 0.5"])
def test_the_default_generator_is_put_back(skips: str, tmp_path: Path) -> None:
    assert run_source(tmp_path, program(skips)) == []


REMEMBERS = """
from torch.utils.checkpoint import checkpoint

class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.known = nn.Linear(1, 6), None

    def scale(self):
        if self.known is None:
            self.known = self.gain({given}).tanh()
        return self.known

    def forward(self, x):
        return x * self.scale()

stage = Stage()
{first}
x = torch.randn(4, 6, requires_grad=True)
checkpoint(stage, x, use_reentrant=False).pow(2).mean().backward()
"""


def test_cache_that_forward_fills(tmp_path: Path) -> None:
    source = HEAD + REMEMBERS.format(given="torch.ones(1)", first="pass")
    [(found, _)] = run_source(tmp_path, source)
    assert found.code == "GG712" and "`self.known` of `Stage`" in found.headline
    assert found.culprit is not None and found.culprit.text.startswith("self.known = ")
    assert not run_source(tmp_path, HEAD + REMEMBERS.format(given="torch.ones(1)", first="stage.scale()"))


def test_leaving_the_check_out_is_no_way_round(tmp_path: Path) -> None:
    source = program("random.random() < 0.5")
    unchecked = source.replace("use_reentrant=False", 'use_reentrant=False, determinism_check="none"')
    for each in (source, unchecked):  # the numbers of saved tensors are compared in any case
        ((found, _),) = run_source(tmp_path, each)
        assert found.code == "GG712" and "raise all the same" in found.avoid[0]
