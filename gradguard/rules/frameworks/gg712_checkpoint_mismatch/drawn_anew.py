"""What a checkpointed function draws from a random generator that checkpointing does not put back: Python's, numpy's, one of its own."""

from __future__ import annotations

import ast
import functools
import random
import sys
from collections.abc import Callable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import traceback_frames
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, function_def
from gradguard.analysis.program.bindings import targets_of
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.syntax import FUNCTIONS, Source, load
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import modules_in, own_dict, unless_loud
from gradguard.rules.spans import class_node
from gradguard.torch_compat.private_api import checkpointed_function

_STATE = ("seed", "getstate", "setstate", "get_state", "set_state", "manual_seed", "initial_seed", "spawn")  # methods that draw nothing
_DEPTH = 2  # calls into functions of the user's
Lookup = Callable[[str], list[Any]]  # the objects that a name may stand for, where the code runs


def function_run_again(incident: Incident) -> Any:
    """The function whose recomputation has failed; None where the exception's frames do not tell."""
    for view in traceback_frames(None if incident.error is None else incident.error.__traceback__):
        if view.code_name == "unpack_hook":
            found = checkpointed_function(view.locals.get("frame"))
            if found is not None:
                return found
    return None


def draws_in(function: Any) -> list[ResolvedSite]:
    """Where such a generator decides what a checkpointed function, or what it calls, does: the source says where, live objects what."""
    found: dict[tuple[str, int, int | None], ResolvedSite] = {}
    seen: set[ast.AST] = set()
    pending = [(source, tree, lookup, 0) for source, tree, lookup in _bodies(function)]
    for source, tree, lookup, depth in pending:  # grows while it is read
        if tree in seen:
            continue
        seen.add(tree)
        for node in inside(tree, ast.Call):
            called = _objects(node.func, lookup)
            if _draws(node, called, lookup):
                if _decides(source, node):
                    place = site_at(source, node)
                    found.setdefault((place.file, place.line, place.column), place)
            elif depth < _DEPTH:
                for body in (body for each in called if type(each) is FunctionType for body in _bodies(each)):
                    pending.append((body[0], body[1], _with_arguments(source, node, body[1], lookup, body[2]), depth + 1))
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1], key[2] or 0))]


def _bodies(function: Any) -> Iterator[tuple[Source, ast.AST, Lookup]]:
    """The source of a function, and of the classes of the user's modules that it is, belongs to or closes over."""
    while isinstance(function, functools.partial):
        function = function.func
    plain = function.__func__ if type(function) is MethodType else function
    code = plain.__code__ if type(plain) is FunctionType else None
    if code is not None:
        tree, source = function_def(code), load(code.co_filename)
        if tree is not None and source is not None and USER_FILES[code.co_filename]:
            bound = function.__self__ if plain is not function else None
            yield source, tree, _lookup(plain.__globals__, _closed_over(cast(FunctionType, plain)), [bound])
    modules = modules_of(function)
    for kind in dict.fromkeys(base for module in modules for base in type(module).__mro__):
        found = None if kind.__module__.partition(".")[0] == "torch" or not issubclass(kind, nn.Module) else class_node(kind)
        if found is not None:
            outside = getattr(sys.modules.get(kind.__module__), "__dict__", {})
            yield (*found, _lookup(outside, {}, [module for module in modules if isinstance(module, kind)]))


def _lookup(outside: dict[str, Any], closed: dict[str, Any], owners: list[Any]) -> Lookup:
    def lookup(name: str) -> list[Any]:
        if name == "self":
            return [owner for owner in owners if owner is not None]
        return [closed[name]] if name in closed else [outside[name]] if name in outside else []

    return lookup


def _with_arguments(source: Source, call: ast.Call, function: ast.AST, outside: Lookup, inside_it: Lookup) -> Lookup:
    """What names stand for in a function that a call runs: its parameters stand for what the call gives."""
    program = program_of(source)
    given = program.bind(call, function) if program is not None and isinstance(function, FUNCTIONS) else {}

    def lookup(name: str) -> list[Any]:
        value = given.get(name)
        return _objects(value, outside) if isinstance(value, ast.expr) else inside_it(name)

    return lookup


def _closed_over(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _objects(node: ast.expr, lookup: Lookup) -> list[Any]:
    """What an expression of names and attributes may stand for; only what objects and modules keep in their dicts is looked at, and
    the methods of generators."""
    if isinstance(node, ast.Name):
        return lookup(node.id)
    found = []
    for owner in _objects(node.value, lookup) if isinstance(node, ast.Attribute) else ():
        value = (own_dict(owner) or {}).get(node.attr)  # type: ignore[attr-defined]
        if value is None and _is_generator(owner):
            value = getattr(owner, node.attr, None)  # type: ignore[attr-defined]
        if value is not None:
            found.append(value)
    return found


def _is_generator(value: Any) -> bool:
    """Whether checkpointing leaves a random generator as it is: Python's and numpy's, and those of torch that were made for a purpose."""
    numpy = sys.modules.get("numpy.random")
    kinds = () if numpy is None else (numpy.Generator, numpy.RandomState)
    if type(value) in (random.Random, random.SystemRandom, *kinds):
        return True
    return type(value) is torch.Generator and value is not torch.default_generator


def modules_of(function: Any) -> list[nn.Module]:
    """The modules that a function is, belongs to or closes over, with all their parts."""
    while isinstance(function, functools.partial):
        function = unless_loud(function.func)
    owners = [function]
    if isinstance(function, MethodType):
        owners, function = [unless_loud(function.__self__)], unless_loud(function.__func__)
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                owners.append(unless_loud(cell.cell_contents))
            except ValueError:
                continue
    return [module for owner in owners if isinstance(owner, nn.Module) for module in modules_in(owner)]


def _draws(node: ast.Call, called: list[Any], lookup: Lookup) -> bool:
    """Whether a call is a generator's method (`random.random` is one), or a function of torch's that is given a generator."""
    for each in called:
        if type(each) in (MethodType, BuiltinMethodType) and _is_generator(each.__self__):
            return each.__name__ not in _STATE
    return any(word.arg == "generator" and any(map(_is_generator, _objects(word.value, lookup))) for word in node.keywords)


def _decides(source: Source, draw: ast.AST) -> bool:
    """Whether what is drawn chooses a branch, an index or a number of rounds, there or by the variable it is given to."""
    around = function_around(source, draw)
    if around is None or getattr(around, "name", None) == "__init__":
        return False
    if _chooses(source, draw) or (isinstance(source.statement(draw), ast.Return) and getattr(around, "name", None) != "forward"):
        return True
    statement = source.statement(draw)
    names = {target.id for target in targets_of(statement) if isinstance(target, ast.Name)} if statement is not None else set()
    return any(isinstance(node.ctx, ast.Load) and node.id in names and _chooses(source, node) for node in inside(around, ast.Name))


def _chooses(source: Source, node: ast.AST) -> bool:
    for above in source.ancestors(node):
        if isinstance(above, (ast.If, ast.While, ast.IfExp)):
            if node is above.test:
                return True
        elif isinstance(above, ast.comprehension):
            if node in above.ifs or node is above.iter:
                return True
        elif (isinstance(above, ast.For) and node is above.iter) or (isinstance(above, ast.Subscript) and node is above.slice):
            return True
        if isinstance(above, ast.stmt):
            return False
        node = above
    return False
