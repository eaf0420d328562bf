"""A diagnosis below a notebook's cell, with the real IPython: the user's frames alone, and cells by their number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("IPython")

SETUP = """
import torch
from torch import nn
from gradguard import gradguard
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
"""
FORWARD = """def forward(x):
    h = net(x)
    h += 1
    return h.pow(2).mean()
"""
STEP = """with gradguard():
    loss = forward(torch.randn(3, 4))
    loss.backward()
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("NO_COLOR", "1")
    shell = InteractiveShell.instance()
    shell.run_line_magic("colors", "nocolor")
    yield shell
    InteractiveShell.clear_instance()


def test_a_failing_cell_shows_the_diagnosis_and_no_frame_of_torchs(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for cell in (SETUP, FORWARD, STEP):
        shell.run_cell(cell, store_history=True)
    said = capsys.readouterr().out
    assert "culprit: Cell In[2]:3:5 in forward" in said
    assert said.index('File "Cell In[3]", line 3') < said.index("error[GG101]")
    assert "autograd/__init__.py" not in said and "direct cause" not in said
    assert "fix:    Make a new tensor instead: `h = h + 1` (safe)" in said


def test_other_errors_are_shown_as_ipython_shows_them(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for cell in (SETUP, "with gradguard():\n    raise RuntimeError('mine')"):
        shell.run_cell(cell, store_history=True)
    said = capsys.readouterr().out
    assert "RuntimeError: mine" in said and "GG" not in said
