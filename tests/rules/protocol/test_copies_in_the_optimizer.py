"""A copy of what trains may stand in the optimizer and never get a gradient: a target network; a module of its own may not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gradguard.analysis.live.copied_weights import is_copied
from tests.running import run_source

AGENT = """
import copy
import torch
from torch import nn

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
        self.other = MADE

    def bootstrap(self, x):
        with torch.no_grad():
            return self.other(x).max(1).values

agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
for step in range(30):
    x = torch.randn(16, 6)
    loss = (agent.online(x)[:, 0] - 0.9 * agent.bootstrap(x)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
NEW = "nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))"


@pytest.mark.parametrize("made", ["copy.deepcopy(self.online)", f"{NEW}; self.other.load_state_dict(self.online.state_dict())"])
def test_a_copy_is_silent(tmp_path: Any, made: str, recwarn: pytest.WarningsRecorder) -> None:
    assert run_source(tmp_path, AGENT.replace("MADE", made)) == []


def test_a_module_of_its_own_is_told(tmp_path: Any, recwarn: pytest.WarningsRecorder) -> None:
    ((diagnosis, _),) = run_source(tmp_path, AGENT.replace("MADE", NEW))
    assert diagnosis.code == "GG605" and "`agent.other`" in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "torch.no_grad()"


def test_a_trained_copy_is_known_by_its_values() -> None:
    torch.manual_seed(0)
    net, apart = nn.Linear(12, 12), nn.Linear(12, 12)
    twin = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        (net(torch.randn(8, 12)) - 1).pow(2).mean().backward()
        optimizer.step()
    others = [apart.weight, net.weight]
    assert is_copied(twin.weight, others)
    assert not is_copied(twin.weight, [apart.weight])
    assert not is_copied(twin.weight, [twin.weight])
    assert not is_copied(twin.bias, [net.bias])  # a vector
    assert not is_copied(torch.ones(12, 12), [torch.ones(12, 12)])  # constants say nothing
