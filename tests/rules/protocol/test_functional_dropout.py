"""GG609 about dropout called as a function: the line that ran is told, in forward, in a method or in a function outside the class."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import said

PROGRAM = """
{outside}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.deep, self.p = nn.Linear(4, 6), nn.Linear(6, 1), {deep}, 0.4

    def forward(self, x):
{forward}
{methods}
net = Net()
opt = torch.optim.Adam(net.parameters())
for epoch in range(3):
    net.train()
    for _ in range(5):
        opt.zero_grad()
        net(torch.randn(5, 4)).pow(2).mean().backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        net(torch.randn(5, 4))
"""

TWO_WAYS = """
        h = self.body(x).relu()
        if self.deep:
            h = F.dropout(h, 0.1)
        else:
            h = F.dropout(h, self.p)
        return self.head(h)
"""
OUTSIDE = """
def thinned(h, p):
    return F.dropout(h.relu(), p)
"""
GATED = """
def thinned(h, p, on):
    if on:
        h = F.dropout(h, p)
    return h
"""
EARLY = """
        h = self.body(x)
        if not self.training:
            return self.head(h)
        return self.head(F.dropout(h, 0.4))
"""
METHOD = """
    def thinned(self, h):
        return F.dropout(h, 0.4)
"""


def program(forward: str, outside: str = "", methods: str = "", deep: str = "False") -> str:
    return PROGRAM.format(forward=forward, outside=outside, methods=methods, deep=deep)


BROKEN = {
    "the second branch": (program(TWO_WAYS), "F.dropout(h, self.p)", "in `Net`"),
    "the first branch": (program(TWO_WAYS, deep="True"), "F.dropout(h, 0.1)", "in `Net`"),
    "a function outside": (
        program("        return self.head(thinned(self.body(x), 0.4))", OUTSIDE),
        "F.dropout(h.relu(), p)",
        "in `thinned`, which `Net` calls,",
    ),
    "a function called by a function": (
        program("        return self.head(both(self.body(x)))", OUTSIDE + "\ndef both(h):\n    return thinned(h, 0.3) + h\n"),
        "F.dropout(h.relu(), p)",
        "in `thinned`, which `Net` calls,",
    ),
    "a method": (program("        return self.head(self.thinned(self.body(x)))", methods=METHOD), "F.dropout(h, 0.4)", "in `Net`"),
}

SOUND = {
    "a branch that asks for the mode": program(
        "        h = self.body(x)\n        if self.training:\n            h = F.dropout(h, 0.4)\n        return self.head(h)"
    ),
    "a way out before it": program(EARLY),
    "a function that is told": program("        return self.head(thinned(self.body(x), 0.4, self.training))", GATED),
    "a function that is given no probability": program(
        "        return self.head(thinned(self.body(x), 0.4 if self.training else 0.0))", OUTSIDE
    ),
    "a function called in training alone": program(
        "        h = self.body(x)\n        if self.training:\n            h = thinned(h, 0.4)\n        return self.head(h)", OUTSIDE
    ),
    "a method called in training alone": program(
        "        h = self.body(x)\n        if self.training:\n            h = self.thinned(h)\n        return self.head(h)", methods=METHOD
    ),
    "a function that nobody calls": program("        return self.head(self.body(x))", OUTSIDE),
    "a branch that never runs": program(
        "        h = self.body(x)\n        if self.deep:\n            h = F.dropout(h, 0.4)\n        return self.head(h)"
    ),
}


@pytest.mark.parametrize("slug", BROKEN)
def test_the_line_that_ran_is_told(slug: str, tmp_path: Path) -> None:
    source, text, where = BROKEN[slug]
    found = said(tmp_path, source)
    assert [diagnosis.code for diagnosis in found] == ["GG609"]
    assert found[0].culprit is not None and found[0].culprit.text == text
    assert where in found[0].headline


@pytest.mark.parametrize("slug", SOUND)
def test_who_asks_for_the_mode_is_left_alone(slug: str, tmp_path: Path) -> None:
    assert said(tmp_path, SOUND[slug]) == []
