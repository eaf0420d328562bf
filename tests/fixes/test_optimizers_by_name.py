"""Gradients that no optimizer gets to see, optimizers that a loop runs over: what is said of them, and what stays silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

RETURNED = """
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
weights = list(net.parameters())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(12):
    x = torch.randn(8, 4)
    loss = F.cross_entropy(net(x), torch.arange(8) % 2)
    slopes = torch.autograd.grad(loss, TAKEN)
    ASSIGN
    opt.step()
"""

LOOPED = """
actor, critic = nn.Linear(3, 2), nn.Linear(2, 1)
actor_opt = torch.optim.SGD(actor.parameters(), lr=0.01)
critic_opt = torch.optim.SGD(critic.parameters(), lr=0.01)
for it in range(12):
    for o in (actor_opt, critic_opt):
        o.zero_grad()
    goal = -critic(actor(torch.randn(8, 3))).mean()
    goal.backward()
    actor_opt.step()
    BETWEEN
    fit = critic(torch.randn(8, 2)).pow(2).mean()
    fit.backward()
    critic_opt.step()
"""


@pytest.mark.parametrize("taken", ["weights", "list(net.parameters())"])
def test_returned_gradients_that_nobody_assigns_are_named(tmp_path: Path, taken: str) -> None:
    source = HEAD + RETURNED.replace("TAKEN", taken).replace("ASSIGN", "sum(s.norm() for s in slopes)")
    diagnosis = run_source(tmp_path, source)[0][0]
    assert diagnosis.code == "GG606" and diagnosis.culprit is not None and diagnosis.culprit.text == "opt.step()"
    assert "`autograd.grad`" in diagnosis.headline and "`slopes`" in diagnosis.related[0].label
    assert "zip(parameters, slopes)" in diagnosis.fixes[0].title


def test_returned_gradients_that_are_assigned_are_silent(tmp_path: Path) -> None:
    assign = "for w, s in zip(weights, slopes): w.grad = s"
    assert not run_source(tmp_path, HEAD + RETURNED.replace("TAKEN", "weights").replace("ASSIGN", assign))


def test_gradients_of_inputs_do_not_explain_a_missing_backward(tmp_path: Path) -> None:
    source = HEAD + RETURNED.replace("TAKEN", "x").replace("ASSIGN", "pass").replace("randn(8, 4)", "randn(8, 4, requires_grad=True)")
    diagnosis = run_source(tmp_path, source)[0][0]
    assert diagnosis.code == "GG606" and "autograd.grad" not in diagnosis.headline


def test_gradients_returned_in_a_training_before_do_not_explain_a_missing_backward(tmp_path: Path) -> None:
    assign = "for w, s in zip(weights, slopes): w.grad = s"
    assert not run_source(tmp_path, HEAD + RETURNED.replace("TAKEN", "list(net.parameters())").replace("ASSIGN", assign))
    source = HEAD + RETURNED.replace("slopes = torch.autograd.grad(loss, TAKEN)", "loss.item()").replace("ASSIGN", "pass")
    diagnosis = run_source(tmp_path, source)[0][0]
    assert diagnosis.code == "GG606" and "autograd.grad" not in diagnosis.headline


def test_an_optimizer_is_not_called_by_the_variable_of_a_loop(tmp_path: Path) -> None:
    diagnosis = run_source(tmp_path, HEAD + LOOPED.replace("BETWEEN", "pass"))[0][0]
    assert diagnosis.code == "GG601" and "`critic_opt`" in diagnosis.headline and "`o`" not in diagnosis.headline
    assert not run_source(tmp_path, HEAD + LOOPED.replace("BETWEEN", "critic_opt.zero_grad()"))
