"""Losses that are all computed before the first update: parameters of several networks are told apart."""

from __future__ import annotations

from pathlib import Path

from tests.running import HEAD, run_source

ALL_FIRST = """
nets = {name: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for name in ("p", "a", "b")}
opts = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
x = torch.randn(8, 3)

def update(name, loss):
    opts[name].zero_grad()
    loss.backward()
    opts[name].step()

losses = {name: nets[name](x).pow(2).mean() for name in ("a", "b")}
{order}
"""
AGAINST = "(nets['a'](x + nets['p'](x)) + nets['b'](x + nets['p'](x))).mean()"
EARLY = f"losses['p'] = {AGAINST}\nfor name, loss in losses.items():\n    update(name, loss)"
LATE = f"for name, loss in losses.items():\n    update(name, loss)\nupdate('p', {AGAINST})"


def test_parameters_of_several_networks_have_their_whole_names(tmp_path: Path) -> None:
    diagnosis = run_source(tmp_path, HEAD + ALL_FIRST.replace("{order}", EARLY))[0][0]
    assert diagnosis.code == "GG102"
    note = next(note for note in diagnosis.notes if "parameters" in note)
    assert "nets['a'].0.weight" in note and "nets['b'].0.weight" in note and "same update" not in note


def test_losses_computed_after_the_updates_are_sound(tmp_path: Path) -> None:
    assert run_source(tmp_path, HEAD + ALL_FIRST.replace("{order}", LATE)) == []
