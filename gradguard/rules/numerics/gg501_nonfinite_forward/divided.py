"""Quotients whose divisor is 0, told by computing the divisor again from the variables that are still there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.tensor_expressions import UNKNOWN, Evaluator
from gradguard.analysis.places.source import ResolvedSite, at_line, function_def
from gradguard.analysis.program.expressions import inside
from gradguard.core.callsite import USER_FILES

_DEPTH = 3


def divided_by_zero(view: FrameView, place: ResolvedSite, rebound: str) -> ResolvedSite | None:
    """The line that divides by 0: the statement's own, or that of a function of the user's that it calls.

    Args:
        view: the frame that the statement has run in; its variables have their values since.
        place: the statement.
        rebound: the variable it has bound, whose value before is not known any more.
    """
    value = getattr(place.statement, "value", None)
    if not isinstance(value, ast.expr):
        return None
    values = {name: item for name, item in view.locals.items() if name != rebound}
    outer = {name: item for name, item in view.globals.items() if name != rebound}
    return _in(value, values, outer, place.file, _DEPTH)


def _in(value: ast.expr, values: Mapping[str, Any], outer: Mapping[str, Any], file: str, depth: int) -> ResolvedSite | None:
    known = Evaluator(values, outer)
    for divisor in _divisors(value):
        found = known.of(divisor)
        if isinstance(found, torch.Tensor) and found.device.type != "meta" and bool((found == 0).any()):
            return at_line(file, divisor.lineno)
    for call in (node for node in inside(value, ast.Call) if isinstance(node.func, ast.Name)):
        inner = _called(call, known, values, outer, depth)
        if inner is not None:
            return inner
    return None


def _divisors(value: ast.AST) -> Iterator[ast.expr]:
    return (node.right for node in inside(value, ast.BinOp) if isinstance(node.op, ast.Div))


def _called(call: ast.Call, known: Evaluator, values: Mapping[str, Any], outer: Mapping[str, Any], depth: int) -> ResolvedSite | None:
    """The same in the only `return` of a plain function, whose parameters are bound to what they were given."""
    assert isinstance(call.func, ast.Name)
    function = values.get(call.func.id, outer.get(call.func.id))
    if depth <= 0 or type(function) is not FunctionType or not USER_FILES[function.__code__.co_filename]:
        return None
    tree = function_def(function.__code__)
    body = [item for item in getattr(tree, "body", ()) if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
    if not isinstance(tree, ast.FunctionDef) or len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None:
        return None
    if tree.args.vararg or tree.args.kwarg or tree.args.posonlyargs or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    names = [argument.arg for argument in tree.args.args]
    bound: dict[str, Any] = dict.fromkeys((*names, *(argument.arg for argument in tree.args.kwonlyargs)), UNKNOWN)
    defaults = function.__defaults__ or ()
    bound.update(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    bound.update(function.__kwdefaults__ or {})
    bound.update((name, known.of(argument)) for name, argument in zip(names, call.args, strict=False))
    bound.update((word.arg, known.of(word.value)) for word in call.keywords if word.arg is not None)
    return _in(body[0].value, bound, function.__globals__, function.__code__.co_filename, depth - 1)
