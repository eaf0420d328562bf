"""Patches for terms that are numbers, for gradients that another network has left, and for grad mode that was left off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, applied, run_source

TERM = """
net = nn.Linear(6, 6)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
history = []
def penalties(out):
    return {{"size": out.pow(2).mean(), "mean": out.mean().abs()}}
for step in range(4):
    x = torch.randn(8, 6)
    out = net(x)
    base = F.mse_loss(out, x)
    {body}
    opt.zero_grad()
    loss.backward()
    opt.step()
    {after}
"""


def repaired(folder: Path, source: str, code: str) -> tuple[Diagnosis, str]:
    """What was said, and the source with its patch, which says nothing."""
    [(told, _)] = run_source(folder, HEAD + source)
    assert told.code == code
    patch = told.fixes[0].patch
    assert patch is not None
    changed = applied(HEAD + source, patch)
    assert run_source(folder, changed) == []
    return told, changed


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ("loss = base + 0.1 * penalties(out)['size'].item()", ""),
        ("size = penalties(out)['size'].item()\n    loss = base + 0.1 * size", "history.append(float(size))"),
        (
            "terms = {k: 0.1 * v.item() for k, v in penalties(out).items()}\n    loss = base + sum(terms.values())",
            "history.append({k: float(v) for k, v in terms.items()})",
        ),
    ],
    ids=["sum", "variable", "dict"],
)
def test_a_term_as_a_number(body: str, after: str, tmp_path: Path) -> None:
    _, changed = repaired(tmp_path, TERM.format(body=body, after=after), "GG308")
    assert ".item()" not in changed


SIZE = (
    "for step in range(4):",
    """
def size(parameters):
    return {size}
for step in range(4):""",
)


@pytest.mark.parametrize(
    "size",
    [
        "sum(p.pow(2).sum().item() for p in parameters)",
        "0.5 * sum([(p * p).sum().item() for p in parameters])",
        "next(parameters).norm().item()",
    ],
)
def test_a_term_as_a_number_of_a_function_of_its_own(size: str, tmp_path: Path) -> None:
    body = "loss = base + 0.1 * size(net.parameters())"
    source = TERM.format(body=body, after="").replace(SIZE[0], SIZE[1].format(size=size))
    _, changed = repaired(tmp_path, source, "GG308")
    assert ".item()" not in changed
    printed = TERM.format(body=body, after="print(f'{size(net.parameters()):.3f}')").replace(SIZE[0], SIZE[1].format(size=size))
    [(told, _)] = run_source(tmp_path, HEAD + printed)  # which a tensor may be no number for
    assert told.code == "GG308" and told.fixes[0].patch is None


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ("size = penalties(out)['size'].item()\n    loss = base + 0.1 * size", "history.append(size)"),
        (
            "terms = {k: 0.1 * v.item() for k, v in penalties(out).items()}\n    loss = base + sum(terms.values())",
            "history.append({k: round(v, 3) for k, v in terms.items()})",
        ),
        ("loss = base + min(penalties(out)['size'].item(), 10.0)", ""),
    ],
    ids=["kept", "rounded", "min"],
)
def test_no_patch_where_the_number_is_read(body: str, after: str, tmp_path: Path) -> None:
    for told, _ in run_source(tmp_path, HEAD + TERM.format(body=body, after=after)):
        assert told.code == "GG308" and told.fixes[0].patch is None


GAN = """
g, d = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
opt_g, opt_d = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (g, d))
for it in range(8):
    real = torch.randn(16, 2)
    fake = g(torch.randn(16, 4))
{own}
    opt_d.step()
    opt_d.zero_grad()
    opt_g.zero_grad()
    (-d(fake).mean()).backward()
    opt_g.step()
"""


@pytest.mark.parametrize(
    "own",
    [
        "    (d(fake.detach()).mean() - d(real).mean()).backward()",
        "    d_loss = d(fake.detach()).mean() - d(real).mean()\n    d_loss.backward()",
        "    d(real).mean().neg().backward()\n    d(fake.detach()).mean().backward()",  # two of its own: before the first
    ],
    ids=["expression", "variable", "two"],
)
def test_gradients_that_another_network_has_left(own: str, tmp_path: Path) -> None:
    _, changed = repaired(tmp_path, GAN.format(own=own), "GG601")
    first = next(line for line in own.splitlines() if "backward()" in line)
    assert f"    opt_d.zero_grad()\n{first}" in changed


def test_no_patch_where_its_own_gradients_are_accumulated(tmp_path: Path) -> None:
    own = "    for part in real.chunk(2):\n        (d(fake.detach()).mean() - d(part).mean()).backward()"
    for told, _ in run_source(tmp_path, HEAD + GAN.format(own=own)):
        assert told.code == "GG601" and told.fixes[0].patch is None


MODE = """
torch.set_grad_enabled(True)  # the thread is that of the program before, which has left it off
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def validate(x):
    net.eval()
{body}
for epoch in range(2):
    for _ in range(5):
        loss = net(torch.randn(8, 4)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    validate(torch.randn(8, 4))
    net.train()
"""


@pytest.fixture
def grad_mode() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("grad_mode")
@pytest.mark.parametrize(
    "body",
    [
        "    torch.set_grad_enabled(False)\n    out = net(x)\n    return out.mean().item()",
        "    torch.autograd.set_grad_enabled(mode=False)  # no graph\n    if len(x):\n        print(net(x).mean())",
        "    torch.no_grad().__enter__()\n    return net(x).mean().item()",
    ],
    ids=["return", "keyword", "enter"],
)
@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
def test_grad_mode_that_was_left_off(body: str, level: str, tmp_path: Path) -> None:
    source = HEAD + MODE.format(body=body)
    [(told, _)] = run_source(tmp_path, source, level)
    assert told.code == "GG301" and told.fixes[0].title.startswith("Use `with torch.no_grad():` around")
    assert not any("traced" in note for note in told.notes)
    patch = told.fixes[0].patch
    assert patch is not None
    changed = applied(source, patch)
    assert "    with torch.no_grad():\n        " in changed and run_source(tmp_path, changed, level) == []


@pytest.mark.usefixtures("grad_mode")
@pytest.mark.parametrize(
    "body",
    [
        "    if len(x):\n        torch.set_grad_enabled(False)\n    return net(x).mean().item()",  # only sometimes
        "    torch.set_grad_enabled(False)\n    print('''two\n  lines''', net(x).mean())",
        "    print(net(x).mean())\n    torch.set_grad_enabled(False)",  # nothing follows
    ],
    ids=["branch", "string", "last"],
)
def test_no_patch_where_the_extent_is_not_certain(body: str, tmp_path: Path) -> None:
    [(told, _)] = run_source(tmp_path, HEAD + MODE.format(body=body))
    assert told.code == "GG301" and told.fixes[0].patch is None
