"""GG613, a network that is trained and then overwritten with the one that it follows, however the agent is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, only, said

AGENT = """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.q_target = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.q_target.load_state_dict(self.q.state_dict())
    def loss(self, s, n):
        best = {target}.max(dim=1).values
        return F.mse_loss(self.q(s).max(dim=1).values, 1 + 0.9 * best)

agent = Agent()
opt = torch.optim.Adam({trained}, lr=1e-3)
for step in range(24):
    loss = agent.loss(torch.randn(8, 4), torch.randn(8, 4))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        agent.q_target.load_state_dict(agent.q.state_dict())
"""
BOTH = "agent.parameters()"

FUNCTIONS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.out(torch.tanh(self.body(x)))

def error(now, later):
    return (critic(now) - (0.5 + 0.99 * slow(later))).pow(2).mean()

critic, slow = Net(), Net()
adam = torch.optim.{optimizer}([*critic.parameters(), *slow.parameters()], lr=1e-2)
count = 0
while count < 20:
    adam.zero_grad(set_to_none={none})
    error(torch.randn(8, 4), torch.randn(8, 4)).backward()
    adam.step()
    count += 1
    if not count % 4:
        weights = critic.state_dict()
        slow.load_state_dict(weights)
"""

REPRESENTATIONS = """
def encoder():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleDict({"online": encoder(), "momentum": encoder()})
        self.head = nn.Linear(4, 4)
    def refresh(self):
        self.nets["momentum"].load_state_dict(self.nets["online"].state_dict())
    def forward(self, a, b):
        predicted = self.head(self.nets["online"](a))
        aim = self.nets["momentum"](b)
        return -F.cosine_similarity(predicted, aim).mean()

pair = Pair()
pair.refresh()
optimizer = torch.optim.SGD(pair.parameters(), lr=0.1, momentum=0.9)
for epoch in range(5):
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        pair(x, x + 0.1).backward()
        optimizer.step()
    pair.refresh()
"""


@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
def test_target_network_of_an_agent(level: str, tmp_path: Path) -> None:
    source = AGENT.format(target="self.q_target(n)", trained=BOTH)
    found = only(tmp_path, source, "GG613", "self.q_target(n)", level)
    assert "`agent.q_target` is trained by `opt`" in found.headline
    assert "overwritten with `agent.q`" in found.headline
    assert found.fixes[0].patch is not None
    assert said(tmp_path, applied(source, found.fixes[0].patch), level) == []


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "RMSprop"])
def test_two_networks_in_one_list(optimizer: str, tmp_path: Path) -> None:
    found = only(tmp_path, FUNCTIONS.format(optimizer=optimizer, none=optimizer != "SGD"), "GG613", "slow(later)")
    assert "overwritten with `critic`" in found.headline


def test_momentum_encoder(tmp_path: Path) -> None:
    only(tmp_path, REPRESENTATIONS, "GG613", 'self.nets["momentum"](b)')


@pytest.mark.parametrize(
    "source",
    [
        AGENT.format(target="self.q_target(n).detach()", trained=BOTH),
        AGENT.format(target="torch.no_grad()(self.q_target)(n)", trained=BOTH),
        AGENT.format(target="self.q_target(n)", trained="agent.q.parameters()"),
        FUNCTIONS.format(optimizer="Adam", none=True).replace("if not count % 4:", "if count == 4:"),
        FUNCTIONS.format(optimizer="Adam", none=True).replace("weights = critic.state_dict()", "weights = slow.state_dict()").replace(
            "slow.load_state_dict(weights)", "kept = {k: v.clone() for k, v in weights.items()}; slow.load_state_dict(kept)"
        ),
        REPRESENTATIONS.replace("aim = self", "with torch.no_grad():\n            aim = self"),
    ],
    ids=["detached", "no_grad", "not_in_the_optimizer", "initialised_once", "own_values", "under_no_grad"],
)  # fmt: skip
def test_sound_look_alikes(source: str, tmp_path: Path) -> None:
    assert said(tmp_path, source, "strict") == []


def test_population_of_two(tmp_path: Path) -> None:
    """The worse one is given the better one's weights, and both train on, each with an optimizer of its own."""
    source = """
nets = [nn.Linear(4, 1), nn.Linear(4, 1)]
opts = [torch.optim.SGD(net.parameters(), lr=lr) for net, lr in zip(nets, (0.1, 0.01))]
for generation in range(6):
    scores = []
    for net, opt in zip(nets, opts):
        for _ in range(4):
            opt.zero_grad()
            loss = (net(torch.randn(8, 4)) - 1).pow(2).mean()
            loss.backward()
            opt.step()
        scores.append(loss.item())
    better = scores.index(min(scores))
    nets[1 - better].load_state_dict(nets[better].state_dict())
"""
    assert said(tmp_path, source, "strict") == []
