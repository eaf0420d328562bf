"""A value that no optimizer trains anything behind of is a constant of the losses; one that something is trained behind of is not."""

from __future__ import annotations

from pathlib import Path

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, run_source

TWINS = """
class Agent:
    def __init__(self):
        self.critics = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2)]
        self.slow = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.opts = [torch.optim.SGD(critic.parameters(), lr=0.1) for critic in self.critics]
{more}
    def aim(self, x):
        return 0.9 * self.slow(x){cut}

    def learn(self, x):
        aim = self.aim(x + 1)
        for critic, opt in zip(self.critics, self.opts):
            loss = F.mse_loss(critic(x), aim)
            opt.zero_grad()
            loss.backward()
            opt.step()

agent = Agent()
for _ in range(2):
    agent.learn(torch.randn(8, 3))
"""
NO_GRAD = "compute `aim` under `torch.no_grad()`"


def said(folder: Path, cut: str, more: str = "") -> list[Diagnosis]:
    return [diagnosis for diagnosis, _ in run_source(folder, HEAD + TWINS.replace("{cut}", cut).replace("{more}", more))]


def test_what_no_optimizer_trains_is_to_be_computed_without_grad(tmp_path: Path) -> None:
    assert said(tmp_path, "")[0].fixes[0].title.startswith(NO_GRAD)
    assert said(tmp_path, ".detach()") == []


def test_what_an_optimizer_trains_is_to_be_computed_anew(tmp_path: Path) -> None:
    more = "        self.slow_opt = torch.optim.SGD(self.slow.parameters(), lr=0.1)\n"
    assert not said(tmp_path, "", more)[0].fixes[0].title.startswith(NO_GRAD)
