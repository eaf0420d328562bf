"""Learning rates that come to zero: by a loaded state, a schedule that runs ahead of its optimizer, one that is over, a statement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

RESUMED = """
def state_of_the_first_training():
    net = nn.Linear(4, 1)
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    curve = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=5)
    for _ in range(5):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
        curve.step()
    return opt.state_dict()
def go_on(state):
    net = nn.Linear(4, 1)
    opt = torch.optim.Adam(net.parameters(), lr=0.003)
    opt.load_state_dict(state)
    {after}
    for _ in range(40):
        opt.zero_grad()
        net(torch.randn(8, 4)).pow(2).mean().backward()
        opt.step()
go_on(state_of_the_first_training())
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_a_state_that_brings_a_rate_of_zero(tmp_path: Path, level: str) -> None:
    diagnosis = only(tmp_path, RESUMED.format(after="pass"), "GG611", "opt.load_state_dict(state)", level)
    assert "since its state was loaded" in diagnosis.headline and "group['lr'] = 0.003" in diagnosis.fixes[0].title


def test_a_rate_that_is_set_after_loading(tmp_path: Path) -> None:
    assert said(tmp_path, RESUMED.format(after="opt.param_groups[0]['lr'] = 0.003")) == []


ACCUMULATED = """
net = nn.Linear(4, 1)
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
curve = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: max(0.0, 1 - step / {span}))
for i in range(96):
    (net(torch.randn(8, 4)).pow(2).mean() / 4).backward()
    if (i + 1) % 4 == 0:
        opt.step()
        opt.zero_grad()
        {inner}
    {outer}
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_a_schedule_that_runs_ahead_of_its_optimizer(tmp_path: Path, level: str) -> None:
    source = ACCUMULATED.format(span=24, inner="pass", outer="curve.step()")
    diagnosis = only(tmp_path, source, "GG612", "curve.step()", level)
    assert "called 96 times in 24 steps" in diagnosis.headline and "opt.step()`" in diagnosis.fixes[0].title


@pytest.mark.parametrize(("span", "inner", "outer"), [(24, "curve.step()", "pass"), (96, "pass", "curve.step()")])
def test_schedules_that_end_with_training(tmp_path: Path, span: int, inner: str, outer: str) -> None:
    assert said(tmp_path, ACCUMULATED.format(span=span, inner=inner, outer=outer)) == []


OVER = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
{made}
for i in range(60):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    {each}
"""


def test_a_schedule_that_is_over_is_not_said_to_have_begun_at_zero(tmp_path: Path) -> None:
    curve = "torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, 20)"
    diagnosis = only(tmp_path, OVER.format(made=f"curve = {curve}", each="curve.step()"), "GG611", curve)
    assert diagnosis.culprit is not None and "has brought the rate to zero" in diagnosis.culprit.label


def test_a_rate_written_by_hand_is_not_blamed_on_the_constructor(tmp_path: Path) -> None:
    write = "opt.param_groups[0]['lr'] = 0.1 * (5 > i)"
    diagnosis = only(tmp_path, OVER.format(made="options = {}; options['lr'] = 3", each=write), "GG611", write)
    assert diagnosis.culprit is not None and "sets the rate" in diagnosis.culprit.label


GROUPS = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters()}], lr=%s)
for _ in range(60):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
"""


def test_one_group_of_two_with_a_rate_of_zero(tmp_path: Path) -> None:
    assert said(tmp_path, GROUPS % "0.01") == []


def test_all_groups_with_a_rate_of_zero(tmp_path: Path) -> None:
    assert [diagnosis.code for diagnosis in said(tmp_path, GROUPS % "0.0")] == ["GG611"]
