"""What an untraced step tells of a write: functions kept in lists are followed, the op that wrote last rules statements out."""

from __future__ import annotations

from pathlib import Path

from tests.running import applied, only, said

TERMS = """
class Trainer:
    def __init__(self):
        self.net = nn.Linear(3, 1)

    def fit(self, batch, out):
        return (out * batch["weight"]).mean()

    def bound(self, batch, out):
        return (out - batch["weight"].clamp_(-1, 1)).square().mean()

    def update(self, batch):
        terms = (self.fit, self.bound)
        out = self.net(batch["x"]).squeeze(1)
        loss = sum(term(batch, out) for term in terms)
        loss.backward()

Trainer().update({"x": torch.randn(4, 3), "weight": torch.randn(4)})
"""

STEPS = """
def clear(maps, width):
    maps[:, :width] = 0
    return maps

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.steps = nn.Linear(3, 4), [partial(clear, width=1)]

    def forward(self, x):
        maps = torch.sigmoid(self.score(x))
        for step in self.steps:
            maps = step(maps)
        return maps

from functools import partial
net = Net()
loss = net(torch.randn(4, 3)).mean()
loss.backward()
"""

GATED = """
def data():
    wave = torch.randn(8, 6)
    wave[torch.arange(8), torch.arange(8) % 6] += 2.0
    return wave

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.ReLU(inplace=FLAG), nn.Linear(6, 6))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.gain * x + self.branch(x)

net = nn.Sequential(nn.Linear(6, 6), Block(), Block())
loss = net(data()).mean()
loss.backward()
"""


def test_a_write_in_one_of_the_methods_of_a_tuple(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, TERMS, "GG101", 'batch["weight"].clamp_(-1, 1)', "watch")
    assert 'writes over `batch["weight"]`' in diagnosis.headline
    assert diagnosis.fixes[0].patch is not None
    assert not said(tmp_path, applied(TERMS, diagnosis.fixes[0].patch), "watch")


def test_a_write_in_a_function_that_a_module_keeps_in_a_list(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, STEPS, "GG101", "maps[:, :width] = 0", "watch")
    assert "maps = maps.clone()" in diagnosis.fixes[0].title
    assert not said(tmp_path, STEPS.replace("def clear(maps, width):", "def clear(maps, width):\n    maps = maps.clone()"), "watch")


def test_a_statement_that_cannot_have_made_the_write_is_not_blamed(tmp_path: Path) -> None:
    (diagnosis,) = said(tmp_path, GATED.replace("FLAG", "True"), "watch")
    assert "wave" not in diagnosis.headline and "ReLU" in " ".join(
        [diagnosis.headline, *diagnosis.notes, *(fix.title for fix in diagnosis.fixes)]
    )
    assert not said(tmp_path, GATED.replace("FLAG", "False"), "watch")
