"""Questions about one expression."""

from __future__ import annotations

import ast

import pytest

from gradguard.analysis.program.expressions import argument, calls_inside, closed, given, inside, is_constant, last_part, reads
from tests.analysis.program.programs import node, program


def _expr(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


ARGUMENT: dict[str, tuple[str, str | None]] = {
    "by name": ("f(1, key=2)", "2"),
    "by position": ("f(1, 2)", "2"),
    "neither": ("f(1)", None),
    "behind a star": ("f(*a, 2)", None),
    "a star after it": ("f(1, 2, *a)", "2"),
    "by name in spite of a star": ("f(*a, key=2)", "2"),
}


@pytest.mark.parametrize(("text", "wanted"), ARGUMENT.values(), ids=ARGUMENT)
def test_argument(text: str, wanted: str | None) -> None:
    call = _expr(text)
    assert isinstance(call, ast.Call)
    found = argument(call, "key", 1)
    assert (None if found is None else ast.unparse(found)) == wanted


def test_what_is_called_and_given() -> None:
    call = _expr("self.scaler.step(opt, a=1)")
    assert isinstance(call, ast.Call)
    assert [last_part(call), last_part(call.func), last_part(_expr("f(x)")), last_part(_expr("table[0](x)"))] == ["step", "step", "f", ""]
    assert [ast.unparse(each) for each in given(call)] == ["opt", "1"]
    assert given(None) == []


def test_what_is_inside() -> None:
    tree = ast.parse("h = f(self.h, x.h) + g(h)")
    assert [last_part(call) for call in calls_inside(tree, "f", "g")] == ["f", "g"]
    assert list(inside(None, ast.Call)) == []
    assert [ast.unparse(each) for each in reads(tree, "self.h")] == ["self.h"]
    assert [each.col_offset for each in reads(tree, "h")] == [23]


@pytest.mark.parametrize(("text", "wanted"), [("None", True), ("1", True), ("True", False), ("1.0", False), ("x", False)])
def test_is_constant(text: str, wanted: bool) -> None:
    assert is_constant(_expr(text), None, 1) is wanted


@pytest.mark.parametrize(("text", "wanted"), [("a + b", "(a + b)"), ("f(a)", "f(a)"), ("a.b[0]", "a.b[0]"), ("-a", "(-a)")])
def test_closed(text: str, wanted: str) -> None:
    asked = program(f"y = {text}")
    assert closed(asked.source, node(asked, text)) == wanted
