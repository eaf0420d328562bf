"""Class weights of another dtype: they are no argument of the failing call, and the line that made them is named all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, only, run_source

CLASSES = """
import numpy as np

def weights(labels):
    counts = np.bincount(labels)
    return torch.from_numpy(1.0 / counts)

class Model(nn.Module):
    def __init__(self, balance):
        super().__init__()
        self.net = nn.Linear(2, 3)
        self.criterion = nn.CrossEntropyLoss(weight=balance)

    def loss(self, x, y):
        return self.criterion(self.net(x), y)

model = Model(weights(np.array([0, 1, 1, 2])))
model.loss(torch.randn(4, 2), torch.tensor([0, 1, 1, 2])).backward()
"""
PLAIN = """
import numpy as np
net = nn.Linear(2, 3)
balance = torch.tensor(1.0 / np.array([1, 2, 1]))
criterion = nn.CrossEntropyLoss(balance)
criterion(net(torch.randn(4, 2)), torch.tensor([0, 1, 1, 2])).backward()
"""


def test_what_a_constructor_was_given_is_followed_to_its_making(tmp_path: Path) -> None:
    found = only(tmp_path, CLASSES, "GG404", "torch.from_numpy(1.0 / counts)")
    assert found.headline.startswith("`self.criterion.weight` is float64")
    patch = found.fixes[0].patch
    assert patch is not None and not run_source(tmp_path, applied(HEAD + CLASSES, patch))


def test_a_loss_of_the_file_is_looked_at_too(tmp_path: Path) -> None:
    found = only(tmp_path, PLAIN, "GG404", "torch.tensor(1.0 / np.array([1, 2, 1]))")
    assert found.headline.startswith("`criterion.weight` is float64")


def test_of_two_callers_none_is_followed(tmp_path: Path) -> None:
    source = CLASSES.replace("\nmodel = ", "\nother = Model(torch.ones(3))\nmodel = ")
    found = only(tmp_path, source, "GG404", "balance")
    assert found.culprit is not None and found.culprit.function == "Model.__init__"


def test_a_wrong_argument_goes_before_what_is_held(tmp_path: Path) -> None:
    source = PLAIN.replace("torch.tensor(1.0 / np.array([1, 2, 1]))", "torch.ones(3)").replace(
        "net(torch.randn(4, 2))", "net(torch.randn(4, 2).double())"
    )
    found = only(tmp_path, source, "GG404", "torch.randn(4, 2).double()")
    assert "criterion" not in found.headline


def test_a_modules_own_counter_is_not_blamed(tmp_path: Path) -> None:
    """BatchNorm counts its batches in int64: no one gave it that."""
    source = "norm = nn.BatchNorm1d(3)\nx = torch.ones(4, 3, dtype=torch.int64)\nnorm(x).sum().backward()\n"
    found = only(tmp_path, source, "GG404", "torch.ones(4, 3, dtype=torch.int64)")
    assert "num_batches" not in found.headline


@pytest.mark.parametrize(
    ("source", "written", "sound"),
    [
        (CLASSES, "torch.from_numpy(1.0 / counts)", "torch.from_numpy(1.0 / counts).float()"),
        (PLAIN, "np.array([1, 2, 1])", "np.array([1, 2, 1], dtype=np.float32)"),
        (PLAIN, "net(torch.randn(4, 2))", "net(torch.randn(4, 2)).double()"),
    ],
)
def test_one_dtype_is_silent(tmp_path: Path, source: str, written: str, sound: str) -> None:
    assert written in source
    assert not run_source(tmp_path, HEAD + source.replace(written, sound))
