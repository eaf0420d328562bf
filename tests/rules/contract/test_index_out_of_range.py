"""GG413: rows and classes that do not exist, however the call is written; what PyTorch accepts is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, said

ATTRIBUTE = """
class Tagger(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.words = nn.Embedding(rows, 4)
        self.out = nn.Linear(4, 3)
    def forward(self, ids):
        return self.out(self.words(ids).mean(1))
net = Tagger(10)
for ids in ([[1, 2]], [[3, {row}]]):
    F.cross_entropy(net(torch.tensor(ids)), torch.tensor([{label}])).backward()
"""
IN_A_LIST = """
tables = nn.ModuleList([nn.Embedding(10, 4), nn.Embedding(3, 4)])
for ids in ([1, 2], [3, {row}]):
    scores = torch.cat([table(torch.tensor([index])) for table, index in zip(tables, (ids[1], 0))]).sum(0, keepdim=True)
    nn.CrossEntropyLoss()(scores[:, :3], torch.tensor([{label}])).backward()
"""
FUNCTIONAL = """
weight = nn.Parameter(torch.randn(10, 4))
def look_up(ids):
    return F.embedding(torch.tensor(ids), weight)
for ids in ([1, 2], [3, {row}]):
    F.nll_loss(torch.log_softmax(look_up(ids).sum(0, keepdim=True)[:, :3], dim=1), torch.tensor([{label}])).backward()
"""
SPELLINGS = pytest.mark.parametrize("source", [ATTRIBUTE, IN_A_LIST, FUNCTIONAL], ids=["attribute", "in a list", "functional"])


@SPELLINGS
@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
def test_a_row_that_the_table_lacks(source: str, level: str, tmp_path: Path) -> None:
    (diagnosis,) = said(tmp_path, source.format(row=10, label=0), level)
    assert diagnosis.code == "GG413" and diagnosis.headline.startswith("Row 10 is asked for") and "10 rows: 0 to 9" in diagnosis.headline
    assert diagnosis.culprit is not None
    assert diagnosis.culprit.text in ("self.words(ids)", "table(torch.tensor([index]))", "F.embedding(torch.tensor(ids), weight)")


@SPELLINGS
def test_a_class_without_a_score(source: str, tmp_path: Path) -> None:
    (diagnosis,) = said(tmp_path, source.format(row=4, label=3))
    assert diagnosis.code == "GG413" and diagnosis.headline == "Class 3 is asked for, and the scores have 3 classes: 0 to 2"
    assert "4 for these targets" in diagnosis.fixes[0].title


@SPELLINGS
def test_the_last_row_and_the_last_class_are_right(source: str, tmp_path: Path) -> None:
    assert said(tmp_path, source.format(row=9, label=2), "strict") == []


def test_the_table_is_made_one_row_larger(tmp_path: Path) -> None:
    source = ATTRIBUTE.format(row=10, label=0)
    (diagnosis,) = said(tmp_path, source)
    assert [span.text for span in diagnosis.related] == ["self.words = nn.Embedding(rows, 4)"]
    patch = diagnosis.fixes[0].patch
    assert patch is not None and "nn.Embedding(rows + 1, 4)" in patch
    assert said(tmp_path, applied(source, patch)) == []


LABELS = """
net = nn.Linear(4, 3)
labels = torch.tensor({labels})
F.cross_entropy(net(torch.randn(3, 4)), labels).backward()
"""


@pytest.mark.parametrize(
    ("labels", "change"), [("[1, 2, 3]", "labels - 1"), ("[-1, 2, 0]", "labels, ignore_index=-1")], ids=["from 1", "-1 for none"]
)
def test_labels_are_brought_into_range(labels: str, change: str, tmp_path: Path) -> None:
    source = LABELS.format(labels=labels)
    (diagnosis,) = said(tmp_path, source)
    patch = diagnosis.fixes[0].patch
    assert patch is not None and change in patch
    assert said(tmp_path, applied(source, patch)) == []


def test_leaving_out_every_element_is_not_advised(tmp_path: Path) -> None:
    (diagnosis,) = said(tmp_path, LABELS.format(labels="[-1, -1, -1]"))
    assert [fix.title for fix in diagnosis.fixes] == ["Bring the targets to 0 to 2"]


def test_what_is_ignored_is_no_class(tmp_path: Path) -> None:
    assert said(tmp_path, LABELS.format(labels="[-100, 2, 0]")) == []
    (diagnosis,) = said(tmp_path, LABELS.format(labels="[-100, 4, 0]"))
    assert "the numbers here run from 0 to 4" in (diagnosis.culprit.label or "") if diagnosis.culprit else False


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("words(ids)", "ids"),
        ("F.embedding(batch['ids'], words.weight)", "batch['ids']"),
        ("words(ids.view(-1))", "ids"),
        ("words(torch.tensor([1, 12]))", None),
    ],
)
def test_the_indices_are_named_where_they_have_a_name(call: str, name: str | None, tmp_path: Path) -> None:
    source = f"words = nn.Embedding(10, 4)\nids = torch.tensor([[1, 12]])\nbatch = {{'ids': ids.clone()}}\n{call}\n"
    (diagnosis,) = said(tmp_path, source)
    assert diagnosis.code == "GG413" and [fact.name for fact in diagnosis.tensors] == ([] if name is None else [name])
