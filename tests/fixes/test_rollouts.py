"""Values that were computed once and are constants of the losses after: detached where they are kept, never moved with their data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source

ROLLOUT = """
from torch.distributions import Categorical
actor, critic = nn.Linear(4, 3), nn.Linear(4, 1)
opt = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.01)

def collect():
    states = torch.randn(16, 4)
    chosen = Categorical(logits=actor(states))
    action = chosen.sample()
    return states, action, chosen.log_prob(action), critic(states).squeeze(1), states.sum(1)

for it in range(2):
    states, action, before, value, returns = collect()
    {more}
    for epoch in range(3):
        now = Categorical(logits=actor(states)).log_prob(action)
        loss = -((now - before).exp() * {advantage}).mean() + F.mse_loss(critic(states).squeeze(1), returns)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


def repaired(folder: Path, source: str) -> str:
    """The program with the first patch of each fault that shows after the one before."""
    for _ in range(4):
        found = run_source(folder, source)
        if not found:
            return source
        [(told, _)] = found
        assert told.code == "GG205" and told.fixes[0].patch is not None, told
        source = applied(source, told.fixes[0].patch)
    raise AssertionError(source)


@pytest.mark.parametrize(
    ("more", "advantage", "lines"),
    [
        ("pass", "returns", ["before = before.detach()"]),
        ("advantage = returns - value", "advantage", ["before = before.detach()", "value = value.detach()"]),
        ("before = 1.0 * before", "(returns - value)", ["before = 1.0 * before\n    before = before.detach()", "value = value.detach()"]),
    ],
    ids=["probability", "advantage", "in the loss"],
)
def test_a_rollout_is_kept_without_its_graph(more: str, advantage: str, lines: list[str], tmp_path: Path) -> None:
    source = HEAD + ROLLOUT.format(more=more, advantage=advantage)
    mended = repaired(tmp_path, source)
    assert mended.count("collect()\n") == 1 and "        states, action, before, value, returns = collect()" not in mended
    assert len(mended.splitlines()) == len(source.splitlines()) + mended.count(".detach()") and ".detach()" not in source
    for line in lines:
        assert f"    {line}\n" in mended, mended


@pytest.mark.parametrize("made", ["teacher(x).softmax(1)", "(teacher(x) / 2).softmax(1)"])
def test_a_teacher_that_nothing_trains(made: str, tmp_path: Path) -> None:
    source = HEAD + (
        "teacher, student = nn.Linear(4, 3), nn.Linear(4, 3)\n"
        "opt = torch.optim.SGD(student.parameters(), lr=0.1)\n"
        "x = torch.randn(8, 4)\n"
        f"target = {made}\n"
        "for it in range(3):\n"
        "    loss = F.kl_div(student(x).log_softmax(1), target, reduction='batchmean')\n"
        "    opt.zero_grad()\n"
        "    loss.backward()\n"
        "    opt.step()\n"
    )
    assert f"target = {made}.detach()\n" in repaired(tmp_path, source)


def test_what_the_optimizer_trains_is_computed_in_each_turn(tmp_path: Path) -> None:
    source = HEAD + (
        "net = nn.Linear(4, 4)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "size = net.weight.pow(2).sum()\n"
        "for it in range(3):\n"
        "    loss = net(torch.randn(8, 4)).pow(2).mean() + 0.1 * size\n"
        "    opt.zero_grad()\n"
        "    loss.backward()\n"
        "    opt.step()\n"
    )
    assert "for it in range(3):\n    size = net.weight.pow(2).sum()\n" in repaired(tmp_path, source)
