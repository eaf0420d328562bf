"""A computed tensor that a helper returns, given to an optimizer: the line in the helper is blamed, traced or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source

MADE = """
def build(n):
    codes = torch.randn(n, 3, requires_grad=True) * 0.1
    return codes, torch.arange(n)

def fit():
    codes, ids = build(4)
    opt = torch.optim.SGD([{"params": [codes], "lr": 0.1}])
    for _ in range(2):
        opt.zero_grad()
        (codes.pow(2).sum(1) * ids).sum().backward()
        opt.step()

fit()
"""


def said(folder: Path, source: str, level: str) -> list[Diagnosis]:
    return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source, level)]


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_the_line_in_the_helper_is_blamed_and_mended(tmp_path: Path, level: str) -> None:
    diagnosis = said(tmp_path, MADE, level)[0]
    assert diagnosis.code == "GG411"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "torch.randn(n, 3, requires_grad=True) * 0.1"
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    assert said(tmp_path, applied(HEAD + MADE, patch).removeprefix(HEAD), level) == []
