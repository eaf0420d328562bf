"""Sound programs that look like a second backward, patches that apply, and the helper that the in-place family uses."""

from __future__ import annotations

import ast

import pytest
import torch
from lifetime_programs import ALL, HEAD

from gradguard.analysis.history.carried_graphs import find_carried_state
from gradguard.analysis.live.frames import live_frames
from gradguard.analysis.live.names import Names
from gradguard.instrumentation.journal import current_journal
from tests.running import Run, applied

SOUND = {
    "detached_state": """
rnn, head = nn.LSTM(3, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.1)
state = None
for it in range(3):
    out, state = rnn(torch.randn(5, 2, 3), state)
    loss = head(out).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    state = tuple(part.detach() for part in state)
""",
    "retained_for_two_losses": """
trunk, a, b = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1), nn.Linear(4, 1)
opt = torch.optim.SGD([*trunk.parameters(), *a.parameters(), *b.parameters()], lr=0.1)
for it in range(2):
    z = trunk(torch.randn(5, 3))
    opt.zero_grad()
    a(z).mean().backward(retain_graph=True)
    b(z).mean().backward()
    opt.step()
""",
    "retained_in_a_helper": """
trunk, a, b = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1), nn.Linear(4, 1)
opt = torch.optim.SGD([*trunk.parameters(), *a.parameters(), *b.parameters()], lr=0.1)

def contribute(loss, last):
    loss.backward(retain_graph=not last)

for it in range(2):
    z = trunk(torch.randn(5, 3))
    opt.zero_grad()
    contribute(a(z).mean(), False)
    contribute(b(z).mean(), True)
    opt.step()
""",
    "gradient_penalty": """
critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
opt = torch.optim.Adam(critic.parameters())
for it in range(2):
    x = torch.randn(5, 3, requires_grad=True)
    score = critic(x)
    grad = torch.autograd.grad(score.sum(), x, create_graph=True)[0]
    loss = score.mean() + (grad.norm(dim=1) - 1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "sum_backpropagated_once": """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    total = 0
    for it in range(3):
        total = total + net(torch.randn(5, 3)).pow(2).mean()
    opt.zero_grad()
    total.backward()
    opt.step()
""",
}


@pytest.mark.parametrize("slug", SOUND)
def test_sound_programs_stay_silent(run: Run, slug: str) -> None:
    assert run(HEAD + SOUND[slug]) == []


def test_other_errors_pass_unchanged(run: Run) -> None:
    with pytest.raises(RuntimeError, match="my own words"):
        run("raise RuntimeError('my own words')")


def test_the_detaching_patch_repairs_the_program(run: Run) -> None:
    source = (
        HEAD
        + """
rnn, head = nn.GRU(3, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.1)
h = torch.zeros(1, 2, 4)
for it in range(3):
    out, h = rnn(torch.randn(5, 2, 3), h)
    loss = head(out).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    )
    diagnosis, _ = run(source)[0]
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    added = [line[1:] for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == ["    h = h.detach()"]
    repaired = source.replace("    loss.backward()\n", "    loss.backward()\n" + added[0] + "\n")
    ast.parse(repaired)
    assert run(repaired) == []


@pytest.mark.parametrize("slug", ["mean_of_a_loss_kept_by_a_module", "retained_and_then_updated"])
def test_a_value_kept_by_a_module_is_cut_off_in_the_module(run: Run, slug: str) -> None:
    """The loop has no `self` to write: the patch changes the method that keeps the value, and the program then runs."""
    source = HEAD + next(program.source for program in ALL if program.slug == slug).replace("  # <<", "")
    diagnosis, text = run(source)[0]
    patch = diagnosis.fixes[0].patch
    assert patch is not None, text
    repaired = applied(source, patch)
    assert run(repaired) == []


def test_the_retaining_call_is_not_blamed(run: Run) -> None:
    """What the failing call itself has let go of before it failed is no old graph."""
    source = (
        HEAD
        + """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
z = net(torch.randn(5, 3))
a, b = z.exp().mean(), z.sin().exp().mean()
a.backward()
b.backward()
"""
    )
    diagnosis, text = run(source)[0]
    assert diagnosis.code == "GG202"
    assert "`z`" in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "a.backward()"
    assert "Add the losses up" in text


def test_a_carried_state_is_found_behind_the_in_place_error() -> None:
    """After retain_graph=True was added mechanically the next error is the in-place one."""
    from gradguard import gradguard

    torch.manual_seed(0)
    cell = torch.nn.RNNCell(3, 4)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    found = []
    with gradguard():
        journal = current_journal()
        h = torch.zeros(2, 4)
        for _ in range(4):
            h = cell(torch.randn(2, 3), h)
            loss = h.pow(2).mean()
            optimizer.zero_grad()
            try:
                loss.backward(retain_graph=True)
            except RuntimeError:
                import sys

                frames = live_frames(sys._getframe())
                found.append(find_carried_state([loss.grad_fn], journal, frames, Names(frames), journal.backwards[-1]))
                break
            optimizer.step()
    assert found and found[0] is not None
    assert found[0].name == "h"
    assert found[0].renewal == "each step"
