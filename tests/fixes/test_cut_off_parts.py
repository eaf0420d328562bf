"""Parameters that get no gradient though their module runs: where their way to the loss ends, and that sound twins are silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, said


def only(folder: Path, source: str, code: str, culprit: str) -> Diagnosis:
    found = said(folder, source)
    assert [diagnosis.code for diagnosis in found] == [code], [diagnosis.headline for diagnosis in found]
    assert found[0].culprit is not None and found[0].culprit.text == culprit, found[0].culprit
    return found[0]


def mended(folder: Path, source: str, diagnosis: Diagnosis) -> None:
    patch = diagnosis.fixes[0].patch
    assert patch is not None, diagnosis.fixes
    assert said(folder, applied(HEAD + source, patch).removeprefix(HEAD)) == []


TRAIN = """
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for it in range(30):
    opt.zero_grad()
    net(torch.randn(8, 6)).pow(2).mean().backward()
    opt.step()
"""

KERNEL = """
class Kernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.rand(6))

    def forward(self, n):
        return torch.exp(-self.rate * n)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ker, self.mix = Kernel(), nn.Linear(6, 6)

    def kernel(self, n):
        {block}:
            return self.ker(n)

    def forward(self, x):
        return self.mix(x * self.kernel(2.0))

net = nn.Sequential(nn.Linear(6, 6), Block())
"""


def test_part_that_runs_without_grad_inside_a_module_that_does_not(tmp_path: Path) -> None:
    diagnosis = only(tmp_path, KERNEL.format(block="with torch.no_grad()") + TRAIN, "GG605", "torch.no_grad()")
    assert not any("runs with grad mode off" in (span.label or "") for span in diagnosis.related)
    assert any(span.text == "self.ker(n)" for span in diagnosis.related)
    assert said(tmp_path, KERNEL.format(block="if True") + TRAIN) == []


SPARSE = """
class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.stack([torch.arange(80) // 10, torch.arange(80) % 8]))
        self.logit = nn.Parameter(torch.zeros(80))
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        w = torch.sigmoid(self.logit)
        return self.lin(torch.sparse.mm(torch.sparse_coo_tensor(self.edges, {values}, (8, 8)), x))

net = nn.Sequential(Graph(), nn.Tanh(), Graph())
"""


@pytest.mark.parametrize("values", ["[float(v) for v in w]", "torch.tensor([float(v) for v in w])"])
def test_numbers_that_a_sparse_matrix_is_made_of(tmp_path: Path, values: str) -> None:
    diagnosis = only(tmp_path, SPARSE.format(values=values) + TRAIN, "GG605", "float(v)")
    assert diagnosis.headline.startswith("`net.0.logit`, `net.2.logit` are in `opt`")


def test_sparse_matrix_with_its_graph(tmp_path: Path) -> None:
    assert said(tmp_path, SPARSE.format(values="w") + TRAIN) == []


HOOK = """
seen = {{}}
def look(module, inputs, output):
    seen[module] = output.detach()
    {back}

net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
for i in (1, 3):
    net[i].register_forward_hook(look)
"""


def test_forward_hook_that_gives_back_what_it_has_looked_at(tmp_path: Path) -> None:
    source = HOOK.format(back="return seen[module]") + TRAIN
    diagnosis = only(tmp_path, source, "GG605", "return seen[module]")
    assert "takes the place of the output of `net.1`" in diagnosis.headline
    assert {fact.name for fact in diagnosis.tensors} == {f"net.{i}.{p}" for i in (0, 2) for p in ("weight", "bias")}
    mended(tmp_path, source, diagnosis)


@pytest.mark.parametrize("back", ["pass", "return output", "return output * (1 + seen[module].mean())"])
def test_forward_hook_that_only_looks(tmp_path: Path, back: str) -> None:
    assert said(tmp_path, HOOK.format(back=back) + TRAIN) == []


PHASES = """
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def run(phases):
    for phase in phases:
        for it in range(3):
            opt.zero_grad()
            with torch.set_grad_enabled(phase == {wanted!r}):
                loss = net(torch.randn(5, 4)).pow(2).mean()
            if phase.startswith("T"):
                loss.backward()
                opt.step()
run(["Train", "Val"])
"""


@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_condition_that_switches_grad_mode(tmp_path: Path, level: str) -> None:
    diagnosis = said(tmp_path, PHASES.format(wanted="train"), level)[0]
    assert diagnosis.code == "GG301"
    assert "`phase == 'train'`" in diagnosis.fixes[0].title and "Freezing" not in diagnosis.explanation
    assert "`phase` is `'Train'` when backward() is called." in diagnosis.notes
    assert said(tmp_path, PHASES.format(wanted="Train"), level) == []


ADAPTERS = """
class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.base(x) * self.scale

def adapt(model, wanted):
    for p in model.parameters():
        p.requires_grad_(False)
    for name, child in list(model.named_children()):
        if name in wanted:
            setattr(model, name, Adapter(child))
    return model

def main():
    model = adapt(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), {wanted})
    model(torch.randn(5, 4)).pow(2).mean().backward()
main()
"""


def test_parts_that_were_to_be_put_in_after_the_freeze(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, ADAPTERS.format(wanted="['q_proj']"))[0]
    assert diagnosis.code == "GG303" and "no `Adapter` has been put in" in diagnosis.headline
    assert "`name in wanted`" in diagnosis.fixes[0].title
    assert said(tmp_path, ADAPTERS.format(wanted="['2']")) == []


BOUNDED = """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_std = nn.Linear(4, 2), nn.Parameter(torch.tensor({start}))

    def forward(self, x):
        return torch.distributions.Normal(self.mean(x), {bounded}.exp().expand(x.shape[0], 2))

policy = Policy()
opt = torch.optim.Adam(policy.parameters(), lr=0.01)
for it in range(20):
    opt.zero_grad()
    (-policy(torch.randn(8, 4)).log_prob(torch.randn(8, 2)).mean(){extra}).backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("start", "bounded", "where"),
    [
        ("[-3.0, -3.0]", "self.log_std.clamp(-2, 1)", "(-3) lie below -2"),
        ("[2.0, 3.0]", "torch.clamp(self.log_std, max=1.0)", "(2 to 3) lie above 1"),
        ("[-3.0, 3.0]", "F.hardtanh(self.log_std)", "(-3 to 3) lie outside -1 to 1"),
    ],
)
def test_parameter_outside_the_range_of_its_clamp(tmp_path: Path, start: str, bounded: str, where: str) -> None:
    diagnosis = only(tmp_path, BOUNDED.format(start=start, bounded=bounded, extra=""), "GG304", bounded)
    assert "`policy.log_std` is exactly zero" in diagnosis.headline and where in diagnosis.explanation


@pytest.mark.parametrize(
    ("start", "bounded", "extra"),
    [
        ("[-3.0, 0.0]", "self.log_std.clamp(-2, 1)", ""),  # one element learns
        ("[-1.0, -1.0]", "self.log_std.clamp(-2, 1)", ""),
        ("[-3.0, -3.0]", "self.log_std.clamp(-2, 1)", " + 0.1 * (policy.log_std + 1).pow(2).sum()"),  # drawn back into it
    ],
)
def test_parameter_that_a_gradient_reaches(tmp_path: Path, start: str, bounded: str, extra: str) -> None:
    assert said(tmp_path, BOUNDED.format(start=start, bounded=bounded, extra=extra)) == []


MAPPED = """
from torch.func import functional_call, grad, vmap

net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
teacher = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.01)

def value(params, t):
    return functional_call(net, params, (t.reshape(1),)).squeeze()

def residual(t):
    params = {{k: {taken} for k, v in {whose}.named_parameters()}}
    return vmap({mapped}, in_dims=(None, 0))(params, t)

for it in range(6):
    t = torch.rand(16)
    opt.zero_grad()
    loss = {loss}
    loss.backward()
    opt.step()
"""
TERM = "(net(torch.zeros(1, 1)) - 1).pow(2).mean() + residual(t).pow(2).mean()"


@pytest.mark.parametrize("mapped", ["value", "grad(value, argnums=1)", "grad(grad(value, argnums=1), argnums=1)"])
def test_term_whose_parameters_were_detached_before_vmap(tmp_path: Path, mapped: str) -> None:
    source = MAPPED.format(taken="v.detach()", whose="net", mapped=mapped, loss=TERM)
    diagnosis = only(tmp_path, source, "GG308", "v.detach()")
    assert "`residual(t).pow(2).mean()` is part of `loss`" in diagnosis.headline
    mended(tmp_path, source, diagnosis)


@pytest.mark.parametrize(
    ("taken", "whose", "mapped", "loss"),
    [
        ("v", "net", "grad(value, argnums=1)", TERM),
        ("v.detach()", "teacher", "value", "(net(t[:, None])[:, 0] - residual(t)).pow(2).mean()"),  # a target
        ("v.detach()", "net", "value", "net(t[:, None]).pow(2).mean() * residual(t).std()"),  # a weight
        ("v.detach()", "net", "value", "[net(t[:, None]).pow(2).mean(), print(end=str(residual(t).mean())[:0])][0]"),
    ],
    ids=["with its graph", "target", "weight", "looked at"],
)
def test_vmap_that_is_to_have_no_graph(tmp_path: Path, taken: str, whose: str, mapped: str, loss: str) -> None:
    assert said(tmp_path, MAPPED.format(taken=taken, whose=whose, mapped=mapped, loss=loss)) == []


DRAWN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        {made}
        z = {drawn}.sample()
        return self.decoder(z)

net = Net()
"""


@pytest.mark.parametrize(
    ("made", "drawn"),
    [
        ("mean, log_std = self.encoder(x).chunk(2, dim=1)", "torch.distributions.Normal(mean, log_std.exp())"),
        ("posterior = torch.distributions.Normal(self.encoder(x)[:, :4], 1.0)", "posterior"),
        ("low = self.encoder(x)[:, :4]", "torch.distributions.Uniform(low, low + 1)"),
    ],
    ids=["both", "mean", "uniform"],
)
def test_a_sample_that_is_all_that_goes_on(made: str, drawn: str, tmp_path: Path) -> None:
    source = DRAWN.format(made=made, drawn=drawn) + TRAIN
    found = only(tmp_path, source, "GG605", f"{drawn}.sample()")
    assert "drawn with `.sample()`" in found.headline
    mended(tmp_path, source, found)
