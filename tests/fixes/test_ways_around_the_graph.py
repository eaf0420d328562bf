"""Gradients that end where no operation of the user's cuts a path: in a custom backward, in indices, in arrays, in copies of values; and
that sound twins are silent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradguard.analysis.program.search_scopes import entry_of
from tests.running import HEAD, applied, only, said

TRAIN = """
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for it in range(30):
    opt.zero_grad()
    loss = net(torch.randn(8, 4)).pow(2).mean()
    loss.backward()
    opt.step()
    shown = loss.item()
"""

ROUND = """
class Hard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, scale, digits):
        return torch.round(values * scale, decimals=digits)

    @staticmethod
    def backward(ctx, grad):
        return {returned}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(Hard.apply(self.first(x), torch.ones(()), 1))

net = Net()
"""

CHOICE = """
class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.last = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        best, index = self.score(x)[:, 0].topk(3)
        return self.last(x[index]{gate})

net = Pool()
"""

ARRAYS = """
import numpy as np

def as_tensor(rows):
    return torch.from_numpy(np.stack(rows))

table, net = nn.Embedding(20, 4), nn.Linear(4, 1)
opt = torch.optim.SGD([*table.parameters(), *net.parameters()], lr=0.05)
for it in range(30):
    ids = torch.randint(0, 20, (6,))
    rows = [table(i){leave} for i in ids]
    x = {stack}(rows)
    {shown}
    loss = net(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

SWALLOWED = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.net(x)

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.last = Part(), nn.Linear(4, 1)

    def forward(self, x):
        with torch.no_grad():
            x = x / x.std()
            {inside}
        {outside}
        return self.last(seen)

net = Whole()
"""


ROWS = (
    {"leave": ".detach().numpy()", "stack": "as_tensor", "shown": ""},
    {"leave": "", "stack": "torch.stack", "shown": "x.detach().numpy()"},
)
OUTSIDE = {"inside": "pass", "outside": "seen = self.part(x)"}


@pytest.mark.parametrize(
    "program, broken, sound, culprit, said_of",
    [
        (ROUND + TRAIN, {"returned": "None, None, None"}, {"returned": "grad, None, None"}, "None, None, None", "`Hard`"),
        (CHOICE + TRAIN, {"gate": ""}, {"gate": " * best[:, None]"}, "self.score(x)[:, 0].topk(3)", "`index`"),
        (SWALLOWED + TRAIN, {"inside": "seen = self.part(x)", "outside": "pass"}, OUTSIDE, "torch.no_grad()", "`net.part"),
        (ARRAYS, *ROWS, "table(i).detach()", "`table`"),
    ],
    ids=["custom backward", "indices", "block around a part's call", "arrays"],
)
def test_parameters_without_a_way_back(
    tmp_path: Path, program: str, broken: dict[str, str], sound: dict[str, str], culprit: str, said_of: str
) -> None:
    assert said_of in only(tmp_path, program.format(**broken), "GG605", culprit).headline
    assert said(tmp_path, program.format(**sound)) == []


HYPER = """
from torch.func import functional_call
net = nn.Linear(4, 1)
hyper = nn.Linear(2, 4)
opt = torch.optim.SGD(hyper.parameters(), lr=0.05)
for it in range(30):
    made = {{"weight": hyper(torch.randn(2))[None], "bias": torch.zeros(1)}}
    x = torch.randn(8, 4)
    {}
    opt.zero_grad()
    out.pow(2).mean().backward()
    opt.step()
"""


ASIDE = """
net = nn.Linear(4, 1)
copies = {{name: p.detach() for name, p in net.named_parameters()}}
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for it in range(12):
    x = torch.randn(8, 4)
    made = torch.func.grad(lambda values: torch.func.functional_call(net, values, (x,)).pow(2).mean())(copies)
    for name, gradient in made.items():
        {}[name].grad = gradient
    opt.step()
"""


@pytest.mark.parametrize(
    "program, broken, sound, culprit, cure",
    [
        (
            HYPER,
            "net.load_state_dict(made); out = net(x)",
            "out = functional_call(net, made, (x,))",
            "net.load_state_dict(made)",
            "functional_call",
        ),
        (ASIDE, "copies", "dict(net.named_parameters())", "copies[name].grad = gradient", "named_parameters"),
    ],
    ids=["loaded weights", "copies"],
)
def test_step_that_finds_no_gradient(tmp_path: Path, program: str, broken: str, sound: str, culprit: str, cure: str) -> None:
    assert cure in only(tmp_path, program.format(broken), "GG606", culprit).fixes[0].title
    assert said(tmp_path, program.format(sound)) == []


GAUSSIAN = """
from torch.distributions import Normal
actor, critic = nn.Linear(3, 2), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opts = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (actor, critic)]
for it in range(6):
    obs = torch.randn(16, 3)
    mean, log_std = actor(obs).chunk(2, -1)
    dist = Normal(mean, log_std.exp())
    act = dist.{draw}()
    logp = dist.log_prob(act)
    {freeze}
    q = critic(torch.cat([obs, act], -1))
    loss = {loss}
    for opt in opts:
        opt.zero_grad()
    loss.backward()
    for opt in opts:
        opt.step()
    critic.requires_grad_(True)
"""
FROZEN = "critic.requires_grad_(False)"


@pytest.mark.parametrize("freeze", [FROZEN, ""])
def test_sample_that_is_scored_and_valued(tmp_path: Path, freeze: str) -> None:
    values = {"freeze": freeze, "loss": "(0.1 * logp - q).mean()"}
    source = GAUSSIAN.format(draw="sample", **values)
    found = [each for each in said(tmp_path, source) if each.code != "GG614"]
    assert [each.code for each in found] == ["GG308"] and found[0].culprit is not None and found[0].culprit.text == "dist.sample()"
    assert found[0].fixes[0].patch is not None
    mended = applied(HEAD + source, found[0].fixes[0].patch).removeprefix(HEAD)
    assert [each.code for each in said(tmp_path, mended) if each.code == "GG308"] == []


@pytest.mark.parametrize(
    "loss",
    [
        "-(logp * q.detach()).mean() + F.mse_loss(q, obs[:, :1])",
        "-(logp * (obs[:, :1] - q)).mean()",
        "(logp * 0.1 - Normal(0, 1).log_prob(act)).mean()",
    ],
)
def test_score_function_estimators(tmp_path: Path, loss: str) -> None:
    assert [each.code for each in said(tmp_path, GAUSSIAN.format(draw="sample", freeze="", loss=loss)) if each.code == "GG308"] == []


DECORATED = """
import functools

def quick(function):
    @functools.wraps(function)
    def run(*args):
        with torch.{mode}():
            return function(*args)
    return run

body, scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
opt = torch.optim.SGD([*body.parameters(), scale], lr=0.05)

@quick
def features(x):
    return body(x)

for it in range(3):
    x = torch.randn(8, 4)
    loss = {loss}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_decorator_of_the_users_own(tmp_path: Path) -> None:
    found = only(tmp_path, DECORATED.format(mode="inference_mode", loss="(scale * features(x)).mean()"), "GG305", "quick")
    assert "undecorated" in found.fixes[0].title and len(found.fixes) == 1, "no_grad in its place would only silence the error"
    target = only(tmp_path, DECORATED.format(mode="inference_mode", loss="(body(x) * features(x)).mean()"), "GG305", "quick")
    assert "no_grad" in target.fixes[0].title, "a target beside the prediction may stay without a graph"
    only(tmp_path, DECORATED.format(mode="no_grad", loss="features(x).mean()"), "GG301", "quick")


class Distance(nn.Module):
    def forward(self, scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (scores.argmax(dim=1) - wanted).abs().mean()


def test_calls_of_compiled_modules_and_functions_are_followed() -> None:
    inner = Distance()
    entry = entry_of(torch.compile(inner, backend="eager"))  # not called: nothing is compiled
    assert entry is not None and entry.bound is inner and getattr(entry.function, "name", None) == "forward"
    plain = entry_of(torch.compile(only, backend="eager"))
    assert plain is not None and getattr(plain.function, "name", None) == "only"


CALLED = """
from torch.optim.swa_utils import update_bn

class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x):
        with torch.set_grad_enabled({on}):
            x = x.clone().requires_grad_(True)
            energy = self.net(x).sum()
            return torch.autograd.grad(energy, x)[0]

update_bn([torch.randn(6, 4)], Force())
"""


def test_function_that_a_library_calls_with_grad_mode_off(tmp_path: Path) -> None:
    plain = CALLED.replace("with torch.set_grad_enabled({on}):", "if {on}:")
    found = only(tmp_path, plain.format(on="True"), "GG301", "self.net(x)")
    assert "enable_grad" in found.fixes[0].title and "`Force.forward` is called with grad mode off" in found.headline
    assert said(tmp_path, CALLED.format(on="True")) == []


DRAWS = """
import sys
sys.path.insert(0, {folder!r})
from drawing_library import Draws

class Net(Draws, nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(x)

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
drawn = net.generate(torch.randn(8, 4))
loss = (drawn * (drawn > 0)).mean()
loss.backward()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_librarys_function_that_runs_without_grad(tmp_path: Path, level: str) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "drawing_library.py").write_text(
        "import torch\nclass Draws:\n    @torch.no_grad()\n    def generate(self, x):\n        return self(x)\n"
    )
    found = only(tmp_path, DRAWS.format(folder=str(library)), "GG301", "net.generate(torch.randn(8, 4))", level)
    assert "`Draws.generate` is decorated" in found.headline and "calling the module itself" in found.fixes[0].title
