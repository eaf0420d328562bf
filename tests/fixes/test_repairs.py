"""What is recommended repairs the program: patches are put in and the program is run again; advice names what the reader can write."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source


def first(folder: Path, source: str, code: str, level: str = "standard") -> Diagnosis:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = run_source(folder, HEAD + source, level)
    assert said, "nothing was said"
    diagnosis = said[0][0]
    assert diagnosis.code == code, diagnosis.headline
    return diagnosis


TWO_CUTS = """
def penalty(mean, spread):
    mean, spread = mean.detach(), spread.detach()
    return (mean.pow(2) + spread.exp() - spread).mean()

def main():
    net, out = nn.Linear(4, 6), nn.Linear(3, 4)
    opt = torch.optim.SGD([*net.parameters(), *out.parameters()], lr=0.1)
    for it in range(3):
        x = torch.randn(5, 4)
        mean, spread = net(x).chunk(2, -1)
        loss = (out(mean + spread) - x).pow(2).mean() + penalty(mean, spread)
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
"""

PIECES = """
def turn(x, factor):
    a, b = x.chunk(2, dim=-1)
    a *= factor
    return torch.cat([a, b], -1)

def main():
    net = nn.Linear(3, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for it in range(2):
        loss = turn(net(torch.randn(5, 3)), 0.5).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
"""

HELPER = """
def capped(t, limit):
    rows = t.view(-1, t.shape[-1])
    rows[rows > limit] = limit
    return t

def main():
    net = nn.Linear(3, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for it in range(2):
        weights = net(torch.randn(5, 3)).softmax(-1)
        weights = capped(weights, 0.2)
        loss = weights.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
"""


@pytest.mark.parametrize(("source", "code"), [(TWO_CUTS, "GG308"), (PIECES, "GG105"), (HELPER, "GG101")], ids=["cuts", "pieces", "helper"])
def test_the_first_patch_repairs_the_program(tmp_path: Path, source: str, code: str) -> None:
    diagnosis = first(tmp_path, source, code)
    patch = diagnosis.fixes[0].patch
    assert patch is not None, diagnosis.fixes
    assert run_source(tmp_path, applied(HEAD + source, patch)) == []


def test_two_losses_of_two_optimizers_are_not_to_share_a_backward(tmp_path: Path) -> None:
    """The actor's backward before the critic's step would hand the critic the actor's gradient."""
    diagnosis = first(
        tmp_path,
        """
def main():
    actor, critic = nn.Linear(3, 2), nn.Linear(5, 1)
    actor_opt = torch.optim.Adam(actor.parameters())
    critic_opt = torch.optim.Adam(critic.parameters())
    for it in range(2):
        state, action = torch.randn(8, 3), torch.randn(8, 2)
        critic_loss = critic(torch.cat([state, action], -1)).pow(2).mean()
        actor_loss = -critic(torch.cat([state, actor(state)], -1)).tanh().mean()
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
main()
""",
        "GG102",
    )
    assert diagnosis.step == 1, "the first turn of the loop, though one optimizer has stepped in it"
    assert "compute the loss again after `critic_opt.step()`" in diagnosis.fixes[0].title
    assert "`inputs=`" in diagnosis.fixes[1].title and "`actor_opt`" in diagnosis.fixes[1].title


def test_a_frozen_model_is_not_to_be_unfrozen_whole(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
def main():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for p in net.parameters():
        p.requires_grad = False
    loss = F.cross_entropy(net(torch.randn(5, 3)), torch.zeros(5, dtype=torch.long))
    loss.backward()
main()
""",
        "GG303",
    )
    assert "`net[2].requires_grad_(True)`" in diagnosis.fixes[0].title


def test_a_saved_view_is_called_one(tmp_path: Path) -> None:
    """The figures are the view's: beside the whole tensor's name they would be wrong."""
    diagnosis = first(
        tmp_path,
        """
def main():
    cell = nn.Linear(4, 4)
    path = torch.zeros(5, 3, 4)
    for t in range(1, 5):
        path[t] = torch.tanh(cell(path[t - 1]))
    path.pow(2).sum().backward()
main()
""",
        "GG101",
    )
    assert diagnosis.tensors[0].name == "a view of path"
    assert diagnosis.tensors[0].shape == [3, 4]


def test_layers_added_after_the_optimizer_are_told_with_where_they_are_added(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(3, 3)])
        self.out = nn.Linear(3, 1)

    def grow(self):
        self.stages.append(nn.Linear(3, 3))

    def forward(self, x):
        for stage in self.stages:
            x = torch.tanh(stage(x))
        return self.out(x)

def epochs(net, opt, count):
    for it in range(count):
        x = torch.randn(5, 3)
        loss = (net(x) - x[:, :1]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

net = Growing()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
epochs(net, opt, 5)
net.grow()
epochs(net, opt, 80)
""",
        "GG603",
    )
    assert diagnosis.culprit is not None and diagnosis.culprit.text.strip().startswith("torch.optim.SGD")
    assert "self.stages.append(nn.Linear(3, 3))" in [span.text.strip() for span in diagnosis.related]
    assert "joined `net` after `opt` was made" in diagnosis.headline


def test_a_step_that_is_only_named_is_the_culprit(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
def main():
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for it in range(20):
        opt.zero_grad()
        net(torch.randn(5, 3)).pow(2).mean().backward()
        opt.step
main()
""",
        "GG607",
    )
    assert diagnosis.culprit is not None and diagnosis.culprit.text.strip() == "opt.step"


def test_weights_that_a_spoilt_step_made_nan_are_no_news(tmp_path: Path) -> None:
    source = """
def main():
    net = nn.Linear(3, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for it in range(6):
        x = net(torch.randn(5, 3))
        loss = torch.where(x > 0, x.sqrt(), torch.zeros_like(x)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = run_source(tmp_path, HEAD + source)
    assert [diagnosis.code for diagnosis, _ in said if diagnosis.code == "GG502"] == ["GG502"]


def test_what_is_found_when_the_loop_is_over_belongs_to_its_last_step(tmp_path: Path) -> None:
    diagnosis = first(
        tmp_path,
        """
def main():
    used, unused = nn.Linear(3, 1), nn.Linear(3, 1)
    both = nn.ModuleDict({"used": used, "unused": unused})
    opt = torch.optim.SGD(both.parameters(), lr=0.1)
    for it in range(70):
        x = torch.randn(5, 3)
        unused(x)
        opt.zero_grad()
        used(x).pow(2).mean().backward()
        opt.step()
main()
""",
        "GG605",
    )
    assert diagnosis.step == 70


DETACHED_PIECE = """
def main():
    cell = nn.Linear(3, 8)
    opt = torch.optim.SGD(cell.parameters(), lr=0.1)
    for it in range(2):
        h, c = cell(torch.randn(5, 3)).chunk(2, -1)
        h.detach_()
        loss = (h * c).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
"""

INTO_OUT = """
class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        y = torch.empty(5, 4)
        torch.mm(x, self.weight, out=y)
        return y

mixer = Mixer()
mixer(torch.randn(5, 3)).pow(2).mean().backward()
"""


@pytest.mark.parametrize(
    ("source", "code", "line", "words"),
    [
        (DETACHED_PIECE, "GG110", "h.detach_()", "`h`, a view"),
        (INTO_OUT, "GG111", "torch.mm(x, self.weight, out=y)", "`self.weight` requires grad"),
    ],
    ids=["detach", "out"],
)
@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_refused_before_anything_was_written(tmp_path: Path, source: str, code: str, line: str, words: str, level: str) -> None:
    diagnosis = first(tmp_path, source, code, level)
    assert diagnosis.culprit is not None and diagnosis.culprit.text.strip() == line
    assert words in diagnosis.headline
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    assert run_source(tmp_path, applied(HEAD + source, patch)) == []


def test_out_and_detach_in_place_are_left_alone_where_torch_allows_them(tmp_path: Path) -> None:
    source = """
net = nn.Linear(3, 4)
with torch.no_grad():
    buffer = torch.empty(5, 4)
    torch.mm(torch.randn(5, 3), net.weight.t(), out=buffer)
state = net(torch.randn(5, 3))
state.detach_()
net(torch.randn(5, 3)).pow(2).mean().backward()
"""
    assert run_source(tmp_path, HEAD + source) == []
