"""Where the bug is pointed at in programs whose obvious place is not the bug, and what is said of it there."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from gradguard.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source


def first(folder: Path, source: str, level: str = "standard") -> Diagnosis:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = run_source(folder, HEAD + source, level)
    assert said, "nothing was said"
    return said[0][0]


LAZY_LOSSES = """
trunk, left, right = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 2), nn.Linear(6, 1)
opt = torch.optim.Adam([*trunk.parameters(), *left.parameters(), *right.parameters()])

def objectives(x):
    shared = trunk(x)
    yield left(shared).pow(2).mean()
    yield right(shared).exp().mean()

for it in range(3):
    opt.zero_grad()
    for part in objectives(torch.randn(4, 5)):
        part.backward()
    opt.step()
"""


@pytest.mark.parametrize("level", ["standard", "watch"])
def test_losses_of_one_turn_share_a_graph_though_one_line_runs_both_backwards(tmp_path: Path, level: str) -> None:
    diagnosis = first(tmp_path, LAZY_LOSSES, level)
    assert diagnosis.code == "GG202"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "part.backward()"


def test_a_value_computed_once_before_the_loop_is_not_one_of_its_turns(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
trunk, head = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 1)
opt = torch.optim.SGD(head.parameters(), lr=0.1)
features = trunk(torch.randn(8, 5))
for it in range(3):
    opt.zero_grad()
    head(features).pow(2).mean().backward()
    opt.step()
""",
    )
    assert diagnosis.code == "GG205"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "features = trunk(torch.randn(8, 5))"


STATE_IN_AN_OBJECT = """
class Slots:
    def __init__(self):
        self.kept = {}

class Player(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 5), nn.Linear(5, 2)
        self.slots = Slots()

    def forward(self, x, side):
        h = self.slots.kept.get(side)
        h = self.cell(x, torch.zeros(4, 5) if h is None else h)
        self.slots.kept[side] = h
        return self.out(h)

player = Player()
opt = torch.optim.SGD(player.parameters(), lr=0.1)
for turn in range(6):
    loss = F.cross_entropy(player(torch.randn(4, 3), turn % 2), torch.zeros(4, dtype=torch.long))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_state_in_an_object_of_a_module_is_blamed_where_it_is_put_there(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, STATE_IN_AN_OBJECT)
    assert diagnosis.code == "GG203"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "self.slots.kept[side] = h"
    assert diagnosis.tensors[0].name == "an item of self.kept"
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    assert run_source(tmp_path, applied(HEAD + STATE_IN_AN_OBJECT, patch)) == []


def test_an_average_is_not_turned_into_a_sum(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
smooth = 0.0
for x in torch.randn(5, 8, 3):
    smooth = 0.8 * smooth + 0.2 * net(x).pow(2).mean()
    opt.zero_grad()
    smooth.backward()
    opt.step()
""",
    )
    assert diagnosis.code == "GG204"
    assert diagnosis.fixes[0].patch is None
    assert "+=" not in diagnosis.fixes[0].title


def test_a_part_of_the_model_on_meta_is_not_told_to_move_its_inputs(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        with torch.device("meta"):
            self.extra = nn.Linear(6, 6)

    def forward(self, x):
        return self.extra(self.body(x))

net = Net()
net(torch.randn(5, 4)).mean().backward()
""",
    )
    assert diagnosis.code == "GG405"
    assert diagnosis.culprit is not None and 'torch.device("meta")' in diagnosis.culprit.text
    assert "extra.weight" in diagnosis.headline
    assert ".to(" not in diagnosis.fixes[0].title


def test_a_column_of_a_table_is_converted_where_it_is_used(tmp_path: Path) -> None:
    source = """
rows = torch.randn(16, 4)
rows[:, 3] = torch.randint(0, 2, (16,)).float()
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def batch(chosen):
    taken = rows[chosen]
    return taken[:, :3], taken[:, 3]

for chosen in torch.arange(16).split(8):
    x, y = batch(chosen)
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    diagnosis = first(tmp_path, source)
    assert diagnosis.code == "GG404"
    patch = diagnosis.fixes[0].patch
    assert patch is not None and "y.long()" in patch
    assert run_source(tmp_path, applied(HEAD + source, patch)) == []


def test_initialising_views_of_a_parameter_belongs_under_no_grad(tmp_path: Path) -> None:
    source = """
class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.empty(3, 4))
        for row in self.rows:
            row.uniform_(-1, 1)

    def forward(self, x):
        return x @ self.rows.t()

Codes()(torch.randn(5, 4)).mean().backward()
"""
    diagnosis = first(tmp_path, source)
    assert diagnosis.code == "GG105"
    patch = diagnosis.fixes[0].patch
    assert patch is not None and "torch.no_grad()" in patch
    assert run_source(tmp_path, applied(HEAD + source, patch)) == []


def test_items_of_a_list_are_no_views_of_it(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
net = nn.Linear(4, 8)
gate = torch.sigmoid(net(torch.randn(5, 4)))
maps = [gate, torch.exp(gate)]
for each in maps:
    each -= each.mean()
(maps[0] * maps[1]).mean().backward()
""",
    )
    assert diagnosis.code == "GG101"
    assert "maps" not in diagnosis.headline
    assert diagnosis.fixes[0].patch is None
    assert not any("is a view of" in span.label for span in diagnosis.related)


def test_a_parameter_that_a_loss_does_not_use_is_named(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.deep = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, deep):
        return self.deep(self.body(x)) if deep else self.body(x)

net = Net()
inner = net(torch.randn(4, 3), False).pow(2).mean()
torch.autograd.grad(inner, list(net.parameters()), create_graph=True)
""",
    )
    assert diagnosis.code == "GG306"
    assert "`net.deep.weight`" in diagnosis.headline
    assert "allow_unused=True" in diagnosis.fixes[0].title
    assert diagnosis.avoid == []


REWRAPPED = """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(3):
    parts = [F.cross_entropy(net(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)) for _ in range(3)]
    loss = torch.tensor(parts, requires_grad=True).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_loss_of_a_fresh_leaf_trains_nothing(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, REWRAPPED)
    assert diagnosis.code == "GG302"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "torch.tensor(parts, requires_grad=True)"
    patch = diagnosis.fixes[0].patch
    if patch is not None:
        assert run_source(tmp_path, applied(HEAD + REWRAPPED, patch)) == []


def test_a_leaf_that_is_optimised_itself_is_left_alone(tmp_path: Path) -> None:
    """An input made of a network's result, and changed by its own gradient."""
    source = """
net = nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(4):
    loss = net(torch.randn(4, 3)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    x = torch.tensor(net(torch.ones(3)).tolist(), requires_grad=True)
    for _ in range(3):
        net(x).pow(2).sum().backward()
        x = (x - 0.1 * x.grad).detach().requires_grad_()
    opt.zero_grad()
"""
    assert [diagnosis.code for diagnosis, _ in run_source(tmp_path, HEAD + source) if diagnosis.code.startswith("GG3")] == []


def test_a_backward_in_two_parts_is_left_alone(tmp_path: Path) -> None:
    """The border is a leaf made of a trained network's output; its gradient is handed on by hand."""
    source = """
net = nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(4):
    out = net(torch.randn(4, 3))
    border = out.detach().requires_grad_()
    border.pow(2).mean().backward()
    opt.zero_grad()
    out.backward(border.grad)
    opt.step()
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        energy = x.pow(2).sum()
        x = (x - 0.1 * torch.autograd.grad(energy, x)[0]).detach().requires_grad_()
"""
    assert run_source(tmp_path, HEAD + source) == []
    assert run_source(tmp_path, HEAD + source, "strict") == []
