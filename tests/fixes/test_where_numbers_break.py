"""Determinants, likelihoods, sums in half precision, fields of records and weights of zero: named where they break, silent where sound."""

from __future__ import annotations

from pathlib import Path

from tests.running import HEAD, applied, only, run_source

LOOP = """
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for it in range(STEPS):
    opt.zero_grad()
    loss = compute()
    loss.backward()
    opt.step()
"""


def test_the_log_of_a_determinant_is_named(tmp_path: Path) -> None:
    source = """
net = nn.Linear(4, 3)
rows = torch.randn(1, 4).repeat(4, 1)

def compute():
    h = net(rows)
    gram = h @ h.T
    return h.pow(2).mean() - 0.01 * torch.logdet(gram).mean()
""" + LOOP.replace("STEPS", "2")
    found = only(tmp_path, source, "GG501", "torch.logdet(gram)")
    assert "log of a determinant" in found.headline and "torch.eye" in found.fixes[0].title
    assert not run_source(tmp_path, HEAD + source.replace("h @ h.T", "h @ h.T + 0.1 * torch.eye(4)"))


def test_a_likelihood_of_all_pairs_is_told(tmp_path: Path) -> None:
    source = """
from torch.distributions import Normal
net = nn.Linear(3, 1)
x, target = torch.randn(16, 3), torch.randn(16)

def compute():
    mean = net(x)
    return -Normal(mean, 0.5).log_prob(target).mean()
""" + LOOP.replace("STEPS", "3")
    found = only(tmp_path, source, "GG505", "Normal(mean, 0.5).log_prob(target)")
    assert not run_source(tmp_path, applied(HEAD + source, found.fixes[0].patch or ""))
    mixture = source.replace("nn.Linear(3, 1)", "nn.Linear(3, 16)").replace("(target).mean()", "(target[:, None]).logsumexp(1).mean()")
    assert not run_source(tmp_path, HEAD + mixture.replace("mean = net(x)", "mean = net(x)[0]"))


def test_a_sum_in_half_precision_is_told_though_a_scaler_is_at_work(tmp_path: Path) -> None:
    source = """
net = nn.Linear(3, 8)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
opt = torch.optim.SGD(net.parameters(), lr=1e-9)
for it in range(4):
    out = net(torch.randn(4, 3))
    loss = (out.half() + 200.0).square().sum()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""
    found = only(tmp_path, source, "GG501", "(out.half() + 200.0).square().sum()")
    assert "float16" in found.headline and ".float()" in found.fixes[0].title
    # finite, and only too large for the scale: the scaler's own business
    assert not run_source(tmp_path, HEAD + source.replace("200.0", "30.0").replace("16.0", "2.0 ** 16"))


def test_a_field_of_a_record_leads_to_the_method_that_set_it(tmp_path: Path) -> None:
    source = """
from dataclasses import dataclass

@dataclass
class Graph:
    x: torch.Tensor
    adj: torch.Tensor

    def normalise(self):
        inverse = self.adj.sum(1).pow(-0.5)
        self.adj = inverse[:, None] * self.adj * inverse[None, :]
        return self

adj = torch.ones(4, 4)
adj[0] = adj[:, 0] = 0.0
graph = Graph(torch.randn(4, 3), adj).normalise()
net = nn.Linear(3, 2)

def compute():
    return (graph.adj @ net(graph.x)).pow(2).mean()
""" + LOOP.replace("STEPS", "2")
    found = only(tmp_path, source, "GG501", "inverse = self.adj.sum(1).pow(-0.5)")
    assert "`graph.adj`" in found.headline


def test_weights_of_zero_are_named_and_not_the_learning_rate(tmp_path: Path) -> None:
    source = """
def init(module):
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)

net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).apply(init)

def compute():
    return (net(torch.randn(8, 3)) - 1.0).pow(2).mean()
""" + LOOP.replace("STEPS", "35")
    found = only(tmp_path, source, "GG504", "nn.init.zeros_(module.weight)")
    assert "initialise the weights at random" in found.fixes[0].title
