"""Sums of losses: one that gathers several between two backward calls is to begin anew, one that should not be a sum is not."""

from __future__ import annotations

from pathlib import Path

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source

WINDOW = """
class Engine:
    def __init__(self, net, every):
        self.net, self.every, self.count, self.gathered = net, every, 0, 0.0
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def feed(self, x):
        self.gathered += self.net(x).pow(2).mean()
        self.count += 1
        if self.count % self.every == 0:
            self.flush()

    def flush(self):
        mean = self.gathered / self.every
        mean.backward()
        self.opt.step()
        self.opt.zero_grad(){more}

engine = Engine(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), {every})
for _ in range(9):
    engine.feed(torch.randn(8, 4))
"""


def said(folder: Path, source: str) -> list[Diagnosis]:
    return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source)]


def test_a_window_of_losses_is_to_begin_anew(tmp_path: Path) -> None:
    source = WINDOW.replace("{every}", "3").replace("{more}", "")
    diagnosis = said(tmp_path, source)[0]
    assert diagnosis.code == "GG204"
    patch = diagnosis.fixes[0].patch
    assert patch is not None and "self.gathered = 0.0" in patch
    assert said(tmp_path, applied(HEAD + source, patch).removeprefix(HEAD)) == []


def test_a_sum_with_one_loss_a_step_is_not_to_begin_anew(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, WINDOW.replace("{every}", "1").replace("{more}", ""))[0]
    assert diagnosis.code == "GG204"
    assert "own loss" in diagnosis.fixes[0].title and not any("new sum" in fix.title for fix in diagnosis.fixes)


def test_a_window_that_begins_anew_is_sound(tmp_path: Path) -> None:
    assert said(tmp_path, WINDOW.replace("{every}", "3").replace("{more}", "\n        self.gathered = 0.0")) == []
