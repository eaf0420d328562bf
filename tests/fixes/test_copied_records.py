"""Deep copies of records that hold computed tensors, and of what holds modules: each is blamed where it is to be mended."""

from __future__ import annotations

from pathlib import Path

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, run_source

RECORD = """
import copy
from dataclasses import dataclass, replace

@dataclass
class Memory:
    h: torch.Tensor
    c: torch.Tensor
    age: int = 0

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 1)

    def forward(self, x, memory):
        memory.h, memory.c = self.cell(x, (memory.h, memory.c))
        return self.head(memory.h)

agent, kept = Agent(), []
memory = Memory(torch.zeros(2, 4), torch.zeros(2, 4))
total = 0.0
for _ in range(3):
    total = total + agent(torch.randn(2, 3), memory).pow(2).mean()
    kept.append({copy})
total.backward()
"""
DETACHED = "copy.deepcopy(replace(memory, h=memory.h.detach(), c=memory.c.detach()))"
KEEPER = """
import copy

class Keeper:
    def __init__(self):
        self.net = nn.Linear(3, 1)
        self.best = None

    def loss(self, x):
        self.best, count = self.net(x).pow(2).mean(), len(x)
        return self.best / count

keeper = Keeper()
keeper.loss(torch.randn(4, 3)).backward()
copy.deepcopy(keeper)
"""


def said(folder: Path, source: str) -> list[Diagnosis]:
    return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source)]


def test_a_copied_record_is_blamed_at_the_copy(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, RECORD.replace("{copy}", "copy.deepcopy(memory)"))[0]
    assert diagnosis.code == "GG410" and diagnosis.confidence == "certain"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "copy.deepcopy(memory)"
    assert "memory.h, memory.c = self.cell(x, (memory.h, memory.c))" in [span.text for span in diagnosis.related]
    assert "memory.h.detach().clone()" in diagnosis.fixes[0].title and diagnosis.fixes[0].patch is None


def test_a_record_of_detached_values_is_copied(tmp_path: Path) -> None:
    assert not said(tmp_path, RECORD.replace("{copy}", DETACHED))


def test_what_holds_a_module_is_blamed_where_it_keeps_the_tensor(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, KEEPER)[0]
    assert diagnosis.code == "GG410"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "self.best, count = self.net(x).pow(2).mean(), len(x)"


def test_a_record_of_one_result_is_blamed_where_it_keeps_the_tensor(tmp_path: Path) -> None:
    source = """
import copy
class Best:
    pass
best, net = Best(), nn.Linear(3, 1)
best.loss = net(torch.randn(4, 3)).pow(2).mean()
best.loss.backward()
copy.deepcopy(best)
"""
    diagnosis = said(tmp_path, source)[0]
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "best.loss = net(torch.randn(4, 3)).pow(2).mean()"
