"""The argument of a root or a logarithm, bounded in the patch: in brackets where it needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, said

PROGRAM = """
a, b = nn.Parameter(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 3.0])
opt = torch.optim.SGD([a], lr=0.1)
for _ in range(3):
    d = {root}
    opt.zero_grad()
    d.sum().backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("root", "repaired"),
    [
        ("torch.sqrt((a - b) ** 2)", "torch.sqrt(((a - b) ** 2).clamp(min=1e-12))"),
        ("((a - b) * (a - b)).sqrt()", "(((a - b) * (a - b)).clamp(min=1e-12)).sqrt()"),
        ("torch.sqrt((a - b).pow(2))", "torch.sqrt((a - b).pow(2).clamp(min=1e-12))"),
    ],
)
def test_root_of_a_square(root: str, repaired: str, tmp_path: Path) -> None:
    source = PROGRAM.format(root=root)
    (found, *_) = said(tmp_path, source)
    assert found.code == "GG502"
    assert found.fixes[0].patch is not None
    changed = applied(source, found.fixes[0].patch)
    assert f"d = {repaired}\n" in changed
    assert said(tmp_path, changed) == []
