"""What others say of the programs in tests/cases: beniget's def-use chains of local variables, executing's nodes of running calls."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gradguard.analysis.program.index import Program
from gradguard.analysis.program.syntax import FUNCTIONS, Source

CASES = Path(__file__).parents[2] / "cases"
FAMILIES = sorted({path.parent.name for path in CASES.glob("*/*.py")} - {"spellings", "seeds"})


@cache
def program(path: Path) -> Program:
    return Program(Source(str(path), path.read_text().splitlines(True)))


def _place(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


@pytest.mark.parametrize("family", FAMILIES)
def test_beniget_knows_no_use_that_is_missing(family: str) -> None:
    """Every use of a local variable that beniget connects with a definition is one that the definition reaches, and the other way round
    where a definition is the only one of its variable."""
    beniget = pytest.importorskip("beniget")
    gast = pytest.importorskip("gast")
    compared = 0
    for path in sorted((CASES / family).glob("*.py"))[:15]:
        asked = program(path)
        tree = gast.parse(path.read_text())
        chains = beniget.DefUseChains()
        chains.visit(tree)
        ours: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for read, definitions in asked._reaching.reads.items():
            for definition in definitions:
                if definition.kind in ("assign", "loop", "with", "parameter") and isinstance(definition.scope, FUNCTIONS):
                    ours.setdefault(_place(definition.node), set()).add(_place(read))
        for scope, definitions in chains.locals.items():
            if not isinstance(scope, (gast.FunctionDef, gast.AsyncFunctionDef)):
                continue
            names = [one.name() for one in definitions]
            for definition in definitions:
                if not isinstance(definition.node, gast.Name) or definition.name() == "self":
                    continue
                theirs = {_place(use.node) for use in definition.users() if isinstance(use.node, gast.Name)}
                found = ours.get(_place(definition.node), set())
                missing = theirs - found
                assert not missing, f"{path.name}: {definition.name()} of line {definition.node.lineno}: {missing}"
                if names.count(definition.name()) == 1:
                    assert found - theirs <= {_place(definition.node)}, f"{path.name}: {definition.name()} of {definition.node.lineno}"
                compared += 1
    assert compared > 20


def test_executing_finds_the_same_calls(tmp_path: Path) -> None:
    """Of a program that runs, each call of a function of its own is one of that function's callers."""
    executing = pytest.importorskip("executing")
    path = tmp_path / "running.py"
    path.write_text(_RUNNING)
    asked = Program(Source(str(path), _RUNNING.splitlines(True)))
    seen: set[tuple[str, tuple[int, int]]] = set()

    def watch(frame: Any, event: str, arg: object) -> None:
        if event != "call" or frame.f_code.co_filename != str(path) or frame.f_back.f_code.co_filename != str(path):
            return
        node = executing.Source.executing(frame.f_back).node
        if isinstance(node, ast.Call):
            seen.add((frame.f_code.co_name, _place(node)))

    code = compile(_RUNNING, str(path), "exec")
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        exec(code, {"__name__": "running"})
    finally:
        sys.setprofile(before)
    callers = {
        (getattr(scope, "name", "<lambda>"), _place(call))
        for scope in asked.source.scopes
        if isinstance(scope, FUNCTIONS)
        for call in asked.callers(scope)
    }
    assert len(seen) >= 9
    assert seen <= callers, seen - callers


_RUNNING = """
from functools import partial

def scale(x, by=2):
    return x * by

class Layer:
    def __init__(self, size):
        self.size = size

    def __call__(self, x):
        return self.forward(x)

    def forward(self, x):
        return scale(x, self.size)

class Wide(Layer):
    def forward(self, x):
        return super().forward(x) + 1

class Model:
    def __init__(self):
        self.layers = [Layer(1), Wide(2)]
        self.head = Wide(3)

    def run(self, x):
        halve = lambda y: scale(y, 0.5)
        return self.head(halve(x))

twice = partial(scale, by=2)
again = twice
model = Model()
model.run(again(1))
for layer in model.layers:
    layer.forward(1)
"""
