"""What is told of a graph that is needed twice: the sentences hold, and what is advised lets the program run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source


def told(folder: Path, source: str, level: str = "standard") -> Diagnosis:
    found = [diagnosis for diagnosis, _ in run_source(folder, HEAD + source, level) if diagnosis.severity == "error"]
    assert len(found) == 1
    return found[0]


def words(diagnosis: Diagnosis) -> str:
    return " ".join([diagnosis.headline, diagnosis.explanation or "", *diagnosis.avoid, *(fix.title for fix in diagnosis.fixes)])


LOSSES_OF_A_GENERATOR = """
class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 4), nn.Linear(2, 6)

    def losses(self, x):
        mean, spread = self.enc(x).tanh().chunk(2, dim=-1)
        yield F.mse_loss(self.dec(mean + spread.exp() * torch.randn_like(mean)), x)
        yield (mean ** 2 + spread.exp() - spread).mean()

def update(coder, opt, x):
    opt.zero_grad()
    for loss in coder.losses(x):
        loss.backward()
    opt.step()

coder = Coder()
opt = torch.optim.Adam(coder.parameters())
for _ in range(4):
    update(coder, opt, torch.randn(8, 6))
"""

MADE_BEFORE_THE_LOOP_OF_A_GENERATOR = """
weight, head = nn.Parameter(torch.ones(6)), nn.Linear(6, 1)
opt = torch.optim.SGD([weight, *head.parameters()], lr=0.1)

def losses(n):
    scale = weight.exp()
    for _ in range(n):
        yield head(torch.randn(8, 6) * scale).pow(2).mean()

for epoch in range(2):
    for loss in losses(3):
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_losses_that_a_generator_yields_share_one_forward_pass(tmp_path: Path, level: str) -> None:
    diagnosis = told(tmp_path, LOSSES_OF_A_GENERATOR, level)
    assert diagnosis.code == "GG202"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "loss.backward()"
    assert "`mean`" in diagnosis.headline or "`spread`" in diagnosis.headline
    assert "add the losses up" in diagnosis.fixes[0].title
    assert "earlier step" not in words(diagnosis)


def test_what_a_generator_makes_once_for_several_steps_is_precomputed(tmp_path: Path) -> None:
    diagnosis = told(tmp_path, MADE_BEFORE_THE_LOOP_OF_A_GENERATOR)
    assert diagnosis.code == "GG205"
    assert "`scale`" in diagnosis.headline
    assert "has changed since" in diagnosis.avoid[0]


def test_of_a_value_made_before_any_step_no_earlier_step_is_spoken_of(tmp_path: Path) -> None:
    source = """
weight, head = nn.Parameter(torch.ones(6)), nn.Linear(6, 1)
opt = torch.optim.SGD([weight, *head.parameters()], lr=0.1)
scale = weight.exp()
for part in range(3):
    head(torch.randn(8, 6) * scale).pow(2).mean().backward()
opt.step()
"""
    diagnosis = told(tmp_path, source)
    assert diagnosis.code == "GG205"
    assert "earlier step" not in words(diagnosis) and "has changed since" not in words(diagnosis)


HESSIAN_TIMES_VECTORS = """
def product(grads, params, v):
    return torch.autograd.grad(grads, params, grad_outputs=v)

net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for it in range(7):
    x = torch.randn(8, 3)
    opt.zero_grad()
    net(x).pow(2).mean().backward()
    opt.step()
    if it == {at}:
        params = list(net.parameters())
        grads = torch.autograd.grad(net(x).pow(2).mean(), params, create_graph=True)
        v = [torch.randn_like(p) for p in params]
        for _ in range(3):
            v = [part / 2 for part in product(grads, params, v)]
"""


@pytest.mark.parametrize(("level", "at"), [("standard", 0), ("standard", 6), ("watch", 3), ("strict", 3)])
def test_products_of_one_hessian_with_several_vectors_keep_the_graph(tmp_path: Path, level: str, at: int) -> None:
    source = HESSIAN_TIMES_VECTORS.format(at=at)
    diagnosis = told(tmp_path, source, level)
    assert diagnosis.code == "GG201"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "torch.autograd.grad(grads, params, grad_outputs=v)"
    assert "Function" not in words(diagnosis) and "forward pass" not in words(diagnosis) and not diagnosis.avoid
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    repaired = applied(HEAD + source, patch)
    assert "grad_outputs=v, retain_graph=True)" in repaired
    assert run_source(tmp_path, repaired, level) == []


def test_the_same_gradient_taken_again_after_an_update_is_no_product(tmp_path: Path) -> None:
    """Gradient descent by hand on a loss computed once: keeping the graph would repair nothing."""
    source = """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
params = list(net.parameters())
loss = net(torch.randn(8, 3)).pow(2).mean()
for it in range(3):
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for p, g in zip(params, grads):
            p -= 0.1 * g
"""
    diagnosis = told(tmp_path, source)
    assert diagnosis.code == "GG201"
    assert "forward pass" in diagnosis.fixes[0].title


def test_the_rows_of_a_jacobian_are_taken_from_one_graph(tmp_path: Path) -> None:
    source = """
def jacobian(net, z, create_graph):
    y = net(z)
    return torch.stack([torch.autograd.grad(y[i], z, create_graph=create_graph)[0] for i in range(3)])

net = nn.Sequential(nn.Linear(2, 4), nn.Softplus(), nn.Linear(4, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(3):
    opt.zero_grad()
    net(torch.randn(5, 2)).pow(2).mean().backward()
    opt.step()
    print(jacobian(net, torch.randn(2, requires_grad=True), False).norm().item())
"""
    diagnosis = told(tmp_path, source)
    assert diagnosis.code == "GG202"
    assert "loss" not in (diagnosis.culprit.label or "" if diagnosis.culprit else "loss")
    assert "create_graph=True" not in words(diagnosis)
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    assert run_source(tmp_path, applied(HEAD + source, patch)) == []


def test_the_loss_that_a_helper_is_handed_is_blamed_where_it_is_computed(tmp_path: Path) -> None:
    source = """
policy, value, log_alpha = nn.Linear(3, 2), nn.Linear(2, 1), torch.zeros((), requires_grad=True)
opts = {"policy": torch.optim.SGD(policy.parameters(), lr=0.1), "alpha": torch.optim.SGD([log_alpha], lr=0.1)}
value.requires_grad_(False)

def descend(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()

for it in range(3):
    act = policy(torch.randn(5, 3)).tanh()
    entropy = act.pow(2).mean()
    descend(opts["policy"], (0.1 * entropy - value(act)).mean())
    descend(opts["alpha"], -(log_alpha * (entropy + 2.0)).mean())
"""
    diagnosis = told(tmp_path, source)
    assert diagnosis.code == "GG202"
    assert diagnosis.culprit is not None and "log_alpha * (entropy" in (diagnosis.culprit.text or "")
    patch = diagnosis.fixes[0].patch
    assert patch is not None
    repaired = applied(HEAD + source, patch)
    assert "(entropy.detach() + 2.0)" in repaired
    assert run_source(tmp_path, repaired) == []


CELL = """
class Cell(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.decay, self.level = nn.Parameter(torch.full((size,), 0.9)), None
{method}
    def forward(self, x):
        if self.level is None:
            self.level = torch.zeros_like(x)
        self.level = self.decay * self.level + x
        return self.level.tanh()

net = nn.Sequential(nn.Linear(4, 5), Cell(5), nn.Linear(5, 2), Cell(2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(4):
    x = torch.randn(3, 4)
    out = 0
    for t in range({times}):
        out = out + net(x)
    opt.zero_grad()
    out.pow(2).mean().backward()
    opt.step()
"""
RESET = "    def reset(self):\n        self.level = None\n"
RELEASE = "    def release(self):\n        self.level = self.level.detach()\n"


def test_a_state_made_several_times_in_a_step_is_not_detached_where_it_is_made(tmp_path: Path) -> None:
    plain = told(tmp_path, CELL.format(method="", times=5))
    assert plain.code == "GG203"
    assert "once a step, before the loop" in plain.fixes[0].title
    emptied = told(tmp_path, CELL.format(method=RESET, times=5))
    assert "`reset()` of each `Cell`" in emptied.fixes[0].title and "`self.level = None`" in emptied.fixes[0].title
    for diagnosis in (plain, emptied):
        assert not any("where the new one is made" in fix.title for fix in diagnosis.fixes)


def test_a_state_made_once_in_a_step_is_detached_where_it_is_made(tmp_path: Path) -> None:
    diagnosis = told(tmp_path, CELL.format(method=RESET, times=1))
    assert diagnosis.code == "GG203"
    assert "`self.level.detach()`" in diagnosis.fixes[0].title
    assert "`reset()`" in diagnosis.fixes[1].title


def test_a_method_that_detaches_the_state_is_the_first_to_be_called(tmp_path: Path) -> None:
    source = CELL.format(method=RELEASE, times=1)
    diagnosis = told(tmp_path, source)
    assert "`release()` of each `Cell`" in diagnosis.fixes[0].title
    repaired = source + "    for cell in (net[1], net[3]):\n        cell.release()\n"
    assert run_source(tmp_path, HEAD + repaired) == []


def test_a_memoized_method_is_blamed_at_its_decorator(tmp_path: Path) -> None:
    source = """
import functools

class Sloped(nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes, self.out = nn.Parameter(torch.ones(2)), nn.Linear(2, 1)

    @functools.lru_cache(maxsize=4)
    def bias(self, n):
        return self.slopes.exp() * torch.arange(n)[:, None]

    def forward(self, x):
        return self.out(x + self.bias(x.shape[0]))

model = Sloped()
opt = torch.optim.SGD(model.parameters(), lr=0.001)
for it in range(6):
    opt.zero_grad()
    model(torch.randn((3, 4)[it % 2], 2)).pow(2).mean().backward()
    opt.step()
"""
    diagnosis = told(tmp_path, source)
    assert diagnosis.code == "GG205"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "functools.lru_cache(maxsize=4)"
    assert "the cached result of `bias`" in diagnosis.headline and "`type`" not in words(diagnosis)
    assert "take `@functools.lru_cache(maxsize=4)` off `bias`" in diagnosis.fixes[0].title
    assert run_source(tmp_path, HEAD + source.replace("    @functools.lru_cache(maxsize=4)\n", "")) == []
