"""`torch.tensor` of numbers that were taken out of tensors cuts twice; one patch repairs both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source

LOOP = """
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    out = net(torch.randn(5, 4))
    parts = [out[:, i].pow(2).mean() for i in range(3)]
    TERM
    loss = out.mean() + term
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("term", "repaired"),
    [
        ("term = torch.tensor([max(p.item(), 0.1) for p in parts]).sum()", "torch.stack([p.clamp(min=0.1) for p in parts])"),
        ("kept = [min(2.0, float(p)) for p in parts]; term = torch.tensor(kept).sum()", "p.clamp(max=2.0)"),
        ("term = torch.tensor(0.1 * parts[0].item())", "term = 0.1 * parts[0]"),
        ("term = torch.tensor([max(p, 0.1) for p in parts]).sum()", "torch.stack([p.clamp(min=0.1) for p in parts])"),
    ],
)
def test_one_patch_for_both_cuts(tmp_path: Path, term: str, repaired: str) -> None:
    source = HEAD + LOOP.replace("TERM", term)
    found, text = run_source(tmp_path, source)[0]
    assert found.code == "GG308", text
    better = applied(source, found.fixes[0].patch or "")
    assert repaired in better, text
    assert not run_source(tmp_path, better)


def test_what_torch_does_not_compute_is_left_to_the_reader(tmp_path: Path) -> None:
    source = HEAD + LOOP.replace("TERM", "term = torch.tensor([round(p.item(), 3) for p in parts]).sum()")
    found, text = run_source(tmp_path, source)[0]
    assert found.code == "GG308" and found.fixes[0].patch is None, text
