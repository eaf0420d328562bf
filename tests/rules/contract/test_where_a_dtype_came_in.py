"""A float64 tensor that is mixed into the computation long before a layer refuses the result: the line that made it is the culprit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, applied, run_source

NET = """
class Net(nn.Module):
    def __init__(self, given=None):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        SET
    def mixed(self, x):
        h = self.a(x)
        h = h + USE
        return torch.relu(h)
    def forward(self, x):
        h = self.mixed(x)
        return self.b(h)

def table(n):
    rows = np.linspace(0, 1, n)
    return torch.from_numpy(rows)  # << buffer

def main():
    given = torch.as_tensor(np.linspace(0, 1, 8))  # << argument
    net = Net(given)
    net.outside = torch.arange(8).double()  # << outside
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(3, 4)).sum().backward()
        opt.step()

main()
"""

SEQUENCE = """
class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.ones(8, dtype=torch.float64))  # <<
    def forward(self, x):
        return x + self.by

net = nn.Sequential(nn.Linear(4, 8), Shift(), nn.ReLU(), nn.Linear(8, 2))
net(torch.randn(3, 4)).sum().backward()
"""


def _source(use: str, given: str = "pass") -> str:
    return f"import numpy as np\n{HEAD}{NET}".replace("SET", given).replace("USE", use)


@pytest.mark.parametrize(
    ("which", "use", "given"),
    [
        ("buffer", "self.rows[: h.shape[1]]", 'self.register_buffer("rows", table(8))'),
        ("argument", "self.given", "self.given = given"),
        ("outside", "self.outside", "pass"),
    ],
)
def test_the_line_that_made_it(tmp_path: Path, which: str, use: str, given: str) -> None:
    source = _source(use, given)
    [(found, text)] = run_source(tmp_path, source)
    line = next(i for i, each in enumerate(source.splitlines(), 1) if each.endswith(f"# << {which}"))
    assert found.code == "GG404" and found.culprit is not None and found.culprit.line == line, text
    assert not run_source(tmp_path, applied(source, found.fixes[0].patch or ""))


def test_between_the_layers_of_a_sequence(tmp_path: Path) -> None:
    source = HEAD + SEQUENCE
    [(found, text)] = run_source(tmp_path, source)
    assert found.culprit is not None and (found.culprit.text or "").startswith("torch.ones("), text
    assert not run_source(tmp_path, applied(source, found.fixes[0].patch or ""))


def test_a_float32_table_beside_it_is_not_blamed(tmp_path: Path) -> None:
    given = "self.rows = torch.from_numpy(np.ones(8, dtype=np.float32)); self.gain = nn.Parameter(torch.from_numpy(np.ones(8)))"
    source = _source("self.rows * self.gain", given)
    [(found, text)] = run_source(tmp_path, source)
    assert found.culprit is not None and found.culprit.text == "torch.from_numpy(np.ones(8))", text
