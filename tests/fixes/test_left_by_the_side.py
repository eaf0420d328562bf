"""Values that leave the graph in less common ways, what is said of them, and sound twins that are silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, only, run_source, said

NUMBERS = """
net = nn.Linear(4, 1)

def parts(x):
    out = net(x)
    return {{"fit": out.pow(2).mean(){how}, "size": out.abs().mean(){how}}}

opt = torch.optim.SGD(net.parameters(), lr=0.1)
total = sum(0.5 * v for v in parts(torch.randn(8, 4)).values())
opt.zero_grad()
total.backward()
opt.step()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_backward_of_a_number(tmp_path: Path, level: str) -> None:
    found = said(tmp_path, NUMBERS.format(how=".item()"), level)
    assert [diagnosis.code for diagnosis in found] == ["GG302"]
    assert "`total` is a plain `float`" in found[0].headline
    assert said(tmp_path, NUMBERS.format(how=""), level) == []


def test_backward_of_a_number_that_left_in_one_place(tmp_path: Path) -> None:
    source = "net = nn.Linear(4, 1)\ndef loss_of(x):\n    return net(x).pow(2).mean().item()\nvalue = loss_of(torch.randn(2, 4))\n"
    only(tmp_path, source + "value.backward()\n", "GG302", "net(x).pow(2).mean().item()")


def test_attribute_error_of_something_else(tmp_path: Path) -> None:
    source = HEAD + "class Engine:\n    pass\nEngine().backward()\n"
    with pytest.raises(AttributeError) as caught:
        run_source(tmp_path, source)
    assert "GG" not in str(caught.value)


RANKS = """
net = nn.Linear(4, 1)

def rank(values):
    order = values.argsort(dim=-1)
    ranks = torch.zeros_like(values)
    ranks.scatter_(-1, order, torch.arange(values.size(-1), dtype=values.dtype).expand_as(values))
    return ranks

loss = rank(net(torch.randn(3, 5, 4)).squeeze(-1)).pow(2).mean()
loss.backward()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_indices_alone_and_a_shape_taken_from_a_live_tensor(tmp_path: Path, level: str) -> None:
    only(tmp_path, RANKS, "GG304", "values.argsort(dim=-1)", level)


def test_state_dict_is_replaced_not_dropped(tmp_path: Path) -> None:
    source = """
from torch.func import functional_call
net = nn.Linear(4, 1)
weights = {how}
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    functional_call(net, weights, (torch.randn(2, 4),)).pow(2).mean().backward()
    opt.step()
"""
    found = only(tmp_path, source.format(how="net.state_dict()"), "GG302", "net.state_dict()")
    assert "named_parameters()" in found.fixes[0].title and "keep_vars=True" in found.fixes[0].title
    assert said(tmp_path, source.format(how="net.state_dict(keep_vars=True)")) == []


BALANCE = """
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.lin = nn.Linear(4, 3), nn.Linear(4, 4)
        self.balance = None

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        self.balance = gates.mean(0).pow(2).sum()
        return x + self.lin(x) * gates.amax(-1, keepdim=True)

stem, block = nn.Linear(4, 4), Block()
opt = torch.optim.SGD([*stem.parameters(), *block.parameters()], lr=0.1)
for _ in range(4):
    y = checkpoint(block, stem(torch.randn(8, 4)), use_reentrant={how})
    loss = y.pow(2).mean() + 0.1 * block.balance
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_value_left_by_the_first_run_of_a_reentrant_checkpoint(tmp_path: Path) -> None:
    found = said(tmp_path, BALANCE.format(how=True))
    assert [diagnosis.code for diagnosis in found] == ["GG308"], found
    assert found[0].culprit is not None and (found[0].culprit.text or "").startswith("checkpoint(block")
    assert "use_reentrant=False" in found[0].fixes[0].title and "reentrant checkpoint" in found[0].headline
    assert said(tmp_path, BALANCE.format(how=False)) == []


PART = """
import math

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.tensor(0.7))
        self.token = nn.Parameter(torch.zeros(6))
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        h = self.lin(x)
{body}

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for it in range(30):
    opt.zero_grad()
    loss = net(torch.randn(8, 6)).pow(2).mean()
    loss.backward()
    opt.step()
    if it % 5 == 0:
        print(f"{{it}} {{net.extra.item():.3f}}", file=open("/dev/null", "w"))
"""
_MASK = "mask = x[:, 0] > 0"


@pytest.mark.parametrize(
    ("body", "culprit"),
    [
        (["width = math.exp(self.extra)", "return h / width + 0 * self.token"], "math.exp(self.extra)"),
        (["k = int(self.extra * 4)", "return h[:, :k] + 0 * self.token[:k]"], "int(self.extra * 4)"),
        ([_MASK, "with torch.no_grad():", "    h[mask] = self.token", "return h * self.extra"], "torch.no_grad()"),
        (["return h / self.extra.exp() + self.token"], None),
        ([_MASK, "h[mask] = self.token", "return h * self.extra"], None),
    ],
)
def test_parameter_that_only_leaves_as_a_number_or_is_written_in_without_grad(tmp_path: Path, body: list[str], culprit: str | None) -> None:
    source = PART.format(body="\n".join("        " + line for line in body))
    if culprit is None:
        assert said(tmp_path, source) == []
        return
    found = only(tmp_path, source, "GG605", culprit)
    assert found.confidence == "likely"
    if "math" in culprit:
        assert found.fixes[0].title.startswith("Use `torch.exp(self.extra)`")


def test_a_number_that_is_only_logged_is_no_culprit(tmp_path: Path) -> None:
    found = said(tmp_path, PART.format(body="        return h.detach() + 0 * self.lin.weight.sum() + self.token"))
    assert [(diagnosis.code, diagnosis.culprit) for diagnosis in found if "extra" in diagnosis.headline] in ([], [("GG605", None)])


SPELT = """
net = nn.Linear(4, 1)
x = torch.randn(3, 4)
x.{name} = True
torch.autograd.grad(net(x).sum(), x)
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_misspelt_switch(tmp_path: Path, level: str) -> None:
    found = only(tmp_path, SPELT.format(name="require_grad"), "GG309", "x.require_grad = True", level)
    patch = found.fixes[0].patch
    assert patch is not None and "+x.requires_grad = True" in patch
    assert said(tmp_path, SPELT.format(name="requires_grad"), level) == []
    other = said(tmp_path, SPELT.format(name="note"), level)
    assert [diagnosis.code for diagnosis in other] == ["GG309"] and "switch" not in other[0].headline
