"""Fixes are tried by running the program with them; what `verified_fixes.py` does for every case, for a few, and what they all rest on."""

from __future__ import annotations

from pathlib import Path

import pytest
import verified_fixes
from case import HERE, load

from gradguard.config.settings import Settings
from gradguard.runtime.trials import trial
from gradguard.runtime.trials.trial import Launch
from gradguard.runtime.trials.verify import Verifier
from tests.trial_programs import found, program


@pytest.fixture(autouse=True)
def in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run", "_PATIENCE"):
        monkeypatch.setattr(trial, name, getattr(trial, name))  # put back in the end
    verified_fixes.use_forks()


@pytest.mark.parametrize(
    "case",
    [
        "protocol/accumulation_without_division",
        "protocol/frozen_stages_only_in_train",
        "protocol/kfold_reuses_optimizer",
        "protocol/multitask_zero_between_losses",
        "protocol/steplr_every_batch",
        "protocol/textcnn_branches_in_list",
        "protocol/validation_in_train_mode",
        "inplace/gru_stack_hidden_slots",
        "contract/gan_integer_labels",
        "numerics/attention_empty_sequence",
        "numerics/srgb_where_gradient",
    ],
)
def test_the_repaired_program_does_as_the_twin(case: str) -> None:
    verdict = verified_fixes.judge(load(HERE / f"{case}.py"), "standard")
    assert (verdict.result, verdict.twin) == ("verified", "alike"), verdict


@pytest.mark.parametrize("case", ["numerics/polynomial_lr_blow_up", "numerics/relu_rnn_no_clipping"])
def test_where_numbers_differ_both_learn(case: str) -> None:
    verdict = verified_fixes.judge(load(HERE / f"{case}.py"), "standard")
    assert (verdict.result, verdict.twin) == ("verified", "both learn"), verdict


TRAIN = """
    import sys
    import torch, torch.nn as nn
    from parts import Net
    torch.manual_seed(0)
    model, state = Net(), torch.zeros(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(12):
        state = torch.tanh(state + 1)
        loss = model(state).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save(model.state_dict(), "last.pt")
        open("log.txt", "a").write(sys.argv[1])
"""
PARTS = """
    import torch, torch.nn as nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = torch.sigmoid(self.layer(x))
            y += 1
            return y
"""


def test_fixes_are_tried_until_one_repairs(tmp_path: Path) -> None:
    program(tmp_path, train=TRAIN, parts=PARTS)
    parts = tmp_path / "parts.py"
    wrong = found("wrong", parts, "y += 1", "y = y.relu_()")
    right = found("right", parts, "y += 1", "y = y + 1")
    diagnosis = wrong.model_copy(update={"fixes": [wrong.fixes[0], right.fixes[0]]})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    verified = Verifier(Launch("train.py", ("x",), folder=str(tmp_path)), Settings(), 60.0).verified(diagnosis)
    assert [(fix.title, fix.verified.verdict) for fix in verified.fixes] == [("right", "verified"), ("wrong", "failed")]
    assert verified.fixes[0].verified.steps >= 6
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


BEHIND = """
    import torch
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    hidden = torch.zeros(3)
    for _ in range(6):
        hidden = torch.tanh(hidden + weight)
        shifted = torch.sigmoid(hidden)
        shifted += 1
        optimizer.zero_grad()
        shifted.sum().backward()
        optimizer.step()
"""


def test_a_fault_behind_the_first_is_followed(tmp_path: Path) -> None:
    program(tmp_path, train=BEHIND)
    diagnosis = found("out of place", tmp_path / "train.py", "shifted += 1", "shifted = shifted + 1")
    verified = Verifier(Launch("train.py", folder=str(tmp_path)), Settings(), 60.0).verified(diagnosis).fixes[0].verified
    assert (verified.verdict, verified.steps, verified.safety) == ("verified", 6, "unsafe")  # the second one detaches
    (behind,) = verified.behind
    assert behind.startswith("GG203")
    assert verified.patch is not None and "+    shifted = shifted + 1" in verified.patch and "detach()" in verified.patch
