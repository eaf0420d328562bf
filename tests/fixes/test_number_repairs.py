"""Advice on values that stop being finite or stop learning: it follows from where the number came from, and it repairs."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tests.running import said

TURNED = """
head = nn.Linear(5, 4)
nn.init.zeros_(head.weight)
nn.init.zeros_(head.bias)
opt = torch.optim.Adam(head.parameters(), lr=1e-3)

def unit(q):
    return {unit}

for it in range(6):
    opt.zero_grad()
    (unit(head(torch.randn(8, 5))) - torch.tensor([1.0, 0, 0, 0])).pow(2).mean().backward()
    opt.step()
assert {asserted}
"""
BY_HAND = "q / q.pow(2).sum(-1, keepdim=True).sqrt()"


def test_a_root_in_the_divisor_is_bounded_under_the_root(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, TURNED.format(unit=BY_HAND, asserted="True"))[0]
    assert diagnosis.code == "GG501"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == BY_HAND
    assert "under the root" in diagnosis.fixes[0].title
    assert [fact.name for fact in diagnosis.tensors] == ["q", "q.pow(2).sum(-1, keepdim=True).sqrt()"]


@pytest.mark.parametrize(
    "unit",
    [
        "q / (q.pow(2).sum(-1, keepdim=True) + 1e-12).sqrt()",
        "q / torch.linalg.vector_norm(q, dim=-1, keepdim=True).clamp(min=1e-6)",
        "F.normalize(q, dim=-1)",
    ],
)
def test_what_is_advised_for_a_root_in_the_divisor_repairs(tmp_path: Path, unit: str) -> None:
    assert said(tmp_path, TURNED.format(unit=unit, asserted="all(p.isfinite().all() for p in head.parameters())")) == []


def test_an_exponential_that_underflows_is_not_to_be_clamped(tmp_path: Path) -> None:
    source = """
net = nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
ones = torch.ones(6)
for it in range(3):
    x = torch.randn(6, 3)
    kernel = torch.exp(-torch.cdist(net(x), x).pow(2) / 1e-4)
    opt.zero_grad()
    (ones / (kernel.t() @ ones)).sum().backward()
    opt.step()
"""
    diagnosis = said(tmp_path, source)[0]
    assert diagnosis.code == "GG501"
    assert "logarithms" in diagnosis.fixes[0].title
    assert not any(fix.title.startswith("keep the divisor") for fix in diagnosis.fixes)
    assert any("torch.exp(" in (span.text or "") and "underflows" in (span.label or "") for span in diagnosis.related)
    assert [(fact.name, fact.shape) for fact in diagnosis.tensors] == [("kernel.t() @ ones", [6])]
    assert said(tmp_path, source.replace("/ 1e-4", "/ 10.0")) == []


def test_a_count_of_zero_is_clamped(tmp_path: Path) -> None:
    source = """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for it in range(3):
    weight = torch.relu(net(torch.randn(5, 3)) - 50.0)
    opt.zero_grad()
    (weight / weight.sum()).sum().backward()
    opt.step()
"""
    diagnosis = said(tmp_path, source)[0]
    assert diagnosis.code == "GG501"
    assert "clamp(min=eps)" in diagnosis.fixes[0].title


BORN = """
def inverse(x):
    return torch.log(torch.exp(torch.as_tensor(x)) - 1)

class Rates(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(inverse({value}))
        self.weight = nn.Parameter(torch.ones(3) / {size})

    def forward(self, x):
        return (x @ self.weight) * F.softplus(self.raw)

rates = Rates()
{loaded}
opt = torch.optim.SGD(rates.parameters(), lr=1e-3)
for it in range(3):
    opt.zero_grad()
    rates(torch.randn(4, 3)).pow(2).mean().backward()
    opt.step()
"""


def test_a_parameter_that_was_never_finite_is_followed_to_where_it_was_made(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, BORN.format(value=120.0, size=3, loaded=""))[0]
    assert diagnosis.code == "GG502"
    assert diagnosis.culprit is not None and "torch.log(torch.exp(" in (diagnosis.culprit.text or "")
    assert any("self.raw = nn.Parameter" in (span.text or "") for span in diagnosis.related)
    assert said(tmp_path, BORN.format(value=1.2, size=3, loaded="")) == []


def test_a_parameter_that_was_loaded_is_not_blamed_on_its_constructor(tmp_path: Path) -> None:
    loaded = "rates.load_state_dict({'raw': torch.tensor(float('nan')), 'weight': torch.ones(3)})"
    diagnosis = said(tmp_path, BORN.format(value=1.2, size=3, loaded=loaded))[0]
    assert diagnosis.code == "GG502"
    assert diagnosis.culprit is None


REGRESSION = """
torch.manual_seed(4)
x = torch.rand(60, 5)
y = {target}
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1){last})
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for it in range(60):
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()
"""


def test_a_relu_on_the_output_cannot_reach_targets_below_zero(tmp_path: Path) -> None:
    source = REGRESSION.format(target="-2.0 - x[:, :1]", last=", nn.ReLU()")
    other = nn.Sequential(nn.Linear(2, 2), nn.ReLU())  # alive beside it: not the model that is trained
    diagnosis = next(item for item in said(tmp_path, source) if item.code == "GG504")
    assert isinstance(other[1], nn.ReLU)
    assert "take the ReLU off the output" in diagnosis.fixes[0].title
    assert any("model.3" in note for note in diagnosis.notes)
    assert said(tmp_path, REGRESSION.format(target="-2.0 - x[:, :1]", last="")) == []


def test_a_dead_relu_in_the_middle_gets_the_usual_advice(tmp_path: Path) -> None:
    source = REGRESSION.format(target="-2.0 - x[:, :1]", last="").replace("opt =", "nn.init.constant_(model[0].bias, -50.0)\nopt =")
    diagnosis = next(item for item in said(tmp_path, source) if item.code == "GG504")
    assert "off the output" not in " ".join(fix.title for fix in diagnosis.fixes)


@pytest.mark.parametrize(("eps", "loud"), [(0.0, True), (1e-8, False)])
def test_an_eps_of_zero_is_given_back_its_default(tmp_path: Path, eps: float, loud: bool) -> None:
    source = f"""
table = nn.Embedding(12, 3)
opt = torch.optim.Adam(table.parameters(), lr=1e-2, eps={eps})
for it in range(4):
    opt.zero_grad()
    table(torch.tensor([1, 2])).pow(2).mean().backward()
    opt.step()
    table(torch.arange(12)).sum()
opt.zero_grad()
table(torch.arange(12)).pow(2).mean().backward()
"""
    found = said(tmp_path, source)
    assert bool(found) == loud
    if loud:
        assert "1e-8" in found[0].fixes[0].title and "float16" not in found[0].fixes[0].title


SUMMED = """
near = (torch.rand(40, 40) < 0.5).float()
near = NEAR

class Hop(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.mix = nn.Linear(a, b)

    def forward(self, x):
        return self.mix(near @ x)

net = nn.Sequential(Hop(6, 16), nn.ReLU(), Hop(16, 16), nn.ReLU(), Hop(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=LR)
x, y = torch.randn(40, 6) + 1, torch.randn(40, 1)
for it in range(12):
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    opt.step()
assert all(p.isfinite().all() for p in net.parameters()) or "near / " not in "NEAR"
"""


def test_weights_thrown_out_of_range_in_one_step_are_a_divergence(tmp_path: Path) -> None:
    """The overflow comes in the third forward already; a smaller rate would only put it off."""
    diagnosis = said(tmp_path, SUMMED.replace("NEAR", "near").replace("LR", "1e-2"))[0]
    assert diagnosis.code == "GG503" and diagnosis.culprit is not None
    assert diagnosis.culprit.text == "torch.optim.SGD(net.parameters(), lr=1e-2)"
    assert "in the last step" in diagnosis.headline and "sums over many terms to means" in diagnosis.fixes[0].title


def test_what_is_advised_for_sums_over_many_terms_repairs(tmp_path: Path) -> None:
    assert said(tmp_path, SUMMED.replace("NEAR", "near / near.sum(1, keepdim=True)").replace("LR", "1e-2")) == []


TABULAR = """
import numpy as np

class Scaler:
    def fit(self, rows):
        self.mu, self.sd = rows.mean(axis=0), rows.std(axis=0)
        return self

    def __call__(self, rows):
        return (rows - self.mu) / self.sd

np.seterr(all="ignore")
rows = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
rows[COLUMN] = BAD
table = torch.from_numpy(Scaler().fit(rows)(rows))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(table, torch.arange(32) % 2), batch_size=8)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.01)

def fit():
    for x, y in data:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()

fit()
"""


def test_a_constant_column_leads_to_the_division_by_its_deviation(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, TABULAR.replace("COLUMN", ":, 1").replace("BAD", "7.0"))[0]
    assert diagnosis.code == "GG501" and diagnosis.culprit is not None and diagnosis.confidence == "likely"
    assert diagnosis.culprit.text == "return (rows - self.mu) / self.sd" and "all of column 1" in diagnosis.headline
    repaired = TABULAR.replace("COLUMN", ":, 1").replace("BAD", "7.0").replace("/ self.sd", "/ self.sd.clip(min=1e-6)")
    assert said(tmp_path, repaired) == []


def test_bad_values_in_some_rows_only_do_not_blame_a_division(tmp_path: Path) -> None:
    source = (
        TABULAR.replace("COLUMN", "3")
        .replace("BAD", "7.0")
        .replace("table =", "table = torch.from_numpy(rows); table[3, 2] = float('nan'); _ =")
    )
    diagnosis = said(tmp_path, source)[0]
    assert diagnosis.code == "GG501" and diagnosis.culprit is not None
    assert "self.sd" not in diagnosis.culprit.text and "all of column" not in diagnosis.headline


ROOTED = """
class Scale(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.scale, self.out = nn.Embedding(9, 6, padding_idx=0), Scale(), nn.Linear(6, 2)

    def forward(self, t):
        return self.out(self.scale(self.table(t)).mean(1))

net = Words().KIND()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for it in range(3):
    opt.zero_grad()
    F.cross_entropy(net(torch.tensor([[1, 2, 0], [3, 0, 0]])).float(), torch.tensor([0, 1])).backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("kind", "eps", "loud"), [("half", "1e-8", True), ("float", "0.0", True), ("half", "1e-5", False), ("float", "1e-8", False)]
)
def test_an_inverse_root_of_zero_is_not_told_as_one_of_a_negative_number(tmp_path: Path, kind: str, eps: str, loud: bool) -> None:
    found = said(tmp_path, ROOTED.replace("KIND", kind).replace("EPS", eps))
    assert bool(found) == loud
    if loud:
        assert "inverse square root of 0" in found[0].headline and "negative" not in found[0].explanation
        assert ("float16" in found[0].explanation) == (kind == "half") and "1e-5" in found[0].fixes[0].title
