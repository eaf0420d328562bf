"""Programs for the tests of the queries, and how these point at nodes."""

from __future__ import annotations

import ast
from textwrap import dedent
from typing import Any

from gradguard.analysis.program.index import UNKNOWN, Definition, Program
from gradguard.analysis.program.syntax import Source


def program(text: str) -> Program:
    text = dedent(text).strip("\n") + "\n"
    ast.parse(text)
    return Program(Source("<test>", text.splitlines(True)))


def node(asked: Program, text: str, line: int | None = None, nth: int = 0) -> Any:
    """The nth expression or statement with this text, on this line."""
    found = [
        each
        for each in asked.source.parents
        if isinstance(each, (ast.expr, ast.stmt, ast.comprehension)) and (line is None or getattr(each, "lineno", 0) == line)
    ]
    found = [each for each in found if ast.unparse(each) == text and not isinstance(each, ast.Expr)]
    found.sort(key=lambda each: (each.lineno, each.col_offset))
    return found[nth]


def function(asked: Program, name: str) -> Any:
    return next(each for each in asked.source.scopes if getattr(each, "name", None) == name)


def lines(definitions: Any) -> set[int | str]:
    """Where definitions stand; "?" for what is not in the file."""
    return {"?" if each is UNKNOWN else each.line for each in definitions}


def texts(found: Any) -> list[str]:
    return ["?" if each is UNKNOWN else each.name if isinstance(each, Definition) else ast.unparse(each) for each in found]
