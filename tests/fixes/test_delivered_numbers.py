"""Values that a loop is handed with NaN in them: the one line behind a generator or a dataset that can have made them (GG501)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

DATASET = """
from torch.utils.data import DataLoader, Dataset
class Levels:
    def __call__(self, wave):
        power = wave.pow(2).view(4, 4).sum(1)
        {levels}
        return (levels - levels.mean()) / (levels.std() + 1e-5)
class Clips(Dataset):
    def __init__(self, transform):
        self.transform = transform
    def __len__(self):
        return 32
    def __getitem__(self, index):
        wave = torch.randn(16) if index % 8 else torch.zeros(16)
        return self.transform(wave), index % 2
def main():
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Clips(Levels()), batch_size=8)
    for step, (features, label) in enumerate(loader):
        opt.zero_grad()
        F.cross_entropy(net(features), label).backward()
        opt.step()
main()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_a_transform_of_the_dataset(tmp_path: Path, level: str) -> None:
    only(tmp_path, DATASET.format(levels="levels = torch.log(power)"), "GG501", "levels = torch.log(power)", level)


def test_of_two_lines_none_is_known_to_be_it(tmp_path: Path) -> None:
    two = "shares = power / power.sum()\n        levels = torch.log(shares)"
    only(tmp_path, DATASET.format(levels=two), "GG501", "for step, (features, label) in enumerate(loader)")


def test_a_transform_that_is_bounded(tmp_path: Path) -> None:
    assert said(tmp_path, DATASET.format(levels="levels = torch.log(power + 1e-6)")) == []


GENERATOR = """
def batches(n):
    for i in range(n):
        x = torch.randn(8, 4)
        count = torch.arange(8.0) + (i != 3)
        yield x, x.cumsum(0)[:, :1] / count.unsqueeze(1)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for x, target in batches(6):
    opt.zero_grad()
    F.mse_loss(net(x), target).backward()
    opt.step()
"""


def test_what_a_generator_yields(tmp_path: Path) -> None:
    source = GENERATOR.replace("x.cumsum(0)[:, :1]", "0 * x[:, :1]")
    only(tmp_path, source, "GG501", "yield x, 0 * x[:, :1] / count.unsqueeze(1)")


NOISE = """
class Schedule:
    def __init__(self):
        self.kept = torch.cos(torch.arange(8.0) / 8) ** 2
    def noise(self, xt, x0, t):
        a = {kept}
        return (xt - a.sqrt() * x0) / (1 - a).sqrt()
net, schedule = nn.Linear(2, 2), Schedule()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(4):
    xt, t = torch.randn(8, 2), torch.arange(8) + {first}
    opt.zero_grad()
    schedule.noise(xt, net(xt), t).abs().mean().backward()
    opt.step()
"""


def test_what_a_divisor_is_computed_from_is_shown(tmp_path: Path) -> None:
    source = NOISE.format(kept="self.kept[t].unsqueeze(1)", first=0)
    diagnosis = only(tmp_path, source, "GG501", "(xt - a.sqrt() * x0) / (1 - a).sqrt()")
    assert any(span.text == "a = self.kept[t].unsqueeze(1)" for span in diagnosis.related)


def test_a_divisor_above_zero(tmp_path: Path) -> None:
    assert said(tmp_path, NOISE.format(kept="self.kept[t % 8].unsqueeze(1) * 0.99", first=1)) == []
