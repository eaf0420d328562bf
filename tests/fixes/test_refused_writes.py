"""Writes into a parameter that PyTorch refuses: an update goes under `no_grad`, what a forward pass adds up does not. And writes
that no line of the program makes in PyTorch's own words: lookups with `max_norm`, numpy's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source


def told(folder: Path, source: str, level: str = "standard") -> Diagnosis:
    found = [diagnosis for diagnosis, _ in run_source(folder, HEAD + source, level) if diagnosis.severity == "error"]
    assert len(found) == 1
    return found[0]


BRANCHES = """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))
        self.gates, self.offset = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(5, 4))

    def forward(self, x):
        total = {begin}
        for gate, part in zip(self.gates, self.parts):
            {write}
        return total

model = Branches()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for it in range(3):
    opt.zero_grad()
    model(torch.randn(5, 3)).pow(2).mean().backward()
    opt.step()
assert all(p.grad is not None and p.grad.any() for p in model.parameters())
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_what_a_forward_pass_adds_into_a_parameter_goes_into_a_copy(tmp_path: Path, level: str) -> None:
    source = BRANCHES.format(begin="self.offset", write="total += gate * part(x)")
    diagnosis = told(tmp_path, source, level)
    assert diagnosis.code == "GG103"
    assert any(span.text == "total = self.offset" for span in diagnosis.related)
    assert not any("no_grad" in fix.title and (fix.safety == "safe" or fix.patch) for fix in diagnosis.fixes)
    first, second = diagnosis.fixes[:2]
    for patch in (first.patch, second.patch):
        assert patch is not None
        assert run_source(tmp_path, applied(HEAD + source, patch), level) == []
    assert "total = self.offset.clone()" in first.title and "total = total + (gate * part(x))" in second.title


def test_what_a_forward_pass_adds_into_a_view_of_a_parameter_goes_into_a_copy(tmp_path: Path) -> None:
    source = BRANCHES.format(begin="self.offset[:, :]", write="total += gate * part(x)")
    diagnosis = told(tmp_path, source)
    assert diagnosis.code == "GG104"
    assert "clone()" in diagnosis.fixes[0].title
    assert not any("no_grad" in fix.title for fix in diagnosis.fixes)


def test_an_average_kept_in_a_forward_pass_is_an_update(tmp_path: Path) -> None:
    source = """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.out = nn.Parameter(torch.zeros(3)), nn.Linear(3, 1)

    def forward(self, x):
        self.mean.add_(x.mean(0))
        return self.out(x - self.mean)

model = Centred()
model(torch.randn(5, 3)).mean().backward()
"""
    diagnosis = told(tmp_path, source)
    assert diagnosis.code == "GG103"
    assert "no_grad" in diagnosis.fixes[0].title and diagnosis.fixes[0].safety == "safe"


def test_a_moving_average_of_another_network_is_an_update(tmp_path: Path) -> None:
    source = """
net, slow = nn.Linear(3, 1), nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(3):
    opt.zero_grad()
    net(torch.randn(5, 3)).pow(2).mean().backward()
    opt.step()
    for mine, theirs in zip(slow.parameters(), net.parameters()):
        mine.mul_(0.9).add_(theirs * 0.1)
"""
    diagnosis = told(tmp_path, source)
    assert diagnosis.code == "GG103"
    patch = diagnosis.fixes[0].patch
    assert patch is not None and diagnosis.fixes[0].safety == "safe"
    assert run_source(tmp_path, applied(HEAD + source, patch)) == []


RANKED = """
class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.things, self.kinds = nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(3, 4)

    def against_all(self, query):
        return query @ {weight}.t()

    def forward(self, a, kind, b):
        return self.against_all(self.things(a) * self.kinds(kind)), self.against_all(self.things(b) * self.kinds(kind))

model = Scores()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for it in range(8):
    a, kind, b = torch.randint(0, 9, (5,)), torch.randint(0, 3, (5,)), torch.randint(0, 9, (5,))
    one, other = model(a, kind, b)
    opt.zero_grad()
    (F.cross_entropy(one, b) + F.cross_entropy(other, a)).backward()
    opt.step()
"""


@pytest.mark.parametrize("level", ["standard", "strict", "watch"])
def test_a_lookup_that_rescales_the_weight_is_named(tmp_path: Path, level: str) -> None:
    source = RANKED.format(weight="self.things.weight")
    diagnosis = told(tmp_path, source, level)
    assert diagnosis.code == "GG101"
    assert "`model.things.weight`" in diagnosis.headline and "max_norm=1" in diagnosis.headline
    if level != "watch":
        assert diagnosis.culprit is not None and diagnosis.culprit.text == "self.things(b)"
        assert not any("not traced" in note for note in diagnosis.notes)
        patch = diagnosis.fixes[0].patch
        assert patch is not None
        assert run_source(tmp_path, applied(HEAD + source, patch), level) == []


def test_lookups_that_rescale_a_copied_weight_are_sound(tmp_path: Path) -> None:
    assert run_source(tmp_path, HEAD + RANKED.format(weight="self.things.weight.clone()")) == []


BUFFERED = """
import numpy as np

class World:
    def __init__(self):
        self.seen = np.zeros((6, 3), dtype=np.float32)

    def begin(self):
        self.seen[...] = np.linspace(0, 1, 18, dtype=np.float32).reshape(6, 3)
        return self.seen

    def advance(self, action):
        self.seen[:, :2] += 0.1 * action
        return self.seen, self.seen.sum(1)

def play(world, policy):
    seen, kept = world.begin(), []
    for _ in range(3):
        action = policy(torch.from_numpy({seen}))
        kept.append(action.pow(2).sum(-1))
        seen, gain = world.advance(action.detach().numpy())
        kept.append(torch.from_numpy(gain))
    return torch.stack(kept)

world, policy = World(), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
opt = torch.optim.SGD(policy.parameters(), lr=0.1)
for it in range(4):
    opt.zero_grad()
    play(world, policy).mean().backward()
    opt.step()
"""


def test_an_array_that_is_written_again_is_followed_to_where_it_was_handed_over(tmp_path: Path) -> None:
    source = BUFFERED.format(seen="seen")
    with pytest.warns(UserWarning):
        diagnosis = run_source(tmp_path, HEAD + source)[0][0]
    assert diagnosis.code == "GG101"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "self.seen[:, :2] += 0.1 * action"
    assert any(span.text == "torch.from_numpy(seen)" for span in diagnosis.related)
    assert "the tensor`" not in (diagnosis.culprit.label or "")
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    repaired = applied(HEAD + source, patch)
    assert "torch.from_numpy(seen.copy())" in repaired
    assert run_source(tmp_path, repaired) == []
