"""What an expression of the user's is worth, worked out from the source and the frames on the stack without running any of their code."""

from __future__ import annotations

import argparse
import ast
from types import SimpleNamespace
from typing import Any

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.interpreter import BUILTINS, Interpreter, UnknownError
from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.safe_read import class_attributes, elements, function_code, modules_in, namespace, variables_of
from gradguard.rules.spans import function_around

_DEPTH = 4  # calls, from a function's parameter to what its caller was given
_PLAIN = (str, int, float, bool, type(None))


class KnownValues:
    """Evaluates expressions.

    Args:
        incident: whose frames have variables.
        sources: the files in which calls of a function are looked for.
    """

    def __init__(self, incident: Incident, sources: list[Source]) -> None:
        self._frames = [view.frame for view in incident.user_frames]
        self._sources = sources
        self._modules = [value for _, value in incident.names.bindings if isinstance(value, nn.Module)]

    def scope(self, source: Source, node: ast.AST, bound: set[str]) -> dict[str, Any]:
        """The values of what an expression or statement reads, but for the names that it binds itself."""
        inside = {
            n.id for each in ast.walk(node) if isinstance(each, ast.comprehension) for n in ast.walk(each.target) if isinstance(n, ast.Name)
        }
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - bound - inside
        return {name: self.variable(source, function_around(source, node), name) for name in sorted(names) if name not in BUILTINS}

    def value(self, source: Source, node: ast.expr, scope: dict[str, Any] | None = None) -> Any:
        """An expression's value."""
        return Interpreter(self.scope(source, node, set()) if scope is None else scope).value(node)

    def truth(self, source: Source, node: ast.expr, scope: dict[str, Any] | None = None) -> bool:
        """Whether a condition is true."""
        return Interpreter(self.scope(source, node, set()) if scope is None else scope).truth(node)

    def variable(self, source: Source, function: ast.AST | None, name: str, depth: int = 0) -> Any:
        """What a name is worth where it is read in a function, or at the file's own level."""
        if depth > _DEPTH:
            raise UnknownError
        if name == "self":
            return self.instance(source, function)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            sets = _sets(function, name)
            given = function.args
            if any(argument.arg == name for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)):
                if sets:
                    raise UnknownError
                return self._argument(source, function, name, depth)
            if sets:
                return self._set_once(source, function, sets, name)
        elif function is not None:
            raise UnknownError
        sets = _sets(source.tree, name) if source.tree is not None else []
        frame = next((frame for frame in self._frames if frame.f_code.co_filename == source.filename), None)
        held = {} if frame is None else namespace(frame.f_globals)
        if name not in held or len(sets) > 1:
            raise UnknownError
        return _still(held[name])

    def instance(self, source: Source, function: ast.AST | None) -> nn.Module:
        """The one module of the class that a method belongs to."""
        around = (
            next((above for above in source.ancestors(function) if isinstance(above, ast.ClassDef)), None) if function is not None else None
        )
        found = {
            id(m): m for root in self._modules for m in modules_in(root) if around is not None and _is_of(m, around.name, source.filename)
        }
        if len(found) != 1:
            raise UnknownError
        return found.popitem()[1]

    def calls(self, source: Source, function: ast.AST | None) -> list[tuple[Source, ast.Call]]:
        """Every call of a function by its name, in its own file if there is any; of a constructor by its class's."""
        name = getattr(function, "name", None)
        if name == "__init__" and function is not None:
            name = next((above.name for above in source.ancestors(function) if isinstance(above, ast.ClassDef)), None)
        for sources in ([source], [each for each in self._sources if each is not source]):
            found = [
                (each, node)
                for each in sources
                for node in ast.walk(each.tree or ast.Module([], []))
                if name is not None and isinstance(node, ast.Call) and (dotted(node.func) or "").rpartition(".")[2] == name
            ]
            if found:
                return found
        return []

    def _argument(self, source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, depth: int) -> Any:
        calls = self.calls(source, function)
        if len(calls) != 1:
            raise UnknownError
        where, call = calls[0]
        given = function.args
        positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
        defaults = dict(zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True))
        defaults.update({a.arg: d for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None})
        shift = 1 if positional[:1] in (["self"], ["cls"]) else 0
        if any(isinstance(a, ast.Starred) for a in call.args) or any(word.arg is None for word in call.keywords):
            raise UnknownError
        passed = dict(zip(positional[shift:], call.args, strict=False)) | {word.arg: word.value for word in call.keywords if word.arg}
        if name in passed:
            inner = function_around(where, call)
            names = {n.id for n in ast.walk(passed[name]) if isinstance(n, ast.Name)} - BUILTINS
            return self.value(where, passed[name], {each: self.variable(where, inner, each, depth + 1) for each in names})
        if name in defaults:
            return self.value(source, defaults[name], {})
        raise UnknownError

    def _set_once(self, source: Source, function: ast.AST, sets: list[ast.AST], name: str) -> Any:
        frame = next((f for f in self._frames if f.f_code.co_filename == source.filename and _is_code_of(f.f_code, function)), None)
        if len(sets) != 1:
            raise UnknownError
        if frame is not None and name in (held := variables_of(frame)):
            return _still(held[name])
        if isinstance(sets[0], ast.Assign):
            return self.value(source, sets[0].value, {})
        raise UnknownError


def _sets(scope: ast.AST, name: str) -> list[ast.AST]:
    """The statements of a scope (not of functions inside it) that bind a name."""
    found: list[ast.AST] = []
    stack = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
            found += [
                node for target in targets if target is not None and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(target))
            ]
        stack += ast.iter_child_nodes(node)
    return found


def _is_code_of(code: Any, function: ast.AST) -> bool:
    first, last = getattr(function, "lineno", 0), getattr(function, "end_lineno", 0)
    return bool(code.co_name == getattr(function, "name", None) and first - 8 <= code.co_firstlineno <= last)


def _is_of(module: nn.Module, name: str, file: str) -> bool:
    """Whether it is an object of the class of this name that stands in a file."""
    return any(
        kind.__name__ == name
        and any((code := function_code(v)) is not None and code.co_filename == file for v in class_attributes(kind).values())
        for kind in type(module).__mro__
    )


def _still(value: Any) -> Any:
    """What is read without running anything of the user's."""
    if type(value) in _PLAIN or isinstance(value, (nn.Module, SimpleNamespace, argparse.Namespace)):
        return value
    if type(value) in (tuple, list, set, frozenset) and all(type(item) in _PLAIN for item in elements(value)):
        return value
    raise UnknownError
