"""One backward() in a loop over a tensor made before it: nothing else trains what is behind, so that no `.detach()` is the repair."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.rules.lifetime.gg202_graph_freed_shared_subgraph import turns
from tests.running import HEAD, only, run_source


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' files are modules of this process too, and have backward calls of their own: a program is a file here.

    Where tests run in several processes, the outermost frame of each is code that no file has; it calls no backward either.
    """
    load = turns.load
    monkeypatch.setattr(turns, "loaded_files", lambda: ())
    monkeypatch.setattr(turns, "load", lambda file: load(file) or load(__file__))


PARTS = """
tower, head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)
opt_t, opt_h = torch.optim.SGD(tower.parameters(), lr=0.1), torch.optim.Adam(head.parameters())

def learn(x):
    opt_t.zero_grad()
    opt_h.zero_grad()
    z = tower(x)
    for part in z.split(4):
        loss = head(part).pow(2).mean()
        loss.backward()
    opt_t.step()
    opt_h.step()

for it in range(3):
    learn(torch.randn(8, 3))
"""
LOSSES = """
tower, heads = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
opt_t, opt_h = torch.optim.SGD(tower.parameters(), lr=0.1), torch.optim.Adam(heads.parameters())
for it in range(3):
    opt_t.zero_grad()
    opt_h.zero_grad()
    z = tower(torch.randn(8, 3))
    losses = {i: head(z).pow(2).mean() for i, head in enumerate(heads)}
    for loss in losses.values():
        loss.backward()
    opt_t.step()
    opt_h.step()
"""


def test_parts_of_one_batch_are_not_to_be_detached(tmp_path: Path) -> None:
    found = only(tmp_path, PARTS, "GG202", "loss.backward()")
    assert "the loss of each turn goes through the graph of `z`" in found.headline
    assert not any("detach" in fix.title for fix in found.fixes) and "detach" in found.avoid[0]
    assert "compute `z` in each turn" in found.fixes[1].title


def test_one_optimizer_for_all_is_told_the_same(tmp_path: Path) -> None:
    source = PARTS.replace("tower.parameters()", "[*tower.parameters(), *head.parameters()]").replace("opt_h.step()", "pass")
    found = only(tmp_path, source.replace("opt_h.zero_grad()", "pass"), "GG202", "loss.backward()")
    assert "each turn" in found.headline and not any("detach" in fix.title for fix in found.fixes)


def test_losses_that_are_there_already_are_added_up(tmp_path: Path) -> None:
    found = only(tmp_path, LOSSES, "GG202", "loss.backward()")
    assert "add the losses up" in found.fixes[0].title
    assert not any("detach" in fix.title or "in each turn" in fix.title for fix in found.fixes)


def test_a_backward_in_a_helper_is_told_at_its_call(tmp_path: Path) -> None:
    source = PARTS.replace("def learn", "def back(loss):\n    loss.backward()\n\ndef learn").replace(
        "        loss.backward()", "        back(loss)"
    )
    found = only(tmp_path, source, "GG202", "back(loss)")
    assert "each turn" in found.headline


CRITICS = """
maker, critics = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
opt_m, opt_c = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.Adam(critics.parameters())
for it in range(3):
    made = maker(torch.randn(8, 3))
    opt_c.zero_grad()
    for critic in critics:
        loss = critic(made).mean() - critic(torch.randn(8, 4)).mean()
        loss.backward()
    opt_c.step()
    opt_m.zero_grad()
    (-sum(critic(made).mean() for critic in critics)).backward()
    opt_m.step()
"""


def test_a_maker_with_a_loss_of_its_own_is_still_to_be_detached(tmp_path: Path) -> None:
    found = only(tmp_path, CRITICS, "GG202", "loss = critic(made).mean() - critic(torch.randn(8, 4)).mean()")
    assert "`made.detach()`" in found.fixes[0].title


def test_a_helper_that_serves_another_loss_as_well_is_no_only_call(tmp_path: Path) -> None:
    source = CRITICS.replace("for it in", "def back(loss):\n    loss.backward()\n\nfor it in", 1)
    source = source.replace("        loss.backward()\n    opt_c", "        back(loss)\n    opt_c")
    source = source.replace("(-sum(critic(made).mean() for critic in critics)).backward()", "back(-sum(c(made).mean() for c in critics))")
    found = only(tmp_path, source, "GG202", "loss = critic(made).mean() - critic(torch.randn(8, 4)).mean()")
    assert "`made.detach()`" in found.fixes[0].title


@pytest.mark.parametrize(
    ("source", "written", "sound"),
    [
        (PARTS, "loss.backward()", "loss.backward(retain_graph=True)"),
        (PARTS, "    for part in z.split(4):\n        loss = head(part)", "    for part in x.split(4):\n        loss = head(tower(part))"),
        (LOSSES, "    for loss in losses.values():\n        loss.backward()", "    sum(losses.values()).backward()"),
        (CRITICS, "loss = critic(made)", "loss = critic(made.detach())"),
    ],
)
def test_what_was_advised_is_silent(tmp_path: Path, source: str, written: str, sound: str) -> None:
    assert written in source and not run_source(tmp_path, HEAD + source.replace(written, sound))
