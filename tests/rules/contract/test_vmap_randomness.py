"""GG412: random operations under vmap; the mapping is blamed, what draws is named, and the fix repairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, only, said

NET = """
from functools import partial
from torch.func import functional_call, grad, jacfwd, vmap
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
params = {n: p.detach() for n, p in model.named_parameters()}
x, y = torch.randn(6, 4), torch.randint(3, (6,))
def loss_of_one(params, x, y):
    return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])
"""
NAMED = "per_sample = vmap(grad(loss_of_one), in_dims=(None, 0, 0))\ngrads = per_sample(params, x, y)\n"
DIRECT = "grads = torch.vmap(grad(loss_of_one), in_dims=(\n    None, 0, 0,\n), chunk_size=3,)(params, x, y)\n"
ATTRIBUTE = """
class Clipper:
    def __init__(self):
        self.each = vmap(grad(loss_of_one), (None, 0, 0), randomness="error")
    def run(self):
        return self.each(params, x, y)
Clipper().run()
"""
DECORATED = """
@partial(vmap, in_dims=(0,))
def noisy(x):
    return x + 0.1 * torch.rand_like(x)
noisy(x)
"""
BARE = """
@vmap
def noisy(x):
    return F.dropout(x, 0.5)
noisy(x)
"""
JACOBIAN = "jacfwd(lambda x: F.dropout(x, 0.5).sum())(x[0])\n"
CASES = {
    "named": (NAMED, "vmap(grad(loss_of_one), in_dims=(None, 0, 0))", "`model.1` (Dropout)"),
    "direct": (DIRECT, None, "`model.1` (Dropout)"),
    "attribute": (ATTRIBUTE, 'vmap(grad(loss_of_one), (None, 0, 0), randomness="error")', "`model.1` (Dropout)"),
    "decorated": (DECORATED, "partial(vmap, in_dims=(0,))", "`torch.rand_like(x)`"),
    "bare": (BARE, "vmap", "`F.dropout(x, 0.5)`"),
    "jacobian": (JACOBIAN, "jacfwd(lambda x: F.dropout(x, 0.5).sum())", "`F.dropout(x, 0.5)`"),
}


@pytest.mark.parametrize("which", CASES)
@pytest.mark.parametrize("level", ["standard", pytest.param("watch", marks=pytest.mark.slow)])
def test_the_mapping_is_blamed_and_the_fix_repairs(tmp_path: Path, which: str, level: str) -> None:
    program, culprit, drawing = CASES[which]
    found = said(tmp_path, NET + program, level)
    assert [each.code for each in found] == ["GG412"]
    assert found[0].headline.startswith(drawing) and found[0].confidence == "certain"
    assert found[0].culprit is not None and (culprit is None or found[0].culprit.text == culprit)
    assert found[0].fixes[0].patch is not None
    assert not said(tmp_path, applied(NET + program, found[0].fixes[0].patch), level)


def test_of_several_mappings_the_one_that_is_called_is_blamed(tmp_path: Path) -> None:
    source = NET + "norms = vmap(torch.linalg.vector_norm)\n" + NAMED + "norms(x)\n"
    only(tmp_path, source, "GG412", "vmap(grad(loss_of_one), in_dims=(None, 0, 0))")


@pytest.mark.parametrize(
    "program",
    [
        NAMED.replace("(None, 0, 0))", '(None, 0, 0), randomness="same")', 1),
        "model.eval()\n" + NAMED,
        "noise = torch.rand_like(x)\nvmap(lambda x, n: x + n)(x, noise)\n",
    ],
)
def test_mappings_that_are_told_or_draw_nothing_are_silent(tmp_path: Path, program: str) -> None:
    assert not said(tmp_path, NET + program)
