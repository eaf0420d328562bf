"""Calls around an incident that hand the module inside of DDP to a function of the user's, which then runs it past DDP."""

from __future__ import annotations

import ast
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from gradguard.evidence.frames import FrameView
from gradguard.evidence.source import dotted, function_def
from gradguard.rules.frameworks import ddp as shared
from gradguard.rules.incident import Incident
from gradguard.safe_read import peek

_FRAMES = 8


def handed_on(incident: Incident, ddp: Any) -> list[tuple[str, ast.Call]]:
    """The calls in functions that are still running, with an argument that is the wrapped module, to a function that runs it with grad."""
    found = []
    for view in incident.user_frames[:_FRAMES]:
        file, around = view.frame.f_code.co_filename, function_def(view.frame.f_code)
        for node in ast.walk(around) if around is not None else ():
            if not isinstance(node, ast.Call) or shared.without_grad(file, node):
                continue
            given: list[int | str] = [i for i, argument in enumerate(node.args) if _stands_for(view, argument) is ddp.module]
            given += [word.arg for word in node.keywords if word.arg and _stands_for(view, word.value) is ddp.module]
            callee = _stands_for(view, node.func) if given else None
            if callee is not None and any(_runs(callee, each) for each in given):
                found.append((file, node))
    return found


def _stands_for(view: FrameView, node: ast.expr) -> Any:
    """What a dotted name stands for in one frame; None where that is not known. Runs no code of the user's."""
    name = dotted(node)
    if name is None:
        return None
    first, *rest = name.split(".")
    value = view.locals.get(first, view.globals.get(first))
    for part in rest:
        value = peek(value, part, None)
    return value


def _runs(callee: Any, given: int | str) -> bool:
    """Whether a function calls this argument of its own, or a method of the argument's that is no `nn.Module`'s, with grad mode on."""
    plain = callee.__func__ if isinstance(callee, MethodType) else callee
    if not isinstance(plain, FunctionType):
        return False
    # behind a decorator of torch's (`no_grad`) stands a wrapper whose code is not the user's
    function, file = function_def(plain.__code__), plain.__code__.co_filename
    if not isinstance(function, ast.FunctionDef) or function.name != plain.__name__:
        return False
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    if isinstance(given, int):
        given += isinstance(callee, MethodType)
        if given >= len(names):
            return False
        given = names[given]
    for node in ast.walk(function):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and (called.attr == "forward" or not hasattr(nn.Module, called.attr)):
            called = called.value
        if isinstance(called, ast.Name) and called.id == given and not shared.without_grad(file, node):
            return True
    return False
