"""GG414: an optimizer that gets no parameters, or one in two groups."""

from __future__ import annotations

from typing import Any

import pytest

from tests.running import applied, run_source

HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = BLOCKS

    def forward(self, x):
        return x

net = Net()
"""
LAYERS = ["[nn.Linear(8, 8) for _ in range(3)]", "[nn.Linear(8, 8), nn.ReLU()]", "{'a': nn.Linear(8, 8)}", "(nn.Linear(8, 8),)"]
MADE = [
    "optimizer = torch.optim.Adam(net.parameters())",
    "params = list(net.parameters())\noptimizer = torch.optim.SGD(params, lr=0.1)",
    "def make(model, kind=torch.optim.SGD):\n    return kind(params=[p for p in model.parameters() if p.requires_grad], lr=0.1)\nmake(net)",
]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("layers", LAYERS)
def test_layers_in_a_plain_container(tmp_path: Any, layers: str, made: str) -> None:
    source = HEAD.replace("BLOCKS", layers) + made
    ((diagnosis, _),) = run_source(tmp_path, source)
    assert diagnosis.code == "GG414" and "`self.blocks`" in diagnosis.headline and diagnosis.confidence == "certain"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == f"self.blocks = {layers}"
    patch = diagnosis.fixes[0].patch
    assert patch is not None and run_source(tmp_path, applied(source, patch)) == []


@pytest.mark.parametrize(
    ("before", "read"),
    [
        ("params = net.parameters()\nprint(sum(p.numel() for p in params))", "params"),
        ("weights = (p for p in net.parameters() if p.dim() > 1)\nfor w in weights:\n    nn.init.zeros_(w)", "weights"),
        ("todo = filter(lambda p: p.requires_grad, net.parameters())\ncount = len(list(todo))", "todo"),
    ],
)
def test_an_iterator_that_was_walked(tmp_path: Any, before: str, read: str) -> None:
    source = f"import torch\nfrom torch import nn\nnet = nn.Linear(4, 2)\n{before}\noptimizer = torch.optim.SGD({read}, lr=0.1)\n"
    ((diagnosis, _),) = run_source(tmp_path, source)
    assert diagnosis.code == "GG414" and f"`{read}` is an iterator" in diagnosis.headline
    assert diagnosis.culprit is not None and (diagnosis.culprit.line, diagnosis.culprit.text) == (5, read)
    patch = diagnosis.fixes[0].patch
    assert patch is not None and run_source(tmp_path, applied(source, patch)) == []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            "net.requires_grad_(False)\ntorch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)",
            "all 2 of `net` are frozen",
        ),
        ("act = nn.ReLU()\ntorch.optim.SGD(act.parameters(), lr=0.1)", "`act` (ReLU) has none"),
    ],
)
def test_where_no_line_is_wrong_by_itself_none_is_blamed(tmp_path: Any, made: str, said: str) -> None:
    ((diagnosis, _),) = run_source(tmp_path, f"import torch\nfrom torch import nn\nnet = nn.Linear(4, 2)\n{made}\n")
    assert diagnosis.code == "GG414" and said in diagnosis.headline
    assert diagnosis.culprit is None and "torch.optim.SGD" in diagnosis.related[0].text


TIED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.emb.weight

net = Net()
"""


@pytest.mark.parametrize(
    "made",
    [
        "torch.optim.SGD([{'params': net.emb.parameters()}, {'params': net.out.parameters(), 'lr': 1.0}], lr=0.1)",
        "groups = [dict(params=list(m.parameters())) for m in (net.emb, net.out)]\ntorch.optim.Adam(groups)",
        "opt = torch.optim.Adam(net.emb.parameters())\nopt.add_param_group({'params': [net.out.weight]})",
    ],
)
def test_tied_weights_in_two_groups(tmp_path: Any, made: str) -> None:
    ((diagnosis, _),) = run_source(tmp_path, TIED + made)
    assert diagnosis.code == "GG414"
    assert "`net.emb.weight` = `net.out.weight` is in two parameter groups" in diagnosis.headline
    assert "the first group and the second one" in diagnosis.headline and "tied weights" in diagnosis.explanation
    assert diagnosis.culprit is not None and diagnosis.culprit.line >= 12


def test_what_an_optimizer_takes_is_silent(tmp_path: Any) -> None:
    source = (
        HEAD.replace("BLOCKS", "nn.ModuleList([nn.Linear(8, 8)])") + MADE[1] + "\noptimizer.add_param_group({'params': [torch.ones(1)]})"
    )
    assert run_source(tmp_path, source) == []
