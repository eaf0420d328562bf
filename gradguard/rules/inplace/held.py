"""Functions that are kept as values: in a container that a loop goes through, in a registry, as an attribute of a module.

No line names what such a call runs; the objects alive do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.program.bindings import dotted, flatten
from gradguard.analysis.program.blocks import loops_around
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.syntax import Source
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import attributes, elements, function_code, in_class, unless_loud

_MOST = 64


def code_of(function: object) -> CodeType | None:
    """The code that something callable runs: of a function, a method, a `partial` of one, an object that can be called."""
    function = unless_loud(function)
    while isinstance(function, partial):
        function = unless_loud(function.func)
    if not isinstance(function, (FunctionType, MethodType)):
        function = in_class(type(function), "__call__")
    return function_code(function)


def held_functions(frames: Iterable[FrameView], modules: Iterable[nn.Module]) -> dict[str, list[CodeType]]:
    """Variable or attribute name -> the user's functions in the container that it holds."""
    found: dict[str, list[CodeType]] = {}
    places: list[dict[str, Any]] = [attributes(module) for module in modules if USER_FILES[_file_of(module)]]
    for view in frames:
        places.append({name: view.globals[name] for name in view.frame.f_code.co_names if name in view.globals})
        places.append(view.locals)
        owner = view.locals.get("self")
        places.append(attributes(owner))
    for place in places:
        for name, value in place.items():
            codes = [code for each in _items(value) if (code := _users(each)) is not None]
            if codes:
                found.setdefault(name, []).extend(code for code in codes if code not in found[name])
    return found


def _file_of(module: nn.Module) -> str:
    code = function_code(in_class(type(module), "forward"))
    return code.co_filename if code is not None else "<unknown>"


def _items(value: Any) -> list[Any]:
    return elements(value, _MOST) if type(value) in (list, tuple, dict) else []


def _users(value: Any) -> CodeType | None:
    code = code_of(value) if isinstance(value, (FunctionType, MethodType, partial)) else None
    return code if code is not None and USER_FILES[code.co_filename] else None


def called_by_value(call: ast.Call, source: Source, held: dict[str, list[CodeType]]) -> Iterator[CodeType]:
    """What `f(x)` in `for f in self.steps`, and `REGISTRY[name](x)`, may run."""
    if isinstance(call.func, ast.Subscript):
        yield from held.get(last_part(call.func.value), ())
    if not isinstance(call.func, ast.Name):
        return
    for loop in loops_around(source, call):
        if not isinstance(loop, ast.While) and call.func.id in [dotted(single) for single in flatten(loop.target)]:
            for read in inside(loop.iter, ast.Name, ast.Attribute):
                yield from held.get(last_part(read), ())
            return
