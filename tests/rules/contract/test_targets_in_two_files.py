"""GG404: class targets in floats, where the loss stands in another file than the line that makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradguard import gradguard
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError

LOSSES = """
import torch
import torch.nn.functional as F
from torch import nn

class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.criterion = nn.Linear(4, 3), nn.NLLLoss()

    def forward(self, x, labels):
        return self.criterion(self.layer(x).log_softmax(-1), labels)

class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch):
        return F.cross_entropy(self.layer(batch["x"]), batch["label"])
"""
HEAD = """import torch
from dataclasses import dataclass
from torch.utils.data import DataLoader
from float_target_losses import Keyed, Scored
"""
PROGRAMS = {
    "a collate function": """
def collate(items):
    xs = torch.stack([x for x, _ in items])
    ys = torch.tensor([y for _, y in items], dtype=torch.float32)  # <<
    return {"x": xs, "label": ys}
def items():
    return [(torch.randn(4), i % 3) for i in range(32)]
model = Keyed()
for batch in DataLoader(items(), batch_size=8, collate_fn=collate):
    model(batch).backward()
""",
    "a dict that is filled": """
def fetch():
    batch = {}
    batch["x"] = torch.randn(8, 4)
    batch["label"] = (batch["x"].sum(1) > 0).float()  # <<
    return batch
model = Keyed()
for _ in range(3):
    batch = fetch()
    model(batch).backward()
""",
    "a record": """
@dataclass
class Batch:
    inputs: torch.Tensor
    wanted: torch.Tensor
class Source:
    def fetch(self):
        labels = torch.arange(8) % 3
        return Batch(torch.randn(8, 4), labels.float())  # <<
class Trainer:
    def __init__(self):
        self.model = Scored()
    def run(self):
        for _ in range(3):
            self.batch = Source().fetch()
            self.model(self.batch.inputs, self.batch.wanted).backward()
Trainer().run()
""",
    "a generator": """
def batches():
    for _ in range(3):
        x = torch.randn(8, 4)
        y = (x.sum(1) > 0).float()  # <<
        yield x, y
model = Scored()
for inputs, targets in batches():
    model(inputs, labels=targets).backward()
""",
}


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "float_target_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("float_target_losses", None)


def run(folder: Path, source: str) -> Diagnosis:
    path = folder / "program.py"
    path.write_text(HEAD + source)
    with pytest.raises(GradGuardError) as caught, gradguard():
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "float_target_program"})
    return caught.value.diagnosis


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("source", PROGRAMS.values(), ids=PROGRAMS)
def test_the_line_that_makes_the_targets(source: str, tmp_path: Path) -> None:
    diagnosis = run(tmp_path, source)
    line = next(i for i, text in enumerate((HEAD + source).splitlines(), 1) if "# <<" in text)
    assert diagnosis.code == "GG404" and diagnosis.culprit is not None
    assert (Path(diagnosis.culprit.file).name, diagnosis.culprit.line) == ("program.py", line)


@pytest.mark.usefixtures("losses")
def test_an_item_of_a_batch_is_named_by_its_key(tmp_path: Path) -> None:
    assert '`batch["label"]` is float32' in run(tmp_path, PROGRAMS["a dict that is filled"]).headline


@pytest.mark.usefixtures("losses")
def test_which_item_is_not_known(tmp_path: Path) -> None:
    source = PROGRAMS["a collate function"].replace("collate_fn=collate", "collate_fn=lambda items: kinds[0](items)")
    diagnosis = run(tmp_path, source.replace("model = Keyed()", "model, kinds = Keyed(), [collate]"))
    assert diagnosis.culprit is not None and "torch.randn" not in (diagnosis.culprit.text or "")
