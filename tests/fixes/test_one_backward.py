"""Patches of losses and writes that hang together: one backward() on a sum, numbers in a running total, a copy before a write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source

TASKS = """
trunk, kind, depth = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3), nn.Linear(8, 1)
opt = torch.optim.SGD([*trunk.parameters(), *kind.parameters(), *depth.parameters()], lr=0.05)
for it in range(4):
    x = torch.randn(8, 6)
    z = trunk(x)
    a, b = F.cross_entropy(kind(z), (x[:, 0] > 0).long()), F.l1_loss(depth(z).squeeze(1), x[:, 1])
    opt.zero_grad()
    {calls}
    opt.step()
"""


@pytest.mark.parametrize(
    ("calls", "once"),
    [
        (["a.backward()", "b.backward()"], ["(a + b).backward()"]),
        (["(2 * a).backward()", "b.mean().backward()"], ["((2 * a) + b.mean()).backward()"]),
        (["a.backward()", "c = 0.1 * depth(z).pow(2).mean()", "b.backward()", "c.backward()"],
         ["c = 0.1 * depth(z).pow(2).mean()", "(a + b + c).backward()"]),
    ],
    ids=["names", "expressions", "three"],
)  # fmt: skip
def test_the_losses_are_added_up(calls: list[str], once: list[str], tmp_path: Path) -> None:
    source, repaired = (HEAD + TASKS.format(calls="\n    ".join(lines)) for lines in (calls, once))
    [(found, _)] = run_source(tmp_path, source)
    fix = found.fixes[0]
    assert (found.code, fix.safety) == ("GG202", "safe") and once[-1] in fix.title
    assert fix.patch is not None and applied(source, fix.patch) == repaired
    assert run_source(tmp_path, repaired) == []


@pytest.mark.parametrize(
    "calls",
    [
        ["a.backward()", "norm = kind.weight.grad.norm()", "b.backward()"],
        ["a.backward()", "nn.utils.clip_grad_norm_(kind.parameters(), 1.0)", "b.backward()"],
        ["a.backward()", "a = b", "b.backward()"],
        ["a.backward(torch.tensor(2.0))", "b.backward()"],
        ["a.backward()", "if it < 3: b.backward()"],
        ["a.backward()  # first", "b.backward()"],
    ],
    ids=["read", "clipped", "rebound", "weighted", "apart", "comment"],
)
def test_what_stands_between_them_is_not_reordered(calls: list[str], tmp_path: Path) -> None:
    [(found, _)] = run_source(tmp_path, HEAD + TASKS.format(calls="\n    ".join(calls)))
    assert found.code == "GG202" and "add the losses up" in found.fixes[0].title and found.fixes[0].patch is None


SUMMED = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
total = 0.0
for it in range(3):
    loss = net(torch.randn(8, 4)).pow(2).mean()
    total += {scale}loss
    opt.zero_grad()
    total.backward()
    opt.step()
print({read})
"""


@pytest.mark.parametrize(
    ("scale", "read", "lines"),
    [
        ("", "float(total)", ["total += loss.item()", "loss.backward()"]),
        ("", "total.item() / 3", ["total += loss.detach()", "loss.backward()"]),  # a number has no item()
        ("", "f'{total:.3f}'", ["total += loss.item()", "loss.backward()"]),
        ("0.5 * ", "float(total)", ["batch_loss = 0.5 * loss", "batch_loss.backward()", "total += batch_loss.item()"]),
    ],
)
def test_a_sum_of_losses_takes_numbers(scale: str, read: str, lines: list[str], tmp_path: Path) -> None:
    source = HEAD + SUMMED.format(scale=scale, read=read)
    [(found, _)] = run_source(tmp_path, source)
    assert found.code == "GG204" and found.fixes[0].patch is not None
    repaired = applied(source, found.fixes[0].patch)
    assert run_source(tmp_path, repaired) == []
    assert [line.strip() for line in repaired.splitlines() if line.strip() in lines] == lines


MASKED = """
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.01)

def weights_of(x, {index}):
    weights = torch.softmax(net(x), dim=1)
    weights[{index}] = 0.0
    return weights

for it in range(3):
    x = torch.randn(4, 4)
    loss = weights_of(x, {given}).pow(2).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(("index", "given"), [("mask", "x > 0"), ("rows", "torch.tensor([0, 2])")])
def test_a_masked_write_goes_into_a_copy(index: str, given: str, tmp_path: Path) -> None:
    source = HEAD + MASKED.format(index=index, given=given)
    [(found, _)] = run_source(tmp_path, source)
    assert found.code == "GG101" and found.fixes[0].patch is not None and "masked_fill" in (found.fixes[0].detail or "")
    repaired = applied(source, found.fixes[0].patch)
    assert f"    weights = weights.clone()\n    weights[{index}] = 0.0\n" in repaired
    assert run_source(tmp_path, repaired) == []
