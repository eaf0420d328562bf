"""Parameters that get no gradient though their module runs: where their way to the loss ends, and that sound twins are silent."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from gradguard.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source


def said(folder: Path, source: str, level: str = "standard") -> list[Diagnosis]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source, level)]


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
