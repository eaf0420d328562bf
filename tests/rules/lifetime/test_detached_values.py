"""What is written to detach a carried value follows from the value: a tensor, tuples, lists, dicts, and these in each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, only, said

STATES = """
from collections import namedtuple
State = namedtuple("State", "h c")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 4), nn.Linear(4, 1)

    def forward(self, x, state):
        h, c = self.cell(x, None if state is None else UNPACK)
        return self.out(h), MADE

class Runner:
    def __init__(self):
        self.net, self.kept, self.state = Net(), {}, None
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self):
        out, state = self.net(torch.randn(2, 4), GET)
        self.opt.zero_grad()
        out.pow(2).mean().backward()
        STORE
        self.opt.step()

runner = Runner()
for _ in range(4):
    runner.step()
"""
SHAPES = {
    "tuple": ("state", "(h, c)", "tuple(part.detach() for part in {})"),
    "list": ("state", "[h, c]", "[part.detach() for part in {}]"),
    "dict": ('(state["h"], state["c"])', '{"h": h, "c": c}', "{{key: part.detach() for key, part in {}.items()}}"),
    "of layers": ("state[0]", "[(h, c)]", "[tuple(item.detach() for item in part) for part in {}]"),
    "named": ("tuple(state)", "State(h, c)", "type({0})(*(part.detach() for part in {0}))"),
}


def source_of(shape: str, get: str, store: str) -> str:
    unpack, made, _ = SHAPES[shape]
    return STATES.replace("UNPACK", unpack).replace("MADE", made).replace("GET", get).replace("STORE", store)


@pytest.mark.parametrize("shape", SHAPES)
def test_item_of_a_container(tmp_path: Path, shape: str) -> None:
    store = 'self.kept["s"] = state'
    source = source_of(shape, 'self.kept.get("s")', store)
    found = only(tmp_path, source, "GG203", store)
    text = SHAPES[shape][2].format("state")
    assert f"`{text}`" in found.fixes[0].title and text in (found.fixes[0].patch or "")
    assert not said(tmp_path, applied(source, found.fixes[0].patch or ""))


@pytest.mark.parametrize("shape", SHAPES)
def test_attribute(tmp_path: Path, shape: str) -> None:
    source = source_of(shape, "self.state", "self.state = state")
    (found,) = said(tmp_path, source)
    assert found.code == "GG203"
    text = SHAPES[shape][2].format("self.state")
    assert text in found.fixes[0].title
    assert not said(tmp_path, applied(source, found.fixes[0].patch or ""))


def test_all_of_a_pair_that_is_stored(tmp_path: Path) -> None:
    source = source_of("tuple", 'self.kept.get("s")', 'h, c = state\n        self.kept["s"] = (h, c)')
    found = only(tmp_path, source, "GG203", 'self.kept["s"] = (h, c)')
    assert "`h.detach()` and `c.detach()`" in found.fixes[0].title
    assert not said(tmp_path, applied(source, found.fixes[0].patch or ""))
