"""What is said of a program depends on the program alone: not on the clock, nor on what ran before in the process."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import gradguard
from gradguard.instrumentation.journal import current_journal
from gradguard.torch_compat.private_api import storage_key
from tests.running import said
from tests.transparency.helpers import guarding

_PACKAGE = Path(gradguard.__file__).parent
_CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time"}
# They say how long a rank has waited, or end the trial of a fix.
_MEASURING = {
    "core/ranks.py",
    "monitors/rank_exchange.py",
    "monitors/rank_positions.py",
    "probes/collective_ring.py",
    "probes/outliving.py",
    "reporting/terminal/progress.py",
    "runtime/position_signal.py",
    "runtime/rank_watch.py",
    "runtime/trials/observer.py",
    "runtime/trials/trial.py",
    "runtime/trials/verify.py",
}


def test_nothing_hangs_on_the_clock() -> None:
    found = set()
    for path in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.ImportFrom) and node.module == "time" else []
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                names.append(node.attr)
            if _CLOCKS & set(names):
                found.add(path.relative_to(_PACKAGE).as_posix())
    assert found == _MEASURING


def test_writes_are_not_those_of_memory_that_lay_there_before() -> None:
    keys = set()
    with guarding("strict"):
        for _ in range(50):
            tensor = torch.ones(2)
            key = storage_key(tensor)
            assert key is not None and not current_journal().writes_to(key)
            tensor.add_(1)
            assert len(current_journal().writes_to(key)) == 1
            keys.add(key)
    assert len(keys) == 50


@pytest.mark.parametrize("kept", ["", "scaler = torch.amp.GradScaler('cpu'); scaler.scale(torch.ones(1))"])
def test_a_scaler_of_another_training_excuses_no_loss(kept: str, tmp_path: Path) -> None:
    exec(kept, variables := {"torch": torch})
    program = """
net = nn.Linear(2, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for turn in range(2):
    loss = (net(torch.ones(4, 2)) * 0 - turn).log().abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    assert [diagnosis.code for diagnosis in said(tmp_path, program)] == ["GG501"]
    del variables
