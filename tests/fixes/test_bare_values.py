"""Parameters of which only the numbers are used, or only what was computed from them is kept; each with a sound twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, run_source

SCALED = """
import math

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.zeros(()))

    def factor(self):
        return FACTOR

    def forward(self, x):
        return self.factor() * self.net(x)

model = Scaled()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for it in range(30):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

TABLE = """
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.offset = OFFSET

    def forward(self, x):
        self.kept = x + self.offset
        return self.net(self.kept)

model = Table()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for it in range(30):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    "factor, how",
    [
        ("self.scale.exp().item()", ".item()"),
        ("min(torch.exp(self.scale).item(), 50.0)", ".item()"),
        ("math.exp(self.scale)", "math.exp()"),
        ("float(self.scale) + 1", "float()"),
    ],
)
def test_a_parameter_read_as_a_number_is_named(tmp_path: Path, factor: str, how: str) -> None:
    (diagnosis,) = [each for each, _ in run_source(tmp_path, HEAD + SCALED.replace("FACTOR", factor))]
    assert diagnosis.code == "GG605" and diagnosis.culprit is not None
    assert diagnosis.culprit.text in factor and how.strip("().") in diagnosis.culprit.text
    assert "`model.scale`" in diagnosis.headline and how.strip("()") in diagnosis.headline


@pytest.mark.parametrize("factor", ["self.scale.exp().clamp(max=50.0)", "self.scale + 1"])
def test_a_parameter_read_with_its_graph_is_silent(tmp_path: Path, factor: str) -> None:
    assert not run_source(tmp_path, HEAD + SCALED.replace("FACTOR", factor))


@pytest.mark.parametrize("offset", ["nn.Parameter(torch.zeros(4)).unsqueeze(0)", "nn.Parameter(torch.zeros(4)).to(torch.float64).float()"])
def test_what_is_computed_from_a_parameter_is_named(tmp_path: Path, offset: str) -> None:
    (diagnosis,) = [each for each, _ in run_source(tmp_path, HEAD + TABLE.replace("OFFSET", offset))]
    assert diagnosis.code == "GG603" and diagnosis.culprit is not None
    assert diagnosis.culprit.text == f"self.offset = {offset}"
    assert "`offset` of `Table`" in diagnosis.headline and "computed from" in diagnosis.headline


@pytest.mark.parametrize("offset", ["nn.Parameter(torch.zeros(1, 4))", "torch.zeros(1, 4)"])
def test_parameters_and_constants_are_silent(tmp_path: Path, offset: str) -> None:
    assert not run_source(tmp_path, HEAD + TABLE.replace("OFFSET", offset))


def test_what_is_computed_from_somebody_elses_leaf_is_silent(tmp_path: Path) -> None:
    """A latent code that is optimised by hand, and a module that keeps the last thing it made of it."""
    source = HEAD + TABLE.replace("OFFSET", "torch.zeros(1, 4)").replace("torch.randn(8, 4)", "code.tanh()")
    source = source.replace("model = Table()", "model = Table()\ncode = torch.randn(8, 4, requires_grad=True)")
    assert not run_source(tmp_path, source)
