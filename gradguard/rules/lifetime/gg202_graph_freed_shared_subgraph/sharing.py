"""Where a shared tensor enters the loss that was backpropagated first, and whether that loss was meant to reach behind it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gradguard.analysis.graph.walk import leaves
from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.live.alive_tensors import node_of
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.analysis.places.instructions import scope_of
from gradguard.analysis.places.source import ResolvedSite, function_def, resolve
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.defuse import is_detached, reads_of
from gradguard.analysis.program.expressions import given, inside
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.syntax import FUNCTIONS, Function, Source
from gradguard.core.callsite import CallSite
from gradguard.core.safe_read import elements
from gradguard.fixes.at_places import detached_value
from gradguard.instrumentation.facts import BackwardFact
from gradguard.rules.lifetime.second_backward import Study, possibly_freed_by

Side = Literal["first", "second", "both"]


@dataclass(frozen=True, eq=False)
class Entry:
    """A use of the shared tensor, attached, on the way to a loss."""

    source: Source
    statement: ast.stmt
    read: ast.expr
    name: str


def likeliest_freeing(study: Study, carrier: Carrier) -> BackwardFact | None:
    """Of the calls that may have freed the shared part the first whose loss is seen to be made from it: a discriminator's loss on the
    generated batch, not the one on the real batch before it."""
    possible = possibly_freed_by(study, carrier.link)
    if len(possible) < 2:
        return study.freed_by
    return next((fact for fact in possible if _entry(study, carrier, fact, None) is not None), study.freed_by)


def entry_into_first_loss(study: Study, carrier: Carrier) -> Entry | None:
    """The attached use through which the first backward reached the shared tensor; None where the source does not show it."""
    first = study.freed_by
    return None if first is None else _entry(study, carrier, first, None)


def entry_into_second_loss(study: Study, carrier: Carrier) -> Entry | None:
    """The attached use through which the failing backward reaches it, behind the first backward: what stands before may feed both."""
    call = study.call
    return None if call is None else _entry(study, carrier, call, study.freed_by)


def _entry(study: Study, carrier: Carrier, call: BackwardFact, behind: BackwardFact | None) -> Entry | None:
    if not call.stack:
        return None
    helpers = _common_helpers(call, behind or study.call)
    for site, names in _names_along(study, carrier, call.stack):  # innermost first
        if site in helpers:
            continue  # a `.detach()` in there would be one for both losses
        place = resolve(site)
        source = None if place is None else place.source
        scope = None if source is None else scope_of(source, site.code)
        if place is None or source is None or scope is None or place.statement is None:
            continue
        border = next((other.line for other in behind.stack if other.code is site.code), 0) if behind is not None else 0
        passing = site is not call.stack[0] and call.stack[call.stack.index(site) - 1] not in helpers
        found = []
        for name in names:
            for read in reads_of(scope, name):
                statement = source.statement(read)
                if (
                    statement is None
                    or is_detached(source, read)
                    or _own_function(source, read) is not _own_function(source, place.statement)
                ):
                    continue
                if passing and source.stands_in(read, place.statement) and _is_handed_on(place, read):
                    continue
                entry = Entry(source, statement, read, name)
                if (
                    border < statement.lineno <= place.statement.lineno
                    and not _overwrites(carrier, statement)
                    and not _is_cut_inside(entry)
                ):
                    found.append(entry)
        feeding = _feeding(source, place)
        contributing = sorted((entry for entry in found if entry.statement in feeding), key=lambda entry: entry.statement.lineno)
        if contributing:
            traced = [entry for entry in contributing if behind is None and _ran(study, carrier, entry)]
            return (traced or contributing)[0]
    return None


def _is_handed_on(place: ResolvedSite, read: ast.expr) -> bool:
    """Whether a call hands the tensor itself on: what uses it then stands in the function; an argument computed from it uses it here."""
    return not any(argument is not read and read in inside(argument, ast.expr) for argument in given(place.call))


def inner_use(entry: Entry) -> Entry | None:
    """Where a function that the shared tensor is handed to uses it with its graph; None where it is used on the spot."""
    return next((use for use in _uses_inside(entry) if not is_detached(entry.source, use.read)), None)


def _is_cut_inside(entry: Entry) -> bool:
    """Whether the functions that the shared tensor is handed to all use its value alone: a target computed under no_grad."""
    uses = _uses_inside(entry)
    return bool(uses) and all(is_detached(entry.source, use.read) for use in uses)


def _uses_inside(entry: Entry) -> list[Entry]:
    """The reads of the shared tensor in the functions of the same file that the statement hands it to."""
    program = program_of(entry.source)
    found = []
    for call in inside(entry.statement, ast.Call) if program is not None else ():
        if entry.read not in given(call):
            continue
        assert program is not None
        for function in program.callees(call):
            if not isinstance(function, FUNCTIONS):
                continue
            names = {name for name, value in program.bind(call, function).items() if value is entry.read}
            for parameter in (each for name in names for each in program.definitions(name, function) if each.kind == "parameter"):
                for read in program.uses(parameter):
                    statement = entry.source.statement(read)
                    if statement is not None:
                        found.append(Entry(entry.source, statement, read, parameter.name))
    return found


def where_the_loss_is_made(study: Study, entry: Entry, root: Any) -> Entry:
    """The use in the function that makes the loss of this graph node, where the shared tensor is handed to it as it is."""
    place = study.finder.site(root)
    program = program_of(entry.source)
    if place is None or place.statement is None or place.source is not entry.source or program is None:
        return entry
    made_in = program.function(place.statement)
    found = inner_use(entry)
    return found if found is not None and program.function(found.statement) is made_in else entry


def _overwrites(carrier: Carrier, statement: ast.stmt) -> bool:
    return any(store.statement is statement for store in carrier.stores)


def _names_along(study: Study, carrier: Carrier, stack: tuple[CallSite, ...]) -> list[tuple[CallSite, list[str]]]:
    """What the shared tensor is called in each function on the way to a call, innermost first."""
    known = _known_names(study, carrier)
    failing = study.call.stack if study.call is not None else ()
    # inside the place where the two calls part, the frames that are there now may be of the same functions, with other arguments
    shared = _frames_in_common(stack, failing)
    found: list[tuple[CallSite, list[str]]] = []
    current: list[str] = []
    for depth, (outer, site) in enumerate(zip((None, *reversed(stack[1:])), reversed(stack), strict=True)):
        passed = []
        if outer is not None and current:
            place, function = resolve(outer), function_def(site.code)
            for name in current:
                within = None if place is None or function is None else _handed_as(place, function, name)
                within = within or (name if _is_seen_inside(name, outer, site) else None)
                passed += [within] if within else []
        current = passed if depth > shared and site.code in _codes(failing) else known.get(id(site.code)) or passed
        if current:
            found.append((site, current))
    return found[::-1]


def _handed_as(place: ResolvedSite, function: Function, name: str) -> str | None:
    """What the caller's variable is called inside the function that is called at a place; None where it is not handed over."""
    program = program_of(place.source)
    bound = program.bind(place.call, function) if program is not None and place.call is not None else {}
    handed = next((each for each, value in bound.items() if isinstance(value, ast.expr) and dotted(value) == name), None)
    return handed or (name if "self" in bound and name.startswith("self.") else None)


def _frames_in_common(one: tuple[CallSite, ...], other: tuple[CallSite, ...]) -> int:
    """How many of the outermost frames two calls have in common, up to the one where they part."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (mine, others) in enumerate(pairs) if mine != others), len(one))


def _common_helpers(call: BackwardFact, other: BackwardFact | None) -> set[CallSite]:
    """The places on the way to a call, behind the one where it parts from another, that stand in functions which both go through."""
    if other is None:
        return set()
    shared = _frames_in_common(call.stack, other.stack) + 1
    inside = _codes(other.stack[: max(len(other.stack) - shared, 0)])
    return {site for site in call.stack[: max(len(call.stack) - shared, 0)] if site.code in inside}


def _is_seen_inside(name: str, outer: CallSite, site: CallSite) -> bool:
    """Whether a function sees a variable of its caller under the same name: of the object, of the enclosing function, of the file."""
    of_file = outer.code.co_name == "<module>" and name in site.code.co_names and name not in site.code.co_varnames
    return name in site.code.co_freevars or name.startswith("self.") or of_file


def _codes(stack: tuple[CallSite, ...]) -> set[Any]:
    return {site.code for site in stack}


def _known_names(study: Study, carrier: Carrier) -> dict[int, list[str]]:
    """The `id` of code -> the variables of its live frame that are the shared tensor, or are made from it by ops that save nothing."""
    nodes = set(carrier.link.carriers)
    found: dict[int, list[str]] = {}
    for view in study.finder.frames:
        names = [name for name, value in view.locals.items() if _made_by(value, nodes)]
        if carrier.name is not None and carrier.name.startswith("self.") and "self" in view.locals:
            names.append(carrier.name)
        if names:
            found.setdefault(id(view.frame.f_code), names)
    return found


def _made_by(value: Any, nodes: set[Any]) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_made_by(item, nodes) for item in elements(value, 64))
    return isinstance(value, torch.Tensor) and node_of(value) in nodes


def detached_text(study: Study, name: str) -> str:
    """What is to be written for the shared tensor in place of its name; of a list or tuple, for all of its items."""
    values = [view.locals[name] for view in study.finder.frames if name in view.locals]
    return next((text for value in values if (text := detached_value(name, value)) is not None), f"{name}.detach()")


def _own_function(source: Source, node: ast.AST) -> ast.AST | None:
    return function_around(source, node)


def _feeding(source: Source, place: ResolvedSite) -> set[ast.stmt]:
    """The statements that what is executing in a function depends on, itself included."""
    program, at = program_of(source), place.statement
    assert at is not None
    executing = place.node if isinstance(place.node, ast.expr) else getattr(at, "value", None)
    if program is None or not isinstance(executing, ast.expr):
        return {at}
    return {at, *(found for expr in program.slice(executing, depth=0).expressions if (found := source.statement(expr)) is not None)}


def _ran(study: Study, carrier: Carrier, entry: Entry) -> bool:
    """Whether a traced op of the time between the tensor and the first backward stands in this statement."""
    first = study.freed_by
    assert first is not None
    lines = range(entry.statement.lineno, (entry.statement.end_lineno or entry.statement.lineno) + 1)
    return any(
        carrier.link.seq <= op[0] < first.seq and op[2].co_filename == entry.source.filename and resolve_line(op) in lines
        for op in study.incident.journal.ops
    )


def resolve_line(op: tuple[Any, ...]) -> int:
    """The line of a recorded op."""
    return CallSite(op[2], op[3]).line


def whose_parameters(study: Study, carrier: Carrier) -> Side:
    """Which of the two losses ran into parameters that its own optimizer does not train: there detaching was forgotten.

    Decided by the optimizer that stepped after the first backward; where none has, by whose parameters the rest of the first
    loss has. "both" where one optimizer trains all of it, or nothing tells.
    """
    first, call = study.freed_by, study.call
    if first is None:
        return "both"
    below = {id(leaf) for leaf in leaves([carrier.link.source])}
    second = {id(leaf) for leaf in leaves(study.graph.roots)} - below
    first_roots = first.live_roots()
    of_first = {id(leaf) for tensor in first_roots for leaf in leaves([tensor.grad_fn])} - below
    optimizers = [optimizer for optimizer in study.incident.names.optimizers() if (below | second | of_first) & trained_by(optimizer)]
    owners = [optimizer for optimizer in optimizers if below & trained_by(optimizer)]
    others = [optimizer for optimizer in optimizers if optimizer not in owners]
    if not owners or not (others or not first_roots):
        return "both"
    stepped = [
        fact.optimizer() for fact in study.incident.journal.steps if fact.seq >= first.seq and (call is None or fact.clock < call.clock)
    ]
    after = [optimizer for optimizer in stepped if optimizer is not None]
    if after:
        if after[0] not in owners:
            return "first"
    elif of_first:
        if any(of_first & trained_by(optimizer) for optimizer in others) and not any(
            of_first & trained_by(optimizer) for optimizer in owners
        ):
            return "first"
    elif others:
        return "first"
    if not any(second & trained_by(optimizer) for optimizer in others):
        return "both"
    if not any(second & trained_by(optimizer) for optimizer in owners):
        return "second"
    # it reaches the owners' parameters as well, as a generator's loss goes through the discriminator: it is the others' all the same
    # where the first loss was the owners' alone and they have stepped for it
    of_others = any((below | of_first) & trained_by(optimizer) for optimizer in others)
    return "second" if after and first_roots and not of_others else "both"
