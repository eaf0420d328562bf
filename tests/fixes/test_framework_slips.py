"""Slips in the use of scalers, of swapped modules, of checkpoints under a framework: what is said, and that sound twins are silent."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from gradguard.diagnosis import Diagnosis
from tests.running import HEAD, run_source


def said(folder: Path, source: str, level: str = "standard") -> list[Diagnosis]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source, level)]


SCALER = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for it in range(4):
    opt.zero_grad()
    scaler.scale(net(torch.randn(8, 4)).pow(2).mean()).backward()
{body}
"""


@pytest.mark.parametrize("level", ["standard", "watch"])
@pytest.mark.parametrize("unscale", ["    scaler.unscale_(opt)\n", ""])
def test_update_that_was_not_reached(tmp_path: Path, level: str, unscale: str) -> None:
    body = unscale + "    scaler.step(opt)\n    if it < 2:\n        continue\n    scaler.update()"
    found = said(tmp_path, SCALER.format(body=body), level)
    assert [diagnosis.code for diagnosis in found] == ["GG722"], found
    assert found[0].culprit is not None and found[0].culprit.text == "scaler.update()"
    assert {"continue", "scaler.step(opt)"} <= {span.text for span in found[0].related}
    assert not found[0].avoid
    assert said(tmp_path, SCALER.format(body=unscale + "    scaler.step(opt)\n    scaler.update()"), level) == []


def test_update_that_is_nowhere(tmp_path: Path) -> None:
    found = said(tmp_path, SCALER.format(body="    scaler.unscale_(opt)\n    scaler.step(opt)"))
    assert [diagnosis.code for diagnosis in found] == ["GG722"]
    assert found[0].culprit is not None and found[0].culprit.text == "scaler.step(opt)"


def test_unscaled_too_late(tmp_path: Path) -> None:
    found = said(tmp_path, SCALER.format(body="    scaler.step(opt)\n    scaler.unscale_(opt)\n    scaler.update()"))
    assert [diagnosis.code for diagnosis in found] == ["GG721"]
    assert "the step has used them already" in found[0].headline


SWAP = """
import copy

class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)

class Swap:
    def __init__(self, module):
        self.average = copy.deepcopy(module.net).requires_grad_(False)

    def before(self, module):
        self.raw = {kept}
        module.net = self.average

    def after(self, module):
        module.net = self.raw

def main():
    model = Lit()
    swap = Swap(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for it in range(30):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 10 == 5:
            swap.before(model)
            with torch.no_grad():
                model.eval()(x)
            swap.after(model)
            model.train()

main()
"""


def test_copy_that_is_put_back_in_place_of_the_trained_module(tmp_path: Path) -> None:
    found = said(tmp_path, SWAP.format(kept="copy.deepcopy(module.net)"))
    assert [diagnosis.code for diagnosis in found] == ["GG604"], [diagnosis.headline for diagnosis in found]
    assert found[0].culprit is not None and found[0].culprit.text == "module.net = self.raw"
    assert "`self.raw = module.net`" in found[0].fixes[0].title
    assert any(span.text == "self.raw = copy.deepcopy(module.net)" for span in found[0].related)
    assert said(tmp_path, SWAP.format(kept="module.net")) == []


REENTRANT = """
from torch.utils.checkpoint import checkpoint

net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
head = nn.Linear(4, 1)
opt = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.01)
for it in range(30):
    opt.zero_grad()
    head(checkpoint(net, torch.randn(8, 4), use_reentrant={how})).pow(2).mean().backward()
    opt.step()
"""


def test_parameters_cut_off_by_a_checkpoint_are_told_of_once(tmp_path: Path) -> None:
    assert {diagnosis.code for diagnosis in said(tmp_path, REENTRANT.format(how=True))} == {"GG711"}
    assert said(tmp_path, REENTRANT.format(how=False)) == []
