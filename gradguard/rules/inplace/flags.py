"""Where a module was told to work in place: its constructor call, an `m.inplace = True`, found in the user's source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.syntax import Source, range_of
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
    calls = [(source, call) for source in sources for call in _constructions(source, type(module))]
    if held is not None:
        calls = _best([(source, call) for source, call in calls if _fits(source, call, held[1])], _of_classes(calls, owners), calls)
    assigned = [(source, statement) for source in sources for statement in _assignments(source)]
    if len(calls) == 1 or (calls and not assigned):
        source, call = calls[0]
        return _flag(source, call, len(calls) == 1)
    if assigned and not calls:
        source, statement = assigned[0]
        return _flag(source, statement, len(assigned) == 1)
    return None


def _flag(source: Source, node: ast.Call | ast.Assign, sure: bool) -> Flag | None:
    place = range_of(node)
    if place is None:
        return None
    return Flag(source.span(place, "works in place because of this", "declared", source.qualname_around(node)), source, node, sure)


def _best(*choices: list[tuple[Source, ast.Call]]) -> list[tuple[Source, ast.Call]]:
    return next((choice for choice in choices if choice), [])


def _constructions(source: Source, kind: type) -> Iterator[ast.Call]:
    """Calls that build this kind of module with the flag on."""
    for node in ast.walk(source.tree or ast.Module([], [])):
        if (
            isinstance(node, ast.Call)
            and (dotted(node.func) or "").rpartition(".")[2] == kind.__name__
            and flag_argument(node, kind) is not None
        ):
            yield node


def flag_argument(call: ast.Call, kind: type) -> ast.expr | ast.keyword | None:
    """The argument of a constructor call that turns the flag on."""
    for keyword in call.keywords:
        if keyword.arg == "inplace":
            return None if isinstance(keyword.value, ast.Constant) and not keyword.value.value else keyword
    try:
        names = list(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return None
    position = names.index("inplace") if "inplace" in names else -1
    if 0 <= position < len(call.args):
        value = call.args[position]
        return value if isinstance(value, ast.Constant) and value.value is True else None
    return None


def _assignments(source: Source) -> Iterator[ast.Assign]:
    for node in ast.walk(source.tree or ast.Module([], [])):
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) and target.attr == "inplace" for target in node.targets):
            value = node.value
            if isinstance(value, ast.Constant) and value.value is True:
                yield node


def _fits(source: Source, call: ast.Call, name: str) -> bool:
    """Whether the call stands where a child of that name is made: `self.name = ...`, or that position in a Sequential."""
    above: Any = source.parents.get(call)
    if isinstance(above, ast.Assign):
        return any(isinstance(target, ast.Attribute) and target.attr == name for target in above.targets)
    if (
        name.isdigit()
        and isinstance(above, ast.Call)
        and call in above.args
        and not any(isinstance(item, ast.Starred) for item in above.args)
    ):
        return above.args.index(call) == int(name)
    if name.isdigit() and isinstance(above, ast.List) and not any(isinstance(item, ast.Starred) for item in above.elts):
        return above.elts.index(call) == int(name)
    return False


def _of_classes(calls: list[tuple[Source, ast.Call]], owners: list[nn.Module]) -> list[tuple[Source, ast.Call]]:
    """Those inside the classes of the modules around."""
    classes = {type(owner).__name__ for owner in owners if not type(owner).__module__.startswith("torch.")}
    return [
        (source, call)
        for source, call in calls
        if any(isinstance(above, ast.ClassDef) and above.name in classes for above in source.ancestors(call))
    ]
