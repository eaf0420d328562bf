"""Two losses of one step with a backward() each: where nothing stands between them, one backward() on the sum is the patch."""

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
