"""Learning rates that the program itself sets: cut for every batch, and the ways to set them that are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

DECAYED = """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def cut(optimizer, epoch):
    if epoch == 2:
        for group in optimizer.param_groups:
            CUT

for epoch in range(8):
    ONCE
    for it in range(10):
        EACH
        opt.zero_grad()
        F.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 2).backward()
        opt.step()
"""

TESTED = """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=1e-6)
for it in range(150):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 2).backward()
    opt.step()
    for group in opt.param_groups:
        RATE
"""


@pytest.mark.parametrize("cut", ['group["lr"] *= 0.1', 'group["lr"] /= 10', 'group["lr"] = group["lr"] * 0.1'])
def test_a_cut_for_every_batch_is_named(tmp_path: Path, cut: str) -> None:
    source = HEAD + DECAYED.replace("CUT", cut).replace("EACH", "cut(opt, epoch)").replace("ONCE", "pass")
    (diagnosis,) = [each for each, _ in run_source(tmp_path, source)]
    assert diagnosis.code == "GG612" and diagnosis.culprit is not None and diagnosis.culprit.text == cut
    assert "`opt`" in diagnosis.headline and "`cut()`" in diagnosis.fixes[0].title
    assert any(each.text == "cut(opt, epoch)" for each in diagnosis.related)


def test_a_growing_power_of_what_was_cut_already_is_named(tmp_path: Path) -> None:
    cut = 'group["lr"] *= 0.1 ** (it // 70)'
    (diagnosis,) = [each for each, _ in run_source(tmp_path, HEAD + TESTED.replace("1e-6", "0.1").replace("RATE", cut))]
    assert diagnosis.code == "GG612" and diagnosis.culprit is not None and diagnosis.culprit.text == cut
    assert "base * gamma" in diagnosis.fixes[0].title


def test_a_cut_for_every_epoch_is_silent(tmp_path: Path) -> None:
    source = DECAYED.replace("CUT", 'group["lr"] *= 0.1').replace("ONCE", "cut(opt, epoch)").replace("EACH", "pass")
    assert not run_source(tmp_path, HEAD + source)


@pytest.mark.parametrize(
    "rate",
    [
        'group["lr"] = min(1e-6 * 1.3**it, 1.0) if it < 60 else 5e-5',  # a range test, then what it found
        'group["lr"] = 0.1 * (1 - it / 150) + 1e-7',
        'group["lr"] = 0.1 * 0.95**it',
    ],
)
def test_rates_that_are_set_are_silent(tmp_path: Path, rate: str) -> None:
    assert not run_source(tmp_path, HEAD + TESTED.replace("RATE", rate))
