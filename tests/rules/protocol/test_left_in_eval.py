"""GG609: modules that are trained in eval mode after a validation, one or several, and the line after which train() belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, only, said

TWO = """
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x):
        return self.net(x)

class Pair:
    def __init__(self):
        self.a, self.b = Tower(), Tower()

    def freeze(self):
        SWITCH

pair = Pair()
opt = torch.optim.SGD([*pair.a.parameters(), *pair.b.parameters()], lr=0.01)

def validate(held):
    held.freeze()
    with torch.no_grad():
        score = (held.a(torch.randn(4, 4)) * held.b(torch.randn(4, 4))).sum()
    return score

for step in range(16):
    loss = (pair.a(torch.randn(8, 4)) - pair.b(torch.randn(8, 4))).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step == 6:
        validate(pair)
"""


@pytest.mark.parametrize(
    "switch",
    ["self.a.eval()\n        self.b.eval()", "self.b.train(False)\n        self.a.train(mode=False)", "self.a.eval(), self.b.eval()"],
)
def test_all_modules_are_named_and_put_back_where_eval_mode_was_wanted(tmp_path: Path, switch: str) -> None:
    source = TWO.replace("SWITCH", switch)
    found = only(tmp_path, source, "GG609", "held.freeze()")
    assert "`pair.a`" in found.headline and "`pair.b`" in found.headline and "are trained in eval mode" in found.headline
    assert {span.text for span in found.related} >= {part.strip() for part in switch.replace(", ", "\n").split("\n")}
    assert all(f"`held.{name}.train()`" in found.fixes[0].title for name in "ab")
    end = 1 + (HEAD + source).split("\n").index("        score = (held.a(torch.randn(4, 4)) * held.b(torch.randn(4, 4))).sum()")
    assert f"after line {end}" in found.fixes[0].title
    assert not said(tmp_path, applied(source, found.fixes[0].patch or ""))


@pytest.mark.parametrize(
    "back",
    [
        "held.a.train(); held.b.train()",  # both
        "held.a.train(); held.b.requires_grad_(False)",  # frozen from here on
    ],
)
def test_what_is_put_back_or_frozen_is_not_named(tmp_path: Path, back: str) -> None:
    source = TWO.replace("SWITCH", "self.a.eval()\n        self.b.eval()").replace("    return score", f"    {back}\n    return score")
    assert "GG609" not in [each.code for each in said(tmp_path, source)]


def test_one_of_two_that_is_put_back(tmp_path: Path) -> None:
    source = TWO.replace("SWITCH", "self.a.eval()\n        self.b.eval()").replace(
        "    return score", "    held.b.train()\n    return score"
    )
    found = only(tmp_path, source, "GG609", "held.freeze()")
    assert "`pair.a` is trained" in found.headline and "pair.b" not in found.headline


INLINE = """
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
teacher = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(24):
    opt.zero_grad()
    net(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    if step == 8:
        BODY
"""


@pytest.mark.parametrize(
    ("body", "speaks"),
    [
        ("net.eval()\n        with torch.no_grad():\n            net(torch.randn(4, 4))", True),
        ("net.eval()\n        with torch.no_grad():\n            net(torch.randn(4, 4))\n        teacher.eval()", True),
        ("net[1].eval()\n        with torch.no_grad():\n            teacher(torch.randn(4, 4))", False),  # the norm is meant to be fixed
    ],
)
def test_switch_in_the_loop(tmp_path: Path, body: str, speaks: bool) -> None:
    source = INLINE.replace("BODY", body)
    if not speaks:
        assert said(tmp_path, source) == []
        return
    found = only(tmp_path, source, "GG609", "net.eval()")
    assert found.fixes[0].patch is not None and "+        net.train()" in found.fixes[0].patch
    assert not said(tmp_path, applied(source, found.fixes[0].patch or ""))
