"""Who switched requires_grad off: as recorded, as attributes on modules tell, and as the source says."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.syntax import Source
from gradguard.core.safe_read import attributes, named_modules


class Freeze(NamedTuple):
    """A statement that switches requires_grad off (or fails to switch it on)."""

    place: ResolvedSite
    subject: str | None  # what it is applied to, as written
    how: str  # "toggle", "attribute", "argument", "pretrained"
    reached: int  # of the parameters in question that it is known to have frozen


class Mislaid(NamedTuple):
    """A module on which `requires_grad` was set as a plain attribute, which changes no parameter."""

    module: nn.Module
    name: str
    value: object
    place: ResolvedSite | None


def recorded(incident: Incident, parameters: Sequence[torch.Tensor]) -> list[Freeze]:
    """The recorded switches that froze these parameters, those that froze most first."""
    counts: dict[tuple[object, int], tuple[ResolvedSite, int]] = {}
    for parameter in parameters:
        known = incident.journal.toggle_of(parameter)
        if known is None or known[0] or known[1] is None:
            continue
        place = resolve(known[1])
        if place is not None:
            key = (known[1].code, known[1].lasti)
            counts[key] = (place, counts[key][1] + 1 if key in counts else 1)
    ordered = sorted(counts.values(), key=lambda item: -item[1])
    return [Freeze(_widened(place), _subject(place), "toggle", count) for place, count in ordered]


def _widened(place: ResolvedSite) -> ResolvedSite:
    return place


def _subject(place: ResolvedSite) -> str | None:
    """What is frozen: `model` in `for p in model.parameters(): p.requires_grad = False`."""
    base = place.receiver
    if base is None or place.source is None:
        return base
    for loop in place.enclosing_loops:
        if isinstance(loop, ast.For) and any(isinstance(node, ast.Name) and node.id == base for node in ast.walk(loop.target)):
            return _owner(loop.iter) or base
    return base


def _owner(node: ast.expr) -> str | None:
    """`model` of `model.parameters()`, `list(model.named_parameters())[:-2]` ..."""
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and inner.func.attr in ("parameters", "named_parameters", "children", "modules")
        ):
            return dotted(inner.func.value)
    return dotted(node)


def mislaid(incident: Incident, modules: Iterable[nn.Module], sources: Sequence[Source]) -> list[Mislaid]:
    """Modules with a plain attribute `requires_grad`."""
    found = []
    seen: set[int] = set()
    for root in modules:
        for path, module in named_modules(root):
            if id(module) in seen or "requires_grad" not in attributes(module):
                continue
            seen.add(id(module))
            name = incident.names.module_path(module) or path or type(module).__name__
            found.append(Mislaid(module, name, attributes(module)["requires_grad"], _set_where(sources, name.rpartition(".")[2])))
    return found


def _set_where(sources: Sequence[Source], last: str) -> ResolvedSite | None:
    """The statement `...last.requires_grad = value`; of several statements one that names the module."""
    candidates = []
    for source in sources:
        for node in ast.walk(source.tree) if source.tree is not None else ():
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
                        base = dotted(target.value)
                        candidates.append(((base or "").rpartition(".")[2] == last, site_at(source, node)))
    named = [place for fits, place in candidates if fits]
    if named:
        return named[-1]
    return candidates[0][1] if len(candidates) == 1 else None


def in_source(sources: Sequence[Source]) -> list[Freeze]:
    """Every statement that switches requires_grad off, in source order."""
    return [freeze for source in sources for freeze in _statements(source)]


def _statements(source: Source) -> Iterator[Freeze]:
    for node in ast.walk(source.tree) if source.tree is not None else ():
        if isinstance(node, ast.Assign) and _is_false(node.value):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
                    place = site_at(source, node)
                    yield Freeze(place, subject_of(source, target.value), "toggle", 0)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "requires_grad_" and any(
                _is_false(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))
            ):
                yield Freeze(site_at(source, node), subject_of(source, node.func.value), "toggle", 0)
            elif (
                node.func.attr == "from_pretrained"
                and "Embedding" in (dotted(node.func.value) or "")
                and not any(keyword.arg == "freeze" for keyword in node.keywords)
            ):
                yield Freeze(site_at(source, node), None, "pretrained", 0)
            elif node.func.attr in ("Parameter", "tensor") and any(
                keyword.arg == "requires_grad" and _is_false(keyword.value) for keyword in node.keywords
            ):
                yield Freeze(site_at(source, node), None, "argument", 0)


def subject_of(source: Source, node: ast.expr) -> str | None:
    return _subject_named(source, node, dotted(node))


def _subject_named(source: Source, node: ast.expr, name: str | None) -> str | None:
    for above in source.ancestors(node):
        if isinstance(above, ast.For) and any(isinstance(item, ast.Name) and item.id == name for item in ast.walk(above.target)):
            return _owner(above.iter) or name
    return name


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
