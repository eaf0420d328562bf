"""Questions about one expression or statement: what is in it, what is called, what a call is given."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeVar, overload

from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.syntax import Source

A = TypeVar("A", bound=ast.AST)
B = TypeVar("B", bound=ast.AST)
C = TypeVar("C", bound=ast.AST)
_CLOSED = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


@overload
def inside(node: ast.AST | None, kind: type[A], /) -> Iterator[A]: ...


@overload
def inside(node: ast.AST | None, kind: type[A], second: type[B], /) -> Iterator[A | B]: ...


@overload
def inside(node: ast.AST | None, kind: type[A], second: type[B], third: type[C], /) -> Iterator[A | B | C]: ...


def inside(node: ast.AST | None, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of these kinds in a tree, itself among them, outer ones first; none where there is no tree."""
    return (each for each in ast.walk(node) if isinstance(each, kinds)) if node is not None else iter(())


def last_part(node: ast.AST) -> str:
    """`step` of `self.scaler.step`, and of a call of it; nothing where what is called has no name."""
    callee = node.func if isinstance(node, ast.Call) else node
    return callee.attr if isinstance(callee, ast.Attribute) else callee.id if isinstance(callee, ast.Name) else ""


def calls_inside(node: ast.AST | None, *names: str) -> Iterator[ast.Call]:
    """The calls in a tree of what has one of these names."""
    return (call for call in inside(node, ast.Call) if last_part(call) in names)


def given(call: ast.Call | None) -> list[ast.expr]:
    """What a call is given, by position and by name."""
    return [] if call is None else [*call.args, *(word.value for word in call.keywords)]


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """What a call gives by a name, or at a position; None where it gives nothing there, or a star hides what."""
    by_name = next((word.value for word in call.keywords if word.arg == name), None)
    if by_name is not None or position is None or position >= len(call.args):
        return by_name
    return None if any(isinstance(each, ast.Starred) for each in call.args[: position + 1]) else call.args[position]


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    """A keyword argument of a call, with its name."""
    return next((word for word in call.keywords if word.arg == name), None)


def reads(node: ast.AST | None, name: str) -> list[ast.Name | ast.Attribute]:
    """The reads of a variable (`h`, `self.h`) in a tree."""
    return [each for each in inside(node, ast.Name, ast.Attribute) if isinstance(each.ctx, ast.Load) and dotted(each) == name]


def is_constant(node: ast.AST | None, *values: object) -> bool:
    """Whether a node is one of these constants, as it is written: 1 is not True, nor 1.0."""
    return isinstance(node, ast.Constant) and any(type(node.value) is type(each) and node.value == each for each in values)


def closed(source: Source, node: ast.expr) -> str:
    """The text of an expression as a method's receiver: in parentheses, unless it needs none."""
    text = source.segment(node) or ""
    return text if isinstance(node, _CLOSED) else f"({text})"
