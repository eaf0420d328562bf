"""A value is cut off for the loss of one optimizer, as it should be, and the loss of another one reads it where it needs the path."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, said

NETS = """
G, D = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
g_opt, d_opt = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
def bce(scores, value):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, value))
"""
TWO_NAMES = """
for _ in range(12):
    real, fake = torch.randn(8, 2), G(torch.randn(8, 4))
    fixed = fake.detach()
    d_loss = bce(D(real), 1.0) + bce(D(fixed), 0.0)
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()
    g_loss = bce(D(fixed), 1.0)
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
"""
ONE_NAME = """
def play(real):
    made = G(torch.randn(8, 4)).detach()
    d_loss = bce(D(real), 1.0) + bce(D(made), 0.0)
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()
    g_opt.zero_grad()
    bce(D(made), 1.0).backward()
    g_opt.step()
for _ in range(12):
    play(torch.randn(8, 2))
"""
GENERATOR_FIRST = """
for _ in range(12):
    x = G(torch.randn(8, 4))
    y = x.data
    g_opt.zero_grad()
    g_loss = bce(D(y), 1.0)
    g_loss.backward()
    g_opt.step()
    d_opt.zero_grad()
    d_loss = bce(D(torch.randn(8, 2)), 1.0) + bce(D(y), 0.0)
    d_loss.backward()
    d_opt.step()
"""
IN_METHODS = """
class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = D
    def forward(self, x):
        return self.net(x)
class Game:
    def __init__(self):
        self.judge = Judge()
    def deal(self):
        self.raw = G(torch.randn(8, 4))
        self.cards = self.raw.detach()
    def teach(self):
        d_opt.zero_grad()
        (bce(self.judge(torch.randn(8, 2)), 1.0) + bce(self.judge(self.cards), 0.0)).backward()
        d_opt.step()
    def fool(self):
        g_opt.zero_grad()
        bce(self.judge(self.cards), 1.0).backward()
        g_opt.step()
game = Game()
for _ in range(12):
    game.deal()
    game.teach()
    game.fool()
"""
HANDED_ON = """
def update(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()
def teach(x):
    update(d_opt, bce(D(torch.randn(8, 2)), 1.0) + bce(D(x), 0.0))
def fool(x):
    update(g_opt, bce(D(x), 1.0))
for _ in range(12):
    fake = G(torch.randn(8, 4))
    still = fake.detach()
    teach(still)
    fool(still)
"""
RAISED = """
for _ in range(12):
    fake = G(torch.randn(8, 4))
    still = fake.detach()
    d_opt.zero_grad()
    (D(still).mean() - D(torch.randn(8, 2)).mean()).backward()
    d_opt.step()
    g_loss = (still - 3).pow(2).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
"""
BROKEN = {
    "two names": (TWO_NAMES, "GG606", "fixed"),
    "one name": (ONE_NAME, "GG606", "made"),
    "generator first": (GENERATOR_FIRST, "GG606", "y"),
    "in methods": (IN_METHODS, "GG606", "self.cards"),
    "handed on": (HANDED_ON, "GG606", "still"),
    "raised": (RAISED, "GG302", "still"),
}


@pytest.mark.parametrize("which", BROKEN)
def test_the_read_of_the_later_loss_is_blamed_and_the_fix_repairs(tmp_path: Path, which: str) -> None:
    program, code, text = BROKEN[which]
    source = NETS + program
    found = _about(said(tmp_path, source), code)
    assert found.culprit is not None and found.culprit.text == text
    read = source.splitlines()[found.culprit.line - len(HEAD.splitlines()) - 1]
    assert "D(made), 1.0" in read or "g_loss" in read or "fool" in read or "judge(self.cards), 1.0" in read  # of the generator's loss
    assert found.fixes[0].patch is not None, found.fixes[0]
    assert not said(tmp_path, applied(source, found.fixes[0].patch))


APART = """
enc, dec, cls = nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(3, 1)
opts = [torch.optim.SGD(m.parameters(), 0.1) for m in (enc, dec, cls)]
for _ in range(12):
    x = torch.randn(8, 4)
    h = enc(x)
    code = h.detach()
    for opt in opts:
        opt.zero_grad()
    (dec(code) - x).pow(2).mean().backward()
    (cls(code) - 1).pow(2).mean().backward()
    for opt in opts:
        opt.step()
"""


def test_where_no_optimizer_steps_between_the_losses_the_cut_stays_the_culprit_and_is_not_taken_away(tmp_path: Path) -> None:
    found = _about(said(tmp_path, APART), "GG606")
    assert found.culprit is not None and found.culprit.text == "h.detach()"
    assert found.fixes[0].patch is None and found.fixes[0].safety == "manual" and "`h`" in found.fixes[0].title


@pytest.mark.parametrize("which", ["two names", "generator first", "in methods"])
def test_a_loss_that_reads_the_value_with_its_graph_is_sound(tmp_path: Path, which: str) -> None:
    right = {
        "two names": TWO_NAMES.replace("bce(D(fixed), 1.0)", "bce(D(fake), 1.0)"),
        "generator first": GENERATOR_FIRST.replace("bce(D(y), 1.0)", "bce(D(x), 1.0)"),
        "in methods": IN_METHODS.replace("bce(self.judge(self.cards), 1.0)", "bce(self.judge(self.raw), 1.0)"),
    }
    assert not said(tmp_path, NETS + right[which])


def test_a_value_that_one_loss_reads_is_given_its_path_where_it_is_cut(tmp_path: Path) -> None:
    alone = TWO_NAMES.replace(" + bce(D(fixed), 0.0)", "")
    found = _about(said(tmp_path, NETS + alone), "GG606")
    assert found.culprit is not None and found.culprit.text == "fake.detach()"


def _about(found: list[Diagnosis], code: str) -> Diagnosis:
    assert [diagnosis.code for diagnosis in found] == [code], [diagnosis.headline for diagnosis in found]
    return found[0]
