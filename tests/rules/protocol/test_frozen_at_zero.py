"""GG605: new layers that begin with zero, and that a freeze of the rest has frozen too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import only, said

MODEL = """
import copy
class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mid, self.head = Adapted(nn.Linear(4, 8)), Adapted(nn.Linear(8, 8)), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(torch.relu(self.mid(torch.relu(self.enc(x)))))
net = Net()
"""
TRAIN = """
opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
for step in range(24):
    loss = net(torch.randn(16, 4)).pow(2).mean() {more}
    opt.zero_grad()
    loss.backward()
    opt.step()
    {after}
"""
LOOP = """
for name, p in net.named_parameters():
    if {test}:
        p.requires_grad = False
"""
HELPER = """
def keep_only(model, parts):
    for p in [p for n, p in model.named_parameters() if not n.startswith(parts)]:
        p.requires_grad_(False)
keep_only(net, ("head", "lora"))
"""
MODULES = """
for module in net.modules():
    if not isinstance(module, nn.Bilinear) and module is not net.head:
        [q.requires_grad_(False) for q in module.parameters(recurse=False)]
"""
COPY = """
frozen = copy.deepcopy(net)
for p in frozen.parameters():
    p.requires_grad_(False)
"""


def program(freeze: str, more: str = "", after: str = "") -> str:
    return MODEL + freeze + TRAIN.format(more=more, after=after)


@pytest.mark.parametrize(
    ("freeze", "culprit"),
    [
        (LOOP.format(test="'lora_' not in name and 'head' not in name"), "p.requires_grad = False"),
        (HELPER, "p.requires_grad_(False)"),
        (MODULES, "[q.requires_grad_(False) for q in module.parameters(recurse=False)]"),
    ],
)
def test_a_filter_that_does_not_match_the_new_layers(freeze: str, culprit: str, tmp_path: Path) -> None:
    diagnosis = only(tmp_path, program(freeze), "GG605", culprit)
    assert "`net.enc.up`" in diagnosis.headline and "`net.mid.up`" in diagnosis.headline
    assert "base" not in diagnosis.headline and diagnosis.confidence == "likely"


def test_frozen_at_zero_and_nevertheless_given_to_the_optimizer(tmp_path: Path) -> None:
    source = program(LOOP.format(test="'head' not in name")).replace("[p for p in net.parameters() if p.requires_grad]", "net.parameters()")
    diagnosis = only(tmp_path, source, "GG605", "p.requires_grad = False")
    assert any(span.label == "has them, and can't change them" for span in diagnosis.related)


@pytest.mark.parametrize(
    "source",
    [
        program(LOOP.format(test="'up' not in name and 'down' not in name")),
        program(LOOP.format(test="name.startswith('enc')"), after="if step == 18: net.enc.up.requires_grad_(True)").replace(
            "[p for p in net.parameters() if p.requires_grad]", "net.parameters()"
        ),
        program(COPY, more="+ 0 * frozen(torch.ones(2, 4)).sum()"),  # a frozen copy of what is trained
        program("nn.init.ones_(net.enc.up), nn.init.ones_(net.mid.up)\n" + LOOP.format(test="'head' not in name")),
        program("net.start = nn.Parameter(torch.zeros(1, 1)).requires_grad_(False)\n", more="+ net.start.sum()"),
    ],
    ids=["matched", "a later stage", "a copy", "not zero", "a constant"],
)
def test_sound_freezes(source: str, tmp_path: Path) -> None:
    assert said(tmp_path, source) == []
