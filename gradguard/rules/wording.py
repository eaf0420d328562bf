"""What the step-protocol rules say in common: names of optimizers and parameters, places."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import Names
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.index import programs_of
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Role, SourceSpan, TensorFacts
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import attributes, parameters_in, store_of
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book

_LISTED = 4


def short(text: str | None, limit: int = 60) -> str:
    """An expression on one line, cut where it is long."""
    flat = " ".join((text or "").split())
    return flat if len(flat) <= limit else flat[: limit - 3].rstrip() + "..."


def span(site: CallSite | None, label: str, role: Role) -> SourceSpan | None:
    """A recorded place of the user's as a span."""
    place = resolve(site)
    return None if place is None else place.span(label, role)


def spans(*found: SourceSpan | None) -> list[SourceSpan]:
    """Those that are known, each place once."""
    kept: list[SourceSpan] = []
    for each in found:
        if each is not None and all((each.file, each.line, each.column) != (other.file, other.line, other.column) for other in kept):
            kept.append(each)
    return kept


def name_here(incident: Incident, wanted: object, site: CallSite | None = None) -> str | None:
    """What an object is called where the incident is, or at the place in one of its frames: another frame's name is not known there."""
    views = [view for view in incident.user_frames if site is None or view.site == site]
    if not views or wanted is None:
        return None
    for names in (views[0].locals, views[0].globals):
        found = next((name for name, value in names.items() if value is wanted and name.isidentifier()), None)
        if found is not None:
            return found
    owner = views[0].locals.get("self")
    held = {**attributes(owner), **(store_of(owner, "_modules") if isinstance(owner, nn.Module) else {})}
    return next((f"self.{name}" for name, value in held.items() if value is wanted and name.isidentifier()), None)


def made_name(site: CallSite | None) -> str | None:
    """What the object constructed at a place is assigned to; not what it is put into, such as a dict of several."""
    place = resolve(site)
    if place is None or not place.targets:
        return None
    within = () if place.source is None or place.node is None else place.source.ancestors(place.node)
    held = any(isinstance(above, (ast.Dict, ast.List, ast.Set, ast.comprehension, ast.DictComp, ast.ListComp)) for above in within)
    return None if held else place.targets[0]


def optimizer_name(book: Book, incident: Incident) -> str:
    """The optimizer's variable: around the incident, at its construction, as the receiver of a recorded call; or its type."""
    optimizer = book.ref()
    name = incident.names.optimizer_variable(optimizer) if optimizer is not None else None
    if name is not None and _loops_over(incident, name):  # this one's name in this round only
        others = [other for other, value in incident.names.bindings if value is optimizer and "[" not in other]
        named = [*others, call_receiver(book.step_site, "step"), _constructed(book)]
        name = next((other for other in named if other is not None and not _loops_over(incident, other)), name)
    if name is None or "[" in name:
        name = call_receiver(book.step_site, "step") or _constructed(book) or name
    if name is not None and optimizer is not None and _loops_over(incident, name):  # several have it in turn: the container's item has not
        name = next((other for other, value in incident.names.bindings if value is optimizer and "[" in other), name)
    return name or book.type_name


def _loops_over(incident: Incident, name: str) -> bool:
    """Whether a name is the variable of a loop in the files that take part."""
    programs = programs_of(incident.sources) if name.isidentifier() else []
    return any(each.kind == "loop" for program in programs for each in program.definitions(name))


def _constructed(book: Book) -> str | None:
    """What the optimizer was assigned to, where the recorded statement makes an optimizer: not `result = trainer.train()`."""
    place = resolve(book.made)
    callee = "" if place is None or place.callee is None else place.callee
    last = callee.rpartition(".")[2]
    makes = last == book.type_name or any(word in callee.lower() for word in ("optim", "prepare"))
    return made_name(book.made) if makes else None


def call_receiver(site: CallSite | None, method: str) -> str | None:
    """`optimizer` of a recorded `optimizer.step()`."""
    place = resolve(site)
    if place is None or place.callee is None or not place.callee.endswith("." + method):
        return None
    return place.receiver


def parameter_names(parameters: Iterable[torch.Tensor], names: Names) -> list[str]:
    """Dotted names, of those that have one."""
    found = []
    for parameter in parameters:
        state = names.state(parameter)
        name = state.full if state is not None else names.of(parameter)
        if name is not None:
            found.append(name)
    return found


def listed(names: list[str], total: int | None = None) -> str:
    """`a`, `b` and 46 more in `encoder.*`."""
    total = max(total or 0, len(names))
    if not names:
        return f"{total} parameter{'s' if total != 1 else ''}"
    if total <= _LISTED:
        return ", ".join(f"`{name}`" for name in names)
    shown, rest = names[: _LISTED - 1], names[_LISTED - 1 :]
    prefix = common_prefix(rest)
    inside = f" in `{prefix}.*`" if prefix else ""
    return ", ".join(f"`{name}`" for name in shown) + f" and {total - len(shown)} more{inside}"


def common_prefix(names: list[str]) -> str:
    """The dotted path that all names share."""
    parts = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) != 1:
            break
        shared.append(column[0])
    return ".".join(shared)


def roots_of(parameters: Iterable[torch.Tensor], names: Names) -> list[str]:
    """What the modules that hold the parameters are called."""
    found: list[str] = []
    for parameter in parameters:
        state = names.state(parameter)
        name = None if state is None else state.variable or type(state.root).__name__
        if name is not None and name not in found:
            found.append(name)
    return found


def cast(incident: Incident, parameters: list[torch.Tensor]) -> CallSite | None:
    """Where a module that has one of the parameters was last cast to a 16-bit type."""
    wanted = {id(p) for p in parameters}
    casts: list[tuple[weakref.ref[Any], CallSite | None]] = incident.notes[Ledger].casts
    alive = ((module, site) for ref, site in reversed(casts) if (module := ref()) is not None)
    return next((site for module, site in alive if any(id(p) in wanted for p in parameters_in(module))), None)


def facts(parameters: Iterable[torch.Tensor], names: Names, most: int = 4) -> list[TensorFacts]:
    """The parameters in figures, at most a handful."""
    found: list[TensorFacts] = []
    for parameter in parameters:
        if len(found) >= most:
            break
        state = names.state(parameter)
        found.append(
            TensorFacts(
                name=state.full if state is not None else names.of(parameter),
                kind="parameter" if isinstance(parameter, torch.nn.Parameter) else "tensor",
                shape=shape_of(parameter),
                dtype=str(parameter.dtype).removeprefix("torch."),
                requires_grad=bool(parameter.requires_grad),
            )
        )
    return found


def shape_of(tensor: Any) -> list[int] | None:
    """A tensor's sizes; None for those that have none."""
    try:
        return [int(n) for n in tensor.shape]
    except internal_error():
        return None
