"""Which functions of the user's ran in a step, read from the source: for steps that were not traced.

Starts at the frames around the failure (in a loop: from the loop's head on) and at `forward` of the modules alive, and
follows calls by name. It finds too much rather than too little; what it finds is never told as certain.
"""

from __future__ import annotations

import ast
import sys
import threading
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.contents import tensors_in
from gradguard.analysis.live.frames import FrameView, live_frames
from gradguard.analysis.places.source import function_def, resolve
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.blocks import class_around
from gradguard.analysis.program.memory import own_calls, statements_of
from gradguard.analysis.program.syntax import Source, load
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import modules_in
from gradguard.rules.inplace.held import called_by_value, code_of, held_functions
from gradguard.torch_compat.private_api import storage_key

_MAX_FUNCTIONS = 400


@dataclass(eq=False)
class Scope:
    """A function's (or the main program's) statements that ran in the step, in source order."""

    source: Source
    node: ast.AST
    statements: list[ast.stmt]
    owner: ast.ClassDef | None = None
    depth: int = 0
    calls: list[ast.Call] = field(default_factory=list)
    by_value: list[tuple[ast.Call, ast.AST]] = field(default_factory=list)  # calls of functions that a container keeps

    @property
    def name(self) -> str:
        """The function's name, `<module>` at top level."""
        return str(getattr(self.node, "name", "<module>"))


def step_scopes(incident: Incident) -> list[Scope]:
    """Everything of the user's that can have run since the step began, the frames' own code first."""
    children = [child for root in incident.modules for child in modules_in(root)]
    found: dict[ast.AST, Scope] = {}
    queue: list[Scope] = []
    storages = {item.storage for item in incident.mismatches if item.storage is not None}
    for view in other_threads() if storages else ():
        if not storages.intersection(map(storage_key, tensors_of(view))):
            continue
        source, running = load(view.frame.f_code.co_filename), function_def(view.frame.f_code)
        if source is not None and running is not None and running not in found:
            found[running] = Scope(source, running, statements_of(running), _class_of(source, running), 1)
            queue.append(found[running])
    for view in incident.user_frames:
        place = resolve(view.site)
        if place is None or place.source is None:
            continue
        node: ast.AST | None = place.enclosing_function or place.source.tree
        if node is None or node in found:
            continue
        loops = place.enclosing_loops
        statements = statements_of(loops[-1] if loops else node)
        scope = Scope(place.source, node, statements, _class_of(place.source, node))
        if not loops:
            scope.statements = [item for item in statements if item.lineno <= place.line]
        found[node] = scope
        queue.append(scope)
    types = _attribute_types(children)
    by_name: dict[str, list[tuple[Source, ast.AST]]] = {}
    for source in incident.sources:
        for function in source.scopes:
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                by_name.setdefault(function.name, []).append((source, function))
    for code in _hooks(children):
        loaded, hook = load(code.co_filename), function_def(code)
        if loaded is not None and hook is not None and hook not in found:
            found[hook] = Scope(loaded, hook, statements_of(hook), _class_of(loaded, hook), 1)
            queue.append(found[hook])
    kept = held_functions(incident.user_frames, children)
    while queue and len(found) < _MAX_FUNCTIONS:
        scope = queue.pop(0)
        for statement in scope.statements:
            for item in own_calls(statement):
                scope.calls.append(item)
                runs = dict.fromkeys(called_by_value(item, scope.source, kept)) if kept else {}
                by_value = [(running, node) for code in runs for running, node in [_defined(code)] if running is not None]
                scope.by_value.extend((item, node) for _, node in by_value)
                for source, callee in [*by_value, *_called(item, scope, by_name, types)]:
                    if callee not in found:
                        fresh = Scope(source, callee, statements_of(callee), _class_of(source, callee), scope.depth + 1)
                        found[callee] = fresh
                        queue.append(fresh)
    return list(found.values())


def _hooks(modules: list[nn.Module]) -> list[CodeType]:
    """The user's forward hooks and pre-hooks of these modules: no line of the source calls them."""
    found: dict[CodeType, None] = {}
    for module in modules:
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            code = code_of(hook)
            if code is not None and USER_FILES[code.co_filename]:
                found.setdefault(code)
    return list(found)


def _defined(code: CodeType) -> tuple[Source | None, ast.AST]:
    node = function_def(code)
    return (None, ast.Pass()) if node is None else (load(code.co_filename), node)


def _class_of(source: Source, node: ast.AST) -> ast.ClassDef | None:
    return class_around(source, node)


def _attribute_types(modules: list[nn.Module]) -> dict[str, set[str]]:
    """Attribute name -> class names of the child modules held under it; what is in a container counts for the container."""
    found: dict[str, set[str]] = {}
    for module in modules:
        for name, child in module._modules.items():
            if child is not None:
                # with the bases' names: wrappers such as FSDP give a module a class of their own made from the user's
                found.setdefault(name, set()).update(kind.__name__ for inner in modules_in(child) for kind in type(inner).__mro__[:-2])
    return found


def _called(
    call: ast.Call, scope: Scope, by_name: dict[str, list[tuple[Source, ast.AST]]], types: dict[str, set[str]]
) -> list[tuple[Source, ast.AST]]:
    """The functions of the user's that a call may run."""
    name = dotted(call.func)
    if name is None:
        if isinstance(call.func, ast.Attribute):
            return by_name.get(call.func.attr, [])
        return _forwards(by_name, None)
    last = name.rpartition(".")[2]
    direct = by_name.get(last, [])
    if direct and last not in ("forward", "step", "backward"):
        own = [item for item in direct if scope.owner is not None and name.startswith("self.") and _class_of(*item) is scope.owner]
        return own or direct
    full = scope.source.imports.get(name.partition(".")[0], "")
    if full.partition(".")[0] in ("torch", "numpy", "math"):
        return []
    kinds = types.get(last)
    if kinds is None and name.startswith("self."):
        return []
    return _forwards(by_name, kinds)


def _forwards(by_name: dict[str, list[tuple[Source, ast.AST]]], kinds: set[str] | None) -> list[tuple[Source, ast.AST]]:
    """The `forward` methods of the classes named (None: of all)."""
    found = []
    for source, node in by_name.get("forward", []) + by_name.get("__call__", []):
        owner = _class_of(source, node)
        if kinds is None or (owner is not None and owner.name in kinds):
            found.append((source, node))
    return found


def module_types(modules: list[nn.Module]) -> dict[str, set[str]]:
    """Attribute name -> class names, for op look-ups (`self.act` is a `Sigmoid`)."""
    return _attribute_types(modules)


def other_threads() -> list[FrameView]:
    """The user's frames of the threads beside this one, which may write while this one computes."""
    own = threading.get_ident()
    return [view for ident, frame in sys._current_frames().items() if ident != own for view in live_frames(frame) if view.is_user]


def tensors_of(view: FrameView) -> list[torch.Tensor]:
    """The tensors in a frame's variables and in their containers."""
    return [tensor for name, value in view.locals.items() if name != "self" for tensor in tensors_in(value, 2)]


def live_value(incident: Incident, scope: Scope, name: str) -> Any:
    """What a plain name is in a frame that runs this scope; None when no frame does or it is not bound."""
    for view in incident.user_frames:
        place = resolve(view.site)
        if place is not None and (place.enclosing_function or (place.source.tree if place.source else None)) is scope.node:
            return view.locals.get(name)
    return None
