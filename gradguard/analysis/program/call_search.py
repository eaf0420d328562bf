"""Looks for calls in the user's source: in the frames' functions, the methods of the modules alive, then the whole files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.expressions import last_part
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope, callee_scope, class_scopes, frame_scopes
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import modules_in


def live_modules(incident: Incident) -> Iterator[nn.Module]:
    """Every module that takes part, those of the frames first, each once."""
    seen: set[int] = set()
    for root in incident.modules:
        for module in modules_in(root):
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def module_name(incident: Incident, module: nn.Module) -> str:
    """A module by its dotted path under the name its root has outside its own methods, or its type."""
    path = incident.names.module_path(module)
    if path is None:
        return type(module).__name__
    if path == "self" or path.startswith("self."):
        rest = path.removeprefix("self").removeprefix(".")
        root = next((root for variable, root in incident.names.modules if variable == "self"), None)
        outside = next((name for name, value in incident.names.bindings if value is root and not name.startswith("self")), None)
        return ".".join(part for part in (outside, rest) if part) or type(module).__name__
    return path


def _called(scopes: list[Scope], depth: int = 2) -> list[Scope]:
    """The functions of the user's that code in these scopes calls, with what they are handed; a few levels in."""
    found: list[Scope] = []
    level, seen = scopes, {id(scope.tree) for scope in scopes}
    for _ in range(depth):
        inner = []
        for scope in level:
            for node in ast.walk(scope.tree):
                called = callee_scope(scope, node) if isinstance(node, ast.Call) else None
                if called is not None and id(called.tree) not in seen and USER_FILES[called.source.filename]:
                    seen.add(id(called.tree))
                    inner.append(called)
        found += inner
        level = inner
    return found


def calls_in_use(incident: Incident, name: str, module_types: tuple[str, ...] = ()) -> list[Spot]:
    """Calls of a torch function by its last name, or of a live module of one of these types: those in code that runs first."""
    frames = frame_scopes(incident.frames)
    scopes = [scope for scope in frames if scope.function is not None]
    seen_types: set[type] = set()
    for module in live_modules(incident):
        if type(module) not in seen_types:
            seen_types.add(type(module))
            scopes += class_scopes(module)
    scopes += _called(scopes)
    scopes += [scope for scope in frames if scope.function is None]
    scopes += [Scope(source, source.tree) for source in incident.sources if source.tree is not None]
    found: list[Spot] = []
    places: set[tuple[str, int, int]] = set()
    for scope in scopes:
        for node in ast.walk(scope.tree):
            if not isinstance(node, ast.Call) or (scope.source.filename, node.lineno, node.col_offset) in places:
                continue
            value = scope.evaluate(node.func) if module_types else None
            if last_part(node) == name or (isinstance(value, nn.Module) and type(value).__name__ in module_types):
                places.add((scope.source.filename, node.lineno, node.col_offset))
                found.append(Spot(scope, node))
    return found
