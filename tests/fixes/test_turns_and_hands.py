"""Critics that take turns, gradients that are handed over, closures, and a mode that is put back: what is wrong, and what is sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, only, run_source

TURNS = """
class Game:
    def __init__(self):
        self.maker = nn.Linear(2, 2)
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)
        self.opt_m = torch.optim.SGD(self.maker.parameters(), lr=0.01)
        self.opt_c = torch.optim.SGD([*self.left.parameters(), *self.right.parameters()], lr=0.01)

    def thaw(self, nets, on):
        for net in nets:
            for p in net.parameters():
                p.requires_grad = on

    def play(self, x):
        made = self.maker(x)
        self.thaw([self.left, self.right], False)
        self.opt_m.zero_grad()
        (self.left(made) + self.right(made)).mean().backward()
        self.opt_m.step()
        AGAIN
        self.opt_c.zero_grad()
        sum(0.5 * (critic(x) - critic(made.detach())).mean() for critic in (self.left, self.right)).backward()
        self.opt_c.step()

game = Game()
for it in range(30):
    game.play(torch.randn(8, 2))
"""


def test_a_critic_that_is_never_thawed_is_named_and_not_the_detach(tmp_path: Path) -> None:
    found = only(tmp_path, TURNS.replace("AGAIN", "self.thaw([self.left], True)"), "GG605", "self.thaw([self.left, self.right], False)")
    assert "`self.right` is in `self.opt_c`" in found.headline
    assert "`self.thaw([self.left, self.right], True)`" in found.fixes[0].title
    assert not run_source(tmp_path, HEAD + TURNS.replace("AGAIN", "self.thaw([self.left, self.right], True)"))


HANDED = """
shared, local = nn.Linear(3, 1), nn.Linear(3, 1)
opt = torch.optim.SGD(shared.parameters(), lr=0.01)

def hand_over():
    for mine, ours in zip(local.parameters(), shared.parameters()):
        if ours.grad is not None:
            return
        ours.grad = mine.grad

for it in range(8):
    local.load_state_dict(shared.state_dict())
    local.zero_grad()
    local(torch.randn(5, 3)).pow(2).mean().backward()
    hand_over()
    opt.step()
"""


CONDITION = "        if ours.grad is not None:\n            return\n"


def test_a_gradient_that_is_handed_over_once_is_told(tmp_path: Path) -> None:
    found = only(tmp_path, HANDED, "GG606", "if ours.grad is not None")
    assert "`opt.step()`" in found.headline and "`hand_over`" in found.headline


@pytest.mark.parametrize(
    ("written", "sound"),
    [
        (CONDITION, ""),
        ("local.zero_grad()", "local.zero_grad(set_to_none=False)"),
        # through `.data`, which no version counter sees
        (CONDITION, "        if ours.grad is not None:\n            ours.grad.data.copy_(mine.grad)\n            continue\n"),
    ],
)
def test_gradients_that_are_handed_over_each_time_are_silent(tmp_path: Path, written: str, sound: str) -> None:
    assert written in HANDED and not run_source(tmp_path, HEAD + HANDED.replace(written, sound))


def test_a_closure_without_backward_is_named(tmp_path: Path) -> None:
    source = """
net = nn.Linear(3, 1)
x = torch.randn(6, 3)
opt = torch.optim.LBFGS(net.parameters(), max_iter=2)

def evaluate():
    opt.zero_grad()
    loss = net(x).pow(2).mean()
    return loss

for it in range(5):
    opt.step(evaluate)
"""
    found = only(tmp_path, source, "GG606", "return loss")
    assert "`loss.backward()` in `evaluate`" in found.fixes[0].title
    assert not run_source(tmp_path, HEAD + source.replace("    return loss", "    loss.backward()\n    return loss"))


def test_a_mode_that_is_remembered_too_late_is_told(tmp_path: Path) -> None:
    source = """
net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)

def score():
    net.eval()
    before = net.training
    with torch.no_grad():
        net(torch.randn(4, 3))
    net.train(before)

for it in range(16):
    opt.zero_grad()
    net(torch.randn(4, 3)).pow(2).mean().backward()
    opt.step()
    if it == 5:
        score()
"""
    found = only(tmp_path, source, "GG609", "net.eval()")
    assert "`net.train(before)` does not take it back" in (found.culprit.label or "") and "before `net.eval()`" in found.fixes[0].title  # type: ignore[union-attr]
