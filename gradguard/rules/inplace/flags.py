"""Where a module was told to work in place: its constructor call, an `m.inplace = True`, found in the user's source."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradguard.analysis.program.blocks import class_around
from gradguard.analysis.program.expressions import is_constant, keyword
from gradguard.analysis.program.index import calls_in, writes_in
from gradguard.analysis.program.scopes import constructor_argument
from gradguard.analysis.program.syntax import Source
from gradguard.analysis.program.user_files import files_of, sources_of
from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import modules_in, peek, store_of


@dataclass
class Flag:
    """The place that set the flag. `sure` when no other place could have."""

    span: SourceSpan
    source: Source
    node: ast.Call | ast.Assign
    sure: bool


def holder_of(module: nn.Module, roots: Iterable[nn.Module]) -> tuple[nn.Module, str] | None:
    """The module that holds this one directly, and under which name."""
    for root in roots:
        for parent in modules_in(root):
            for name, child in store_of(parent, "_modules").items():
                if child is module:
                    return parent, name
    return None


def flag_of(module: nn.Module, roots: list[nn.Module], files: Iterable[str]) -> Flag | None:
    """Where `inplace=True` was given to this module, as far as the source shows one such place."""
    if peek(module, "inplace", None) is not True:
        return None
    held = holder_of(module, roots)
    owners = [held[0]] if held else []
    if held is not None:
        above = holder_of(held[0], roots)
        while above is not None and type(owners[-1]).__module__.startswith("torch."):
            owners.append(above[0])
            above = holder_of(above[0], roots)
    views = dict.fromkeys([*files, *files_of((), [*owners, *roots])])
    sources = sources_of(name for name in views if USER_FILES[name])
    made = calls_in(sources, type(module).__name__)
    calls = [(source, call) for source, call in made if flag_argument(call, type(module)) is not None]
    if held is not None:
        calls = _best([(source, call) for source, call in calls if _fits(source, call, held[1])], _of_classes(calls, owners), calls)
    writes = [(source, write.node) for source, write in writes_in(sources, "inplace") if is_constant(write.value, True)]
    assigned = [(source, node) for source, node in writes if isinstance(node, ast.Assign)]
    if len(calls) == 1 or (calls and not assigned):
        source, call = calls[0]
        return _flag(source, call, len(calls) == 1)
    if assigned and not calls:
        source, statement = assigned[0]
        return _flag(source, statement, len(assigned) == 1)
    return None


def _flag(source: Source, node: ast.Call | ast.Assign, sure: bool) -> Flag:
    return Flag(source.span_of(node, "works in place because of this", "declared"), source, node, sure)


def _best(*choices: list[tuple[Source, ast.Call]]) -> list[tuple[Source, ast.Call]]:
    return next((choice for choice in choices if choice), [])


def flag_argument(call: ast.Call, kind: type) -> ast.expr | ast.keyword | None:
    """The argument of a constructor call that turns the flag on."""
    value, word = constructor_argument(call, kind, "inplace"), keyword(call, "inplace")
    if word is not None:
        return None if isinstance(word.value, ast.Constant) and not word.value.value else word
    return value if is_constant(value, True) else None


def _fits(source: Source, call: ast.Call, name: str) -> bool:
    """Whether the call stands where a child of that name is made: `self.name = ...`, or that position in a Sequential."""
    above: Any = source.parents.get(call)
    if isinstance(above, ast.Assign):
        return any(isinstance(target, ast.Attribute) and target.attr == name for target in above.targets)
    items = above.args if isinstance(above, ast.Call) else above.elts if isinstance(above, ast.List) else []
    return call in items and not any(isinstance(item, ast.Starred) for item in items) and name == str(items.index(call))


def _of_classes(calls: list[tuple[Source, ast.Call]], owners: list[nn.Module]) -> list[tuple[Source, ast.Call]]:
    """Those inside the classes of the modules around."""
    classes = {type(owner).__name__ for owner in owners if not type(owner).__module__.startswith("torch.")}
    return [(source, call) for source, call in calls if getattr(class_around(source, call), "name", None) in classes]
