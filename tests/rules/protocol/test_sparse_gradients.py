"""GG618: an optimizer refuses the layout of gradients; what asks for it is named, and the first fix repairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, only, said

HEAD = """
from torch.optim import RMSprop
def train(model, opt):
    for _ in range(2):
        i = torch.randint(6, (8,))
        opt.zero_grad()
        model(i).pow(2).mean().backward()
        opt.step()
"""
ATTRIBUTE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(6, 4, sparse=True)
        self.items = nn.Embedding(6, 4)
    def forward(self, i):
        return (self.users(i) * self.items(i)).sum(-1)
model = Net()
train(model, torch.optim.AdamW(model.parameters()))
"""
CONTAINER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(6, 4, mode="sum", sparse=True) for _ in range(3)])
    def forward(self, i):
        return sum(table(i[:, None]) for table in self.tables)
model = Net()
opt = torch.optim.NAdam([{"params": model.parameters(), "lr": 0.1}])
train(model, opt)
"""
FUNCTION = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(6, 4))
    def forward(self, i):
        return F.embedding(i, self.rows, sparse=True)
model = Net()
train(model, RMSprop(model.parameters()))
"""
POSITION = """
table = nn.Embedding(6, 4, None, None, 2.0, False, True)
model = nn.Sequential(table, nn.Linear(4, 1))
train(model, torch.optim.Adamax(model.parameters()))
"""
REFUSED = {
    "attribute": (ATTRIBUTE, "nn.Embedding(6, 4, sparse=True)", "model.users.weight"),
    "container": (CONTAINER, 'nn.EmbeddingBag(6, 4, mode="sum", sparse=True)', "model.tables.0.weight"),
    "function": (FUNCTION, "F.embedding(i, self.rows, sparse=True)", "model.rows"),
    "position": (POSITION, "nn.Embedding(6, 4, None, None, 2.0, False, True)", "model.0.weight"),
}


@pytest.mark.parametrize("level", ["standard", "watch"])
@pytest.mark.parametrize("which", REFUSED)
def test_what_asks_for_sparse_gradients_is_named(tmp_path: Path, which: str, level: str) -> None:
    program, culprit, parameter = REFUSED[which]
    found = only(tmp_path, HEAD + program, "GG618", culprit, level)
    assert f"`{parameter}`" in found.headline and found.confidence == "certain"
    assert found.fixes[0].safety == "safe" and found.fixes[0].patch is not None
    assert not said(tmp_path, applied(HEAD + program, found.fixes[0].patch), level)


def test_a_flag_that_is_handed_on_has_its_call_named_and_no_patch(tmp_path: Path) -> None:
    source = HEAD + ATTRIBUTE.replace("sparse=True", "sparse=big").replace("def __init__(self)", "def __init__(self, big=True)")
    found = only(tmp_path, source, "GG618", "nn.Embedding(6, 4, sparse=big)")
    assert found.fixes[0].patch is None and "SparseAdam([model.users.weight])" in found.fixes[1].title


def test_sparse_adam_with_dense_gradients_becomes_adam(tmp_path: Path) -> None:
    source = HEAD + ATTRIBUTE.replace(", sparse=True", "").replace("AdamW", "SparseAdam")
    found = only(tmp_path, source, "GG618", "torch.optim.SparseAdam(model.parameters())")
    assert found.fixes[0].patch is not None and not said(tmp_path, applied(source, found.fixes[0].patch))


def test_sparse_adam_with_some_dense_gradients_is_to_be_split(tmp_path: Path) -> None:
    found = only(tmp_path, HEAD + ATTRIBUTE.replace("AdamW", "SparseAdam"), "GG618", "torch.optim.SparseAdam(model.parameters())")
    assert "`model.items.weight`" in found.headline and "`model.users.weight`" in found.fixes[0].title and found.fixes[0].patch is None


SOUND = {
    "SGD takes both": ATTRIBUTE.replace("AdamW(model.parameters())", "SGD(model.parameters(), 0.1)"),
    "each its own": CONTAINER.replace(
        'torch.optim.NAdam([{"params": model.parameters(), "lr": 0.1}])', "torch.optim.SparseAdam(model.parameters())"
    ),
    "dense": ATTRIBUTE.replace("sparse=True", "sparse=False"),
}


@pytest.mark.parametrize("which", SOUND)
def test_layouts_that_the_optimizer_takes_are_silent(tmp_path: Path, which: str) -> None:
    assert not said(tmp_path, HEAD + SOUND[which])


def test_the_same_words_from_the_program_itself_are_nobodys_gradient(tmp_path: Path) -> None:
    source = HEAD + ATTRIBUTE.replace(", sparse=True", "") + "raise RuntimeError('my cache does not support sparse gradients')\n"
    with pytest.raises(RuntimeError, match="my cache"):
        said(tmp_path, source)
