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
from gradguard.analysis.program.expressions import argument, calls_inside, inside, is_constant, last_part
from gradguard.analysis.program.index import calls_in, writes_in
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
    return [Freeze(place, _subject(place), "toggle", count) for place, count in ordered]


def _subject(place: ResolvedSite) -> str | None:
    """What is frozen: `model` in `for p in model.parameters(): p.requires_grad = False`."""
    base = place.receiver
    if base is None or place.source is None:
        return base
    for loop in place.enclosing_loops:
        if isinstance(loop, ast.For) and any(node.id == base for node in inside(loop.target, ast.Name)):
            return _owner(loop.iter) or base
    return base


def _owner(node: ast.expr) -> str | None:
    """`model` of `model.parameters()`, `list(model.named_parameters())[:-2]` ..."""
    calls = calls_inside(node, "parameters", "named_parameters", "children", "modules")
    owner = next((call.func.value for call in calls if isinstance(call.func, ast.Attribute)), node)
    return dotted(owner)


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
    writes = [(source, write) for source, write in writes_in(sources, "requires_grad") if isinstance(write.node, ast.Assign)]
    named = [each for each in writes if each[1].owner is not None and last_part(each[1].owner) == last]
    chosen = named[-1:] or (writes if len(writes) == 1 else [])
    return site_at(chosen[0][0], chosen[0][1].node) if chosen else None


def in_source(sources: Sequence[Source]) -> list[Freeze]:
    """Every statement that switches requires_grad off, in source order."""
    return [freeze for source in sources for freeze in _statements(source)]


def _statements(source: Source) -> Iterator[Freeze]:
    for node, subject, flag in switches(source):
        if is_constant(flag, False):
            yield Freeze(site_at(source, node), subject, "toggle", 0)
    for _, call in calls_in([source], "from_pretrained"):
        if isinstance(call.func, ast.Attribute) and "Embedding" in (dotted(call.func.value) or "") and argument(call, "freeze") is None:
            yield Freeze(site_at(source, call), None, "pretrained", 0)
    for _, call in calls_in([source], "Parameter", "tensor"):
        if is_constant(argument(call, "requires_grad"), False):
            yield Freeze(site_at(source, call), None, "argument", 0)


def switches(source: Source) -> list[tuple[ast.AST, str | None, ast.expr]]:
    """`p.requires_grad = flag`, `module.requires_grad_(flag)`: the node, what it is applied to (of a loop its source's owner), the flag."""
    writes = [write for _, write in writes_in([source], "requires_grad")]
    return [(each.node, subject_of(source, each.owner), each.value) for each in writes if each.owner is not None and each.value is not None]


def subject_of(source: Source, node: ast.expr) -> str | None:
    return _subject_named(source, node, dotted(node))


def _subject_named(source: Source, node: ast.expr, name: str | None) -> str | None:
    for above in source.ancestors(node):
        if isinstance(above, ast.For) and any(item.id == name for item in inside(above.target, ast.Name)):
            return _owner(above.iter) or name
    return name
