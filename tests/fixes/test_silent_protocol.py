"""Silent bugs of the step protocol, each in several spellings, and sound programs that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, only, run_source, said

LOOP = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(24):
    x = torch.randn(8, 4)
    loss = net(x).pow(2).mean()
"""

PENALTY = """
import functools
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def call(function):
    function()
for step in range(12):
    penalty = sum(float(p.abs().sum()) for p in net.parameters())
    loss = net(torch.randn(8, 4)).pow(2).mean() + 0.1 * penalty
    opt.zero_grad()
    BACKWARD
    opt.step()
"""


@pytest.mark.parametrize(
    "backward",
    [
        "run = loss.backward\n    run()",
        "run = functools.partial(torch.autograd.backward, loss)\n    run()",
        "run = lambda: loss.backward()\n    run()",
        "call(loss.backward)",
        "torch.autograd.backward(loss)",
    ],
)
def test_a_backward_call_by_another_name_is_followed_to_its_root(tmp_path: Path, backward: str) -> None:
    only(tmp_path, PENALTY.replace("BACKWARD", backward), "GG308", "float(p.abs().sum())")


def test_a_step_before_and_after_the_clipping_is_one_too_many(tmp_path: Path) -> None:
    clip = "    opt.zero_grad()\n    loss.backward()\n    opt.step()\n    nn.utils.clip_grad_norm_(net.parameters(), 0.01)\n"
    found = only(tmp_path, LOOP + clip + "    opt.step()\n", "GG606", "opt.step()")
    assert "first `step()`" in found.fixes[0].title
    only(tmp_path, LOOP + clip, "GG610", "nn.utils.clip_grad_norm_(net.parameters(), 0.01)")


MICRO = """
net, critic = nn.Linear(4, 4), nn.Linear(4, 1)
a, b = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
for step in range(80):
    fake = net(torch.randn(8, 4))
    (critic(fake).pow(2).mean() / 4).backward()
    if (step + 1) % 4 == 0:
        a.step()
CLEAR
    if step % 4 == 0:
        b.zero_grad()
    (critic(fake.detach()).pow(2).mean() / 4).backward()
    if (step + 1) % 4 == 0:
        b.step()
"""


def test_the_optimizer_whose_share_is_lost_is_the_one_that_is_named(tmp_path: Path) -> None:
    found = only(tmp_path, MICRO.replace("CLEAR", "    a.zero_grad()"), "GG602", "a.zero_grad()")
    assert "only the last backward" in found.headline
    assert not said(tmp_path, MICRO.replace("CLEAR", "        a.zero_grad()"))


MADE = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 1)

    def forward(self, x):
        return self.fc(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def build(self):
        return nn.ModuleList(Head() for _ in range(1))

    def forward(self, x):
        h = self.trunk(x)
        USE

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(30):
    loss = net(torch.randn(16, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("use", "culprit"),
    [
        ("return Head()(h)", "Head()"),
        ("return self.build()[0](h)", "nn.ModuleList(Head() for _ in range(1))"),
        ("self.w = nn.Parameter(torch.randn(8, 1))\n        return h @ self.w + self.head(h)", "self.w"),
    ],
)
def test_what_is_made_in_forward_is_placed_where_it_was_made(tmp_path: Path, use: str, culprit: str) -> None:
    found = [each for each in said(tmp_path, MADE.replace("USE", use)) if each.code == "GG603"]
    assert len(found) == 1 and found[0].culprit is not None
    assert culprit in (found[0].culprit.text or "")


def test_what_is_made_once_is_silent(tmp_path: Path) -> None:
    assert not said(tmp_path, MADE.replace("USE", "return self.head(h)"))


TARGET = """
import copy
net = nn.Linear(4, 2)
target = copy.deepcopy(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(40):
    x = torch.randn(8, 4)
    with torch.no_grad():
        goal = target(x)
    loss = (net(x) - goal).pow(2).mean() + net(x).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    REFRESH
"""


@pytest.mark.parametrize(
    "refresh", ["target.load_state_dict(target.state_dict())", "state = target.state_dict()\n    target.load_state_dict(state)"]
)
def test_a_target_that_is_loaded_with_its_own_state(tmp_path: Path, refresh: str) -> None:
    found = only(tmp_path, TARGET.replace("REFRESH", refresh), "GG611", refresh.splitlines()[-1].strip())
    assert "`target.load_state_dict(net.state_dict())`" in found.fixes[0].title


@pytest.mark.parametrize(
    "refresh",
    [
        "target.load_state_dict(net.state_dict())",
        "state = target.state_dict()\n    state['weight'].lerp_(net.weight.detach(), 0.1)\n    state['bias'].lerp_(net.bias.detach(), 0.1)"
        "\n    target.load_state_dict(state)",
    ],
)
def test_a_target_that_follows_is_silent(tmp_path: Path, refresh: str) -> None:
    assert not said(tmp_path, TARGET.replace("REFRESH", refresh))


SAVED = """
net, other = nn.Linear(4, 2), nn.Linear(4, 2)
opt = torch.optim.SGD(other.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad()
    other(torch.randn(8, 4)).mean().backward()
    opt.step()
for step in range(3):
    net.load_state_dict(net.state_dict())
    net.load_state_dict(net.state_dict(), strict=False)
    net(torch.randn(8, 4)).mean().backward()
"""


def test_a_state_that_is_loaded_back_while_nothing_trains_is_silent(tmp_path: Path) -> None:
    assert not said(tmp_path, SAVED)


@pytest.mark.parametrize(
    "update",
    [
        "for (_, t), (_, p) in zip(target.named_parameters(), net.named_parameters()):\n            t = 0.9 * t + 0.1 * p",
        "for t, p in zip(target.parameters(), net.parameters()):\n            mixed = 0.9 * t + 0.1 * p",
        "for t, p in zip(target.parameters(), net.parameters()):\n            t.mul(0.9).add(p, alpha=0.1)",
    ],
)
def test_an_average_whose_result_is_dropped(tmp_path: Path, update: str) -> None:
    source = TARGET.replace("REFRESH", f"with torch.no_grad():\n        {update}")
    only(tmp_path, source, "GG611", update.splitlines()[-1].strip())
    sound = (
        source.replace("t = 0.9", "t.data[:] = 0.9")
        .replace("mixed = 0.9", "t.data[:] = 0.9")
        .replace("t.mul(0.9).add(", "t.mul_(0.9).add_(")
    )
    assert not said(tmp_path, sound)


DETACHED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, warm=True):
        h = self.enc(x).sigmoid()
        CUT
        return self.head(h)

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(STEPS):
    loss = net(torch.randn(8, 4), step < 30).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_part_that_is_cut_off_for_good_is_told_early_and_the_fix_leaves_no_empty_assignment(tmp_path: Path) -> None:
    source = DETACHED.replace("CUT", "h = h.detach()").replace("STEPS", "60")
    found = only(tmp_path, source, "GG605", "h.detach()")
    assert found.step is not None and found.step <= 20 and found.confidence == "likely"
    patch = found.fixes[0].patch
    assert patch is not None
    repaired = applied(HEAD + source, patch)
    assert "h = h\n" not in repaired
    assert not run_source(tmp_path, repaired)


def test_a_part_that_is_cut_off_for_a_while_is_silent(tmp_path: Path) -> None:
    assert not said(tmp_path, DETACHED.replace("CUT", "if warm:\n            h = h.detach()").replace("STEPS", "60"))


REPLACED = """
net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
net[1] = nn.Linear(8, 2)
AFTER
for step in range(18):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
"""


def test_a_replaced_head_is_told_within_twenty_steps(tmp_path: Path) -> None:
    found = said(tmp_path, REPLACED.replace("AFTER", ""))
    assert [each.code for each in found] == ["GG604"] and found[0].confidence == "likely"
    assert not said(tmp_path, REPLACED.replace("AFTER", "opt.add_param_group({'params': net[1].parameters()})"))


LEFT_OUT = """
net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters())

def penalty_of(x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).pow(2).mean()

for step in range(12):
    x = torch.randn(8, 2)
    STATEMENT
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    "statement",
    [
        "penalty = penalty_of(x)\n    loss = net(x).mean()",
        "penalty_of(x)\n    loss = net(x).mean()",
        "loss = net(x).mean()\n    term = penalty_of(x)",
    ],
)
def test_a_penalty_that_no_loss_contains(tmp_path: Path, statement: str) -> None:
    line = next(line.strip() for line in statement.splitlines() if "penalty_of" in line)
    only(tmp_path, LEFT_OUT.replace("STATEMENT", statement), "GG308", line)


@pytest.mark.parametrize(
    "statement",
    [
        "loss = net(x).mean() + penalty_of(x)",
        "watched = penalty_of(x).item()\n    loss = net(x).mean()",
        "penalty = penalty_of(x)\n    loss = net(x).mean() + (penalty if step % 8 == 0 else 0)",
    ],
)
def test_a_penalty_that_is_used_or_watched_is_silent(tmp_path: Path, statement: str) -> None:
    assert not said(tmp_path, LEFT_OUT.replace("STATEMENT", statement))


HEADS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x):
        return [CALL]

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(20):
    opt.zero_grad()
    sum(out.pow(2).mean() for out in net(torch.randn(8, 4))).backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("loop", "instead"),
    [
        ("self.heads[0](x) for head in self.heads", "`head`"),
        ("self.heads[0](x) for i in range(len(self.heads))", "`self.heads[i]`"),
        ("self.heads[0](x) for i, each in enumerate(self.heads)", "`each`"),
    ],
)
def test_one_item_that_is_called_for_all(tmp_path: Path, loop: str, instead: str) -> None:
    found = only(tmp_path, HEADS.replace("CALL", loop), "GG605", "self.heads[0](x)")
    assert instead in found.fixes[0].title


def test_batch_norms_that_are_frozen_alone_are_not_called_a_frozen_network(tmp_path: Path) -> None:
    source = """
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
for norm in (net[1], net[3]):
    norm.requires_grad_(False).eval()
opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
net.train()
for step in range(30):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
"""
    found = only(tmp_path, source, "GG609", "net.train()")
    assert found.headline.startswith("the batch norms of")
    one = only(tmp_path, source.replace("(net[1], net[3])", "(net[1],)"), "GG609", "net.train()")
    assert one.headline == "`1`, a frozen batch norm, is in train mode: its running statistics drift"


def test_a_condition_in_a_function_that_never_ran_is_not_blamed(tmp_path: Path) -> None:
    source = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def helper(opt, due):
    if due:
        opt.step()
for step in range(20):
    net(torch.randn(8, 4)).pow(2).mean().backward()
"""
    found = only(tmp_path, source, "GG607", "net(torch.randn(8, 4)).pow(2).mean().backward()")
    assert "condition" not in found.headline


BEST = """
import copy, io
net = nn.Linear(4, 2)
opt = torch.optim.OPTIMIZER(net.parameters(), lr=0.1)
best, lowest = None, 1.0
for step in range(12):
    loss = net(torch.randn(8, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step in (2, 5):
        best = KEPT
RESTORED
"""


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("level", ["watch", "standard"])
@pytest.mark.parametrize(
    ("kept", "restored"),
    [
        ("net.state_dict()", "net.load_state_dict(best)"),
        ("{'model': net.state_dict(), 'step': step}", "net.load_state_dict(best['model'])"),
        ("{key: value for key, value in net.state_dict().items()}", "net.load_state_dict(best)"),
        ("copy.copy(net.state_dict())", "net.load_state_dict(best, strict=False)"),
    ],
)
def test_a_best_state_that_is_the_last(tmp_path: Path, kept: str, restored: str, level: str, optimizer: str) -> None:
    program = BEST.replace("KEPT", kept).replace("RESTORED", restored).replace("OPTIMIZER", optimizer)
    found = only(tmp_path, program, "GG615", "net.state_dict()", level)
    assert found.fixes[0].patch is not None and not said(tmp_path, applied(program, found.fixes[0].patch), level)


@pytest.mark.parametrize(
    ("kept", "restored"),
    [
        ("copy.deepcopy(net.state_dict())", "net.load_state_dict(best)"),
        ("{key: value.clone() for key, value in net.state_dict().items()}", "net.load_state_dict(best)"),
        ("io.BytesIO(); torch.save(net.state_dict(), best); best.seek(0)", "net.load_state_dict(torch.load(best))"),
        ("net.state_dict(); net.load_state_dict(best)", "nn.Linear(4, 2).load_state_dict(best)"),
        ("net.state_dict()", "best['weight'].mul_(0.5); net.load_state_dict(best)"),
    ],
)
def test_a_state_that_is_a_copy_or_is_changed_itself(tmp_path: Path, kept: str, restored: str) -> None:
    assert not said(tmp_path, BEST.replace("KEPT", kept).replace("RESTORED", restored).replace("OPTIMIZER", "Adam"))


SWAPPED = """
net, average = nn.Linear(4, 2), nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    opt.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    opt.step()
kept = KEPT
net.load_state_dict(average.state_dict())
net(torch.randn(8, 4))
net.load_state_dict(kept)
"""


def test_weights_that_are_put_aside_while_others_are_evaluated(tmp_path: Path) -> None:
    only(tmp_path, SWAPPED.replace("KEPT", "net.state_dict()"), "GG615", "net.state_dict()")
    assert not said(tmp_path, SWAPPED.replace("KEPT", "{k: v.clone() for k, v in net.state_dict().items()}"))
