"""A Parameter made of computed values in forward: what made them never trains (GG605), and the line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, only, run_source, said

MAKER = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Linear(2, 12)
        self.out = nn.Linear(4, 1)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x, code):
        weight = nn.Parameter(self.make(code).view(4, 3))
        return self.out(torch.tanh(F.linear(x, weight))) + self.shift

layer = Layer()
opt = torch.optim.SGD(layer.parameters(), lr=0.01)
for it in range(40):
    loss = layer(torch.randn(5, 3), torch.randn(2)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
WRAPPED = "nn.Parameter(self.make(code).view(4, 3))"


@pytest.mark.parametrize(
    "written",
    [
        WRAPPED,
        "nn.Parameter(torch.reshape(self.make(code), (4, 3)))",
        "nn.Parameter(self.make(code).reshape(4, -1), requires_grad=True)",
    ],
)
def test_the_wrapper_is_named(tmp_path: Path, written: str) -> None:
    found = only(tmp_path, MAKER.replace(WRAPPED, written), "GG605", f"weight = {written}")
    assert "`layer.make`" in found.headline and "a Parameter is made anew" in found.headline
    assert "without `Parameter(...)`" in found.fixes[0].title


def test_one_that_is_kept_as_an_attribute_is_named_too(tmp_path: Path) -> None:
    source = MAKER.replace("        weight = nn", "        self.weight = nn").replace("(x, weight)", "(x, self.weight)")
    found = only(tmp_path, source, "GG605", f"self.weight = {WRAPPED}")
    assert "functional_call" in found.fixes[0].title


def test_of_two_wrappers_none_is_blamed(tmp_path: Path) -> None:
    other = "\n    def other(self, x):\n        return nn.Parameter(x)\n\n    def forward"
    found = said(tmp_path, MAKER.replace("\n    def forward", other))
    assert [diagnosis.code for diagnosis in found] == ["GG605"] and found[0].culprit is None


def test_without_a_new_leaf_in_the_loss_no_wrapper_is_blamed(tmp_path: Path) -> None:
    """The wrapper is of another use; what this layer makes is dropped."""
    source = MAKER.replace(f"weight = {WRAPPED}", "self.make(code)\n        weight = torch.ones(4, 3)")
    source = source.replace(
        "\n    def forward", "\n    def export(self, code):\n        return nn.Parameter(self.make(code))\n\n    def forward"
    )
    found = said(tmp_path, source)
    assert [diagnosis.code for diagnosis in found] == ["GG605"] and found[0].culprit is None


@pytest.mark.parametrize(
    "sound",
    [
        "self.make(code).view(4, 3)",
        # an inner loop's fast weight, whose maker is trained beside it
        "nn.Parameter(self.make(code).view(4, 3)) + self.make(code).view(4, 3)",
    ],
)
def test_what_trains_is_silent(tmp_path: Path, sound: str) -> None:
    assert not run_source(tmp_path, HEAD + MAKER.replace(WRAPPED, sound))
