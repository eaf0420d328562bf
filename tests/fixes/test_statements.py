"""Repairs of whole statements: what the file is after the diff, and where no diff is given."""

from __future__ import annotations

import ast
import textwrap
from typing import TypeVar

import pytest

from gradguard.analysis.program.syntax import Source, range_of
from gradguard.fixes.edits import before, patched
from gradguard.fixes.statements import moved_after, moved_before, siblings, swapped, unwrapped, wrapped
from tests.running import applied

T = TypeVar("T", bound=ast.stmt)


def source_of(text: str) -> Source:
    return Source("program.py", textwrap.dedent(text).lstrip().splitlines(keepends=True))


def find(source: Source, kind: type[T], text: str = "") -> T:
    assert source.tree is not None
    return next(node for node in ast.walk(source.tree) if isinstance(node, kind) and text in (source.segment(node) or ""))


def after(source: Source, patch: str | None) -> str:
    assert patch is not None
    return applied("".join(source.lines), patch)


def test_a_statement_moves_into_a_loop_with_the_loops_indentation() -> None:
    source = source_of(
        """
        loss = f(w)  # the forward pass
        for step in range(3):
            loss.backward()
        """
    )
    moved = moved_before(source, [find(source, ast.Assign)], find(source, ast.Expr, "backward"))
    assert after(source, moved) == "for step in range(3):\n    loss = f(w)  # the forward pass\n    loss.backward()\n"


def test_statements_move_and_repeat_after_an_anchor_in_their_order() -> None:
    source = source_of("a = 1\nb = 2\nstep()\nend()\n")
    both = [find(source, ast.Assign, "b"), find(source, ast.Assign, "a")]
    assert after(source, moved_after(source, both, find(source, ast.Expr, "step"))) == "step()\na = 1\nb = 2\nend()\n"
    assert (
        after(source, moved_after(source, both, find(source, ast.Expr, "step"), keep=True)) == "a = 1\nb = 2\nstep()\na = 1\nb = 2\nend()\n"
    )


def test_a_block_is_taken_away_and_its_body_kept() -> None:
    source = source_of(
        """
        def f(x):
            with torch.no_grad():
                # comment
                y = g(x)
                if y:
                    y = 0
            return y
        """
    )
    assert after(source, unwrapped(source, find(source, ast.With))) == "def f(x):\n    y = g(x)\n    if y:\n        y = 0\n    return y\n"


def test_a_condition_with_an_else_is_not_taken_away() -> None:
    source = source_of("if a:\n    b = 1\nelse:\n    b = 2\n")
    assert unwrapped(source, find(source, ast.If)) is None


def test_statements_are_put_under_a_header_that_needs_an_import() -> None:
    source = source_of("import torch\n\n\ndef f(x):\n    y = g(x)\n    z = y + 1\n    return z\n")
    run = [find(source, ast.Assign, "y = g"), find(source, ast.Assign, "z =")]
    patch = wrapped(source, run, "with math():", "from backends import math")
    assert after(source, patch) == (
        "import torch\nfrom backends import math\n\n\ndef f(x):\n    with math():\n        y = g(x)\n        z = y + 1\n    return z\n"
    )


def test_a_with_around_a_loop_becomes_a_with_in_the_loop() -> None:
    source = source_of("with cached():\n    for x in data:\n        loss = f(x)\n        loss.backward()\n")
    outer = find(source, ast.With)
    assert after(source, swapped(source, outer, find(source, ast.For))) == (
        "for x in data:\n    with cached():\n        loss = f(x)\n        loss.backward()\n"
    )


def test_a_with_that_holds_more_than_the_loop_stays() -> None:
    source = source_of("with cached():\n    first()\n    for x in data:\n        f(x)\n")
    assert swapped(source, find(source, ast.With), find(source, ast.For)) is None


def test_a_string_over_several_lines_is_not_reindented() -> None:
    source = source_of('text = """a\nb"""\nfor step in range(3):\n    use(text)\n')
    assert moved_before(source, [find(source, ast.Assign)], find(source, ast.Expr, "use")) is None


@pytest.mark.parametrize("line", ["x = 1; y = 2", "if a: x = 1"])
def test_a_statement_that_shares_its_line_is_not_moved(line: str) -> None:
    source = source_of(f"{line}\nstep()\n")
    assert moved_after(source, [find(source, ast.Assign, "2" if ";" in line else "1")], find(source, ast.Expr, "step()")) is None


def test_several_lines_put_before_one_statement_keep_their_order() -> None:
    source = source_of("b = 1\na = 2\n")
    first = find(source, ast.Assign, "b")
    assert (
        after(source, patched(source, insert=[before(source, first, "z = 0"), before(source, first, "a = 0")]))
        == "z = 0\na = 0\nb = 1\na = 2\n"
    )


def test_siblings_are_those_of_the_same_block() -> None:
    source = source_of("if a:\n    b = 1\n    c = 2\nelse:\n    d = 3\n")
    assert [source.segment(item) for item in siblings(source, find(source, ast.Assign, "c"))] == ["b = 1", "c = 2"]


METHOD = """
class Net:
    @staticmethod
    def forward(x):
        text = '''
lies at the margin'''
        return x + 1

    def last(self):
        return 2
"""


@pytest.mark.parametrize(
    ("new", "valid"),
    [
        ("x + 2", True),
        ("(x +", False),
        ("x\nprint(x)", False),  # ends the method and the class
        ("x\n    y = 2", True),  # is then in the class
        ("x)", False),
    ],
)
def test_a_patch_is_only_given_where_the_file_is_still_python(new: str, valid: bool) -> None:
    source = source_of(METHOD)
    node = find(source, ast.BinOp)
    patch = patched(source, [(range_of(node), new)])  # type: ignore[list-item]
    assert (patch is not None) == valid
    if valid:
        assert new in after(source, patch)


def test_the_statement_at_a_line_is_the_innermost() -> None:
    source = source_of(METHOD)
    found = [source.statement_at(line) for line in range(1, len(source.lines) + 1)]
    kinds = [type(node).__name__ for node in found]
    assert kinds == ["ClassDef", "FunctionDef", "FunctionDef", "Assign", "Assign", "Return", "NoneType", "FunctionDef", "Return"]
