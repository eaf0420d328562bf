"""Fields of named tuples and slotted classes are looked at like attributes: the operand of another dtype gets its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source

BATCH = """
import numpy as np
from dataclasses import dataclass
from typing import NamedTuple
{decorator}
class Batch{base}:
    x: torch.Tensor
    gain: torch.Tensor

net = nn.Linear(3, 1)
def learn(batch):
    values = net(batch.x).squeeze(-1)
    loss = F.huber_loss(values, batch.gain)
    loss.backward()

gains = torch.from_numpy(np.linspace(0.0, 1.0, 8)){cast}
learn(Batch(torch.randn(8, 3), gains))
"""
KINDS = [("", "(NamedTuple)"), ("@dataclass(slots=True)", ""), ("@dataclass", "")]


def said(folder: Path, source: str) -> list[Diagnosis]:
    return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source)]


@pytest.mark.parametrize(("decorator", "base"), KINDS)
def test_the_field_is_named_and_converted(tmp_path: Path, decorator: str, base: str) -> None:
    source = BATCH.replace("{decorator}", decorator).replace("{base}", base)
    diagnosis = said(tmp_path, source.replace("{cast}", ""))[0]
    assert diagnosis.code == "GG404" and diagnosis.headline.startswith("`batch.gain` is float64")
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    assert said(tmp_path, applied(HEAD + source.replace("{cast}", ""), patch).removeprefix(HEAD)) == []
    assert said(tmp_path, source.replace("{cast}", ".float()")) == []
