"""Scopes: a function's (or a file's) source together with what is known of its variables.

A scope is either a live frame, whose variables are there to be looked at, or a function that has returned by now, of which
only the source is left, and what its parameters were called with.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.instructions import scope_of
from gradguard.analysis.places.source import assignments_to, resolve
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.expressions import argument
from gradguard.analysis.program.index import only, program_of
from gradguard.analysis.program.syntax import FUNCTIONS, Source, load
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import UNKNOWN, attributes, class_attributes, in_class, item_of, namespace, peek, unless_loud


@dataclass(eq=False)
class Scope:
    """Source of one function or module, its known variables, and the call that led into it."""

    source: Source
    tree: ast.AST
    values: Mapping[str, Any] = field(default_factory=dict)
    globals: Mapping[str, Any] = field(default_factory=dict)
    caller: tuple[Scope, ast.Call] | None = None

    @property
    def function(self) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        return self.tree if isinstance(self.tree, (ast.FunctionDef, ast.AsyncFunctionDef)) else None

    @property
    def qualname(self) -> str:
        return self.source.qualname(self.tree)

    def parameters(self) -> list[str]:
        """All parameters by name, in order."""
        return (
            []
            if not isinstance(self.tree, FUNCTIONS)
            else [a.arg for a in (*self.tree.args.posonlyargs, *self.tree.args.args, *self.tree.args.kwonlyargs)]
        )

    def argument(self, name: str) -> tuple[Scope, ast.expr] | None:
        """What a parameter was called with, in the caller's scope."""
        if self.caller is None or not isinstance(self.tree, FUNCTIONS):
            return None
        scope, call = self.caller
        program = program_of(scope.source)
        given = None if program is None else program.given(call, self.tree, name)
        return None if given is None else (scope, given)

    def evaluate(self, node: ast.expr) -> Any:
        """The value of a name, an attribute or an item, as far as it can be looked up without running anything; else UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in self.values:
                return self.values[node.id]
            if isinstance(self.tree, FUNCTIONS) and (node.id in self.parameters() or assignments_to(self.tree, node.id)):
                return UNKNOWN
            return self.globals.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            owner = self.evaluate(node.value)
            return UNKNOWN if isinstance(owner, torch.Tensor) else peek(owner, node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return item_of(self.evaluate(node.value), node.slice.value)
        return UNKNOWN


def frame_scopes(frames: Sequence[FrameView]) -> list[Scope]:
    """The user's frames as scopes, innermost first, each knowing the call that led into it."""
    scopes: list[Scope] = []
    for view in frames:
        if not view.is_user:
            continue
        source = load(view.frame.f_code.co_filename)
        tree = None if source is None else scope_of(source, view.frame.f_code)
        if source is None or tree is None:
            scopes.append(Scope(source or Source(view.frame.f_code.co_filename, []), ast.Module([], []), view.locals, view.globals))
            continue
        scope = Scope(source, tree, view.locals, view.globals)
        place = resolve(view.site)
        if scopes and place is not None and place.call is not None:
            scopes[-1].caller = (scope, place.call)
        scopes.append(scope)
    return scopes


def code_of(value: Any) -> tuple[CodeType | None, Any, Mapping[str, Any]]:
    """The user's code behind a callable, with the `self` it is bound to (UNKNOWN: none) and its globals."""
    bound: Any = UNKNOWN
    for _ in range(8):
        if isinstance(value, functools.partial):
            value = unless_loud(value.func)
        elif isinstance(value, MethodType):
            bound, value = unless_loud(value.__self__), unless_loud(value.__func__)
        elif isinstance(value, FunctionType):
            if USER_FILES[value.__code__.co_filename]:
                return value.__code__, bound, namespace(value.__globals__)
            inner = attributes(value).get("__wrapped__")
            if inner is None:
                break
            value = inner
        elif isinstance(value, nn.Module):
            forward = in_class(type(value), "forward")
            if not isinstance(forward, FunctionType):
                break
            value = MethodType(forward, value)
        elif value is UNKNOWN or isinstance(value, type):
            break
        else:
            called = in_class(type(value), "__call__")
            if not isinstance(called, FunctionType):
                break
            value = MethodType(called, value)
    return None, UNKNOWN, {}


def callee_scope(scope: Scope, call: ast.Call) -> Scope | None:
    """The scope of the user's function that a call runs (a module's forward, a custom Function's forward for `apply`); None for others'."""
    value = scope.evaluate(call.func)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "apply":
        owner = scope.evaluate(call.func.value)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            value = peek(owner, "forward")
    code, bound, names = code_of(value)
    if code is None and value is UNKNOWN:
        return _by_name(scope, call)
    return None if code is None else function_scope(code, bound, names, (scope, call))


def function_scope(
    code: CodeType, bound: Any = UNKNOWN, names: Mapping[str, Any] | None = None, caller: tuple[Scope, ast.Call] | None = None
) -> Scope | None:
    """The scope of a function that is not running (any more)."""
    source = load(code.co_filename)
    tree = None if source is None else scope_of(source, code)
    if source is None or tree is None:
        return None
    values: dict[str, Any] = {}
    if bound is not UNKNOWN and code.co_argcount:
        values[code.co_varnames[0]] = bound
    inner = Scope(source, tree, values, names or {}, caller)
    if caller is not None:
        for name in inner.parameters():
            given = inner.argument(name) if name not in values else None  # of `self.layer(x)`, `self` is the layer
            if given is not None:
                value = given[0].evaluate(given[1])
                if value is not UNKNOWN:
                    values[name] = value
    return inner


def _by_name(scope: Scope, call: ast.Call) -> Scope | None:
    """A function of the same file, where the call can run no other, or no other has the called name."""
    program = program_of(scope.source)
    run = None if program is None else only(program.callees(call))
    if isinstance(run, ast.FunctionDef) and run.name != "__init__":
        return Scope(scope.source, run, {}, scope.globals, (scope, call))
    name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr if isinstance(call.func, ast.Attribute) else None
    own = isinstance(call.func, ast.Name) or (
        isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "self"
    )
    found = [node for node in scope.source.scopes if isinstance(node, ast.FunctionDef) and node.name == name]
    return Scope(scope.source, found[0], {}, scope.globals, (scope, call)) if own and len(found) == 1 else None


def callable_scope(value: Any) -> Scope | None:
    """The scope of the user's function that an object runs when it is called."""
    code, bound, names = code_of(value)
    return None if code is None else function_scope(code, bound, names)


def class_scopes(owner: Any, methods: Sequence[str] = ()) -> list[Scope]:
    """The methods of an object's class and its bases (the user's ones), `__init__` first."""
    found: list[Scope] = []
    for cls in type(owner).__mro__:
        for name, value in sorted(class_attributes(cls).items(), key=lambda item: item[0] != "__init__"):
            code, _, names = code_of(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)
            if isinstance(value, FunctionType) and code is not None and (not methods or name in methods):
                scope = function_scope(code, owner, names)
                if scope is not None:
                    found.append(scope)
    return found


def loading_scope(value: Any) -> Scope | None:
    """The method of the user's that makes the items of a live loader or dataset: its collate function, `__getitem__` or `__iter__`."""
    if isinstance(value, DataLoader):
        collating = callable_scope(peek(value, "collate_fn"))
        if collating is not None:
            return collating
        value = peek(value, "dataset")
    while isinstance(value, Subset):
        value = peek(value, "dataset")
    if value is UNKNOWN or isinstance(value, (type, ModuleType, torch.Tensor, nn.Module)):
        return None
    return callable_scope(peek(value, "__getitem__")) or callable_scope(peek(value, "__iter__"))


def only_instance(kind: type) -> Any:
    """The one object of a class that is alive; UNKNOWN where there are several or none."""
    found = [each for each in gc.get_objects() if type(each) is kind]
    return unless_loud(found[0]) if len(found) == 1 else UNKNOWN


def constructor_given(scope: Scope, name: str) -> tuple[Scope, ast.expr] | None:
    """What a parameter of a constructor was given by the one call of its class that the file has, in the scope of that call."""
    program = program_of(scope.source)
    owner = scope.source.parents.get(scope.tree)
    if scope.caller is not None or program is None or not isinstance(owner, ast.ClassDef) or getattr(scope.tree, "name", "") != "__init__":
        return None
    calls = program.calls(owner.name)
    around = function_around(scope.source, calls[0]) or scope.source.tree if len(calls) == 1 else None
    if around is None:
        return None
    caller = Scope(scope.source, around, {}, scope.globals)
    return Scope(scope.source, scope.tree, {}, scope.globals, (caller, calls[0])).argument(name)


def constructor_argument(call: ast.Call, kind: type, name: str) -> ast.expr | None:
    """What a call of a class gives for a parameter of its constructor; None where nothing, or what is not known."""
    try:
        names = list(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        names = []
    return argument(call, name, names.index(name) if name in names else None)
