"""Where the bug is pointed at in programs whose obvious place is not the bug, and what is said of it there."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
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


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
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


TASKS_IN_A_STEP = """
trunk, heads = nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.ModuleDict({"a": nn.Linear(6, 1), "b": nn.Linear(6, 2)})
opt = torch.optim.Adam([*trunk.parameters(), *heads.parameters()])

def train_step(x):
    shared = trunk(x)
    opt.zero_grad()
    for name, head in heads.items():
        loss = head(shared).pow(2).mean()
        loss.backward()
    opt.step()

for it in range(3):
    train_step(torch.randn(4, 5))
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_what_a_called_step_makes_anew_is_shared_by_its_losses_not_computed_once(tmp_path: Path, level: str) -> None:
    diagnosis = first(tmp_path, TASKS_IN_A_STEP, level)
    assert diagnosis.code == "GG202"
    assert "`shared`" in diagnosis.headline
    assert "optimizer.step() has changed" not in " ".join(diagnosis.avoid)


OLD_PROBABILITIES = """
class Memory:
    def __init__(self):
        self.rows = []

    def add(self, *row):
        self.rows.append(row)

    def columns(self):
        return [torch.stack(column) for column in zip(*self.rows)]

policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.Adam(policy.parameters())

def play(memory):
    for _ in range(6):
        seen = torch.randn(3)
        chosen = torch.distributions.Categorical(logits=policy(seen))
        action = chosen.sample()
        memory.add(seen, action, chosen.log_prob(action))

memory = Memory()
play(memory)
seen, actions, old = memory.columns()
for epoch in range(3):
    new = torch.distributions.Categorical(logits=policy(seen)).log_prob(actions)
    opt.zero_grad()
    (-(new - old).exp().mean()).backward()
    opt.step()
"""


def test_the_old_policys_log_probability_is_to_be_kept_without_its_graph(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, OLD_PROBABILITIES)
    assert diagnosis.code == "GG205"
    assert diagnosis.culprit is not None and "chosen.log_prob(action)" in (diagnosis.culprit.text or "")
    assert "`.detach()`" in diagnosis.fixes[0].title, "computed anew it would make the ratio one"


CLIMB_AND_DESCEND = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(2):
    loss = net(torch.randn(6, 4)).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.05 * p.grad)
    {again}loss.backward()
    opt.step()
"""


def test_a_loss_whose_weights_have_moved_is_to_be_computed_anew(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, CLIMB_AND_DESCEND.format(again=""))
    assert diagnosis.code == "GG201"
    assert "`net.weight`" in diagnosis.explanation and "changed in between" in diagnosis.explanation
    assert diagnosis.fixes[0].title.startswith("compute `loss` anew")
    assert not any("pass retain_graph" in fix.title for fix in diagnosis.fixes)


MERGED = """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.up, self.down = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 4))

    {decorator}
    def merge(self):
        self.weight.add_(self.up @ self.down)

    {decorator}
    def unmerge(self):
        self.weight.sub_(self.up @ self.down)

    def forward(self, x):
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.down), self.up)

layer = Adapted()
opt = torch.optim.Adam([layer.up, layer.down])
for it in range({steps}):
    opt.zero_grad()
    layer(torch.randn(5, 4)).pow(2).mean().backward()
    opt.step()
    layer.merge()
    layer.unmerge()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_a_frozen_weight_written_with_grad_mode_on_carries_that_graph(tmp_path: Path, level: str) -> None:
    diagnosis = first(tmp_path, MERGED.format(decorator="", steps=4), level)
    assert diagnosis.code == "GG203"
    assert "`layer.weight`" in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "self.weight.sub_(self.up @ self.down)"
    assert "no_grad" in diagnosis.fixes[0].title and "`unmerge`" in diagnosis.fixes[0].title


def test_merging_under_no_grad_is_silent(tmp_path: Path) -> None:
    assert run_source(tmp_path, HEAD + MERGED.format(decorator="@torch.no_grad()", steps=20), "strict") == []


SCALED_LATENTS = """
class Codes:
    def __init__(self):
        self.latents = torch.randn(5, 3, requires_grad=True) * 0.1
        self.opt = torch.optim.Adam([self.latents])

Codes()
"""


def test_a_computed_tensor_given_to_an_optimizer(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, SCALED_LATENTS)
    assert diagnosis.code == "GG411"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "torch.randn(5, 3, requires_grad=True) * 0.1"
    assert "`self.latents`" in diagnosis.headline and "`mul`" in diagnosis.headline
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    assert run_source(tmp_path, HEAD + applied(SCALED_LATENTS, patch), "strict") == []


SWAPPED = """
maker, judge = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
opt_m = torch.optim.Adam(maker.parameters())
opt_j = torch.optim.Adam(maker.parameters())
for it in range(3):
    made = maker(torch.randn(5, 3))
    opt_m.zero_grad()
    F.softplus(judge(made.detach())).mean().backward()
    F.softplus(judge(made)).mean().backward(retain_graph=True)
    opt_j.step()
    opt_m.zero_grad()
    F.softplus(-judge(made)).mean().backward()
    opt_m.step()
"""


def test_two_optimizers_over_one_network_and_none_over_the_other(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, SWAPPED)
    assert diagnosis.code == "GG102"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "torch.optim.Adam(maker.parameters())"
    assert diagnosis.culprit.line == len(HEAD.splitlines()) + 4
    assert "`judge` is in no optimizer" in diagnosis.headline
    assert diagnosis.fixes[0].patch is not None and "+opt_j = torch.optim.Adam(judge.parameters())" in diagnosis.fixes[0].patch


PIECES = """
cell, out = nn.GRU(4, 6, 2), nn.Linear(6, 4)
opt = torch.optim.Adam([*cell.parameters(), *out.parameters()])

def cut(state):
    for layer in state:
        layer.detach_()
    return state

state = None
for it in range(3):
    if state is not None:
        state = cut(state)
    y, state = cell(torch.randn(5, 2, 4), state)
    opt.zero_grad()
    out(y).pow(2).mean().backward()
    opt.step()
"""


def test_pieces_that_cannot_be_detached_in_place_are_detached_as_a_whole(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, PIECES)
    assert diagnosis.code == "GG110"
    patch = diagnosis.fixes[0].patch
    assert patch is not None and diagnosis.fixes[0].safety == "safe"
    assert run_source(tmp_path, HEAD + applied(PIECES, patch), "strict") == []


SUM_OF_TWO = """
body, scale = nn.Linear(4, 4), nn.Linear(4, 4)
opt = torch.optim.Adam([*body.parameters(), *scale.parameters()])
for it in range(3):
    out = body(torch.randn(6, 4)) + scale(torch.randn(6, 4))
    loss = torch.histc(out, 8).std() + out.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_of_a_sum_the_side_without_a_graph_is_named(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, SUM_OF_TWO)
    assert diagnosis.code == "GG308"
    assert diagnosis.headline.startswith("`torch.histc(out, 8).std()` is part of `loss`")


TEMPERATURE = """
class Agent:
    def __init__(self):
        self.policy = nn.Linear(3, 2)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.policy_opt = torch.optim.Adam(self.policy.parameters())
        self.alpha_opt = torch.optim.Adam([self.log_alpha])

    @property
    def alpha(self):
        return self.log_alpha.exp().item()

    def actor(self, seen):
        logp = self.policy(seen).log_softmax(1)[:, 0]
        self.policy_opt.zero_grad()
        (self.alpha * logp).mean().backward()
        self.policy_opt.step()
        return logp.detach()

    def temperature(self, logp):
        loss = -(self.alpha * (logp + 1.0)).mean()
        self.alpha_opt.zero_grad()
        loss.backward()
        self.alpha_opt.step()

agent = Agent()
for it in range(3):
    agent.temperature(agent.actor(torch.randn(5, 3)))
"""


def test_the_number_that_stood_for_the_zeroed_optimizers_parameter_is_the_cut(tmp_path: Path) -> None:
    diagnosis = first(tmp_path, TEMPERATURE)
    assert diagnosis.code == "GG302"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "self.log_alpha.exp().item()", "logp is detached on purpose"


NO_EXAMPLE = """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for count in (3, 2, 0):
    scores = net(torch.randn(8, 4))[:count]
    CHOICE
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
CHOICES = {
    "first": """if count == 0:
        loss = torch.tensor(0.0)
    else:
        loss = F.mse_loss(scores, torch.zeros(count, 2))""",
    "last": """if count:
        loss = F.mse_loss(scores, torch.zeros(count, 2))
    else:
        loss = torch.tensor(0.0)""",
    "moved": """if count:
        target = torch.zeros(count, 2)
        loss = (scores - target).pow(2).mean()
    else:
        loss = torch.tensor(0.0).to(scores.device)""",
}


@pytest.mark.parametrize("level", ["watch", "standard", "strict", "forensic"])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_of_two_branches_only_the_one_that_ran_is_named(choice: str, level: str, tmp_path: Path) -> None:
    diagnosis = first(tmp_path, NO_EXAMPLE.replace("CHOICE", choice), level)
    assert diagnosis.code == "GG303"
    spans = [span for span in (diagnosis.culprit, *diagnosis.related) if span is not None]
    assert not any("zeros(count" in (span.text or "") for span in spans)
    assert diagnosis.culprit is None or diagnosis.culprit.text == "torch.tensor(0.0)"
    assert diagnosis.culprit is not None or choice is CHOICES["moved"]
