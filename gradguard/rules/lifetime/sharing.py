"""Where a shared tensor enters the loss that was backpropagated first, and whether that loss was meant to reach behind it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from gradguard.callsite import CallSite
from gradguard.evidence.bindings import dotted, names_read, targets_of
from gradguard.evidence.carried import Carrier
from gradguard.evidence.flow import contains, follow, is_detached, reads_of
from gradguard.evidence.graph import leaves
from gradguard.evidence.locate import scope_of
from gradguard.evidence.source import ResolvedSite, function_def, resolve
from gradguard.evidence.syntax import FUNCTIONS, Source
from gradguard.rules.lifetime.study import Study, live_roots, parameters_of


@dataclass(frozen=True, eq=False)
class Entry:
    """A use of the shared tensor, attached, on the way to a loss."""

    source: Source
    statement: ast.stmt
    read: ast.expr
    name: str


def entry_into_first_loss(study: Study, carrier: Carrier) -> Entry | None:
    """The attached use through which the first backward reached the shared tensor; None where the source does not show it."""
    first = study.freed_by
    if first is None or not first.stack:
        return None
    names = _names_along(study, carrier, first.stack)
    for site, name in names:  # innermost first
        place = resolve(site)
        source = None if place is None else place.source
        scope = None if source is None else scope_of(source, site.code)
        if place is None or source is None or scope is None or place.statement is None:
            continue
        passing = site is not first.stack[0]
        found = []
        for read in reads_of(scope, name):
            statement = source.statement(read)
            if statement is None or is_detached(source, read) or _own_function(source, read) is not _own_function(source, place.statement):
                continue
            if passing and contains(place.statement, read, source):
                continue
            if statement.lineno <= place.statement.lineno and not _overwrites(carrier, statement):
                found.append(Entry(source, statement, read, name))
        feeding = _feeding(source, scope, place)
        contributing = [entry for entry in found if entry.statement in feeding]
        if contributing:
            traced = [entry for entry in contributing if _ran(study, carrier, entry)]
            return (traced or contributing)[0]
    return None


def _overwrites(carrier: Carrier, statement: ast.stmt) -> bool:
    return any(store.statement is statement for store in carrier.stores)


def _names_along(study: Study, carrier: Carrier, stack: tuple[CallSite, ...]) -> list[tuple[CallSite, str]]:
    """What the shared tensor is called in each function on the way to a call, innermost first."""
    known = _known_names(study, carrier)
    found: list[tuple[CallSite, str]] = []
    current: str | None = None
    for outer, site in zip((None, *reversed(stack[1:])), reversed(stack), strict=True):
        passed = None
        if outer is not None and current is not None:
            place, function = resolve(outer), function_def(site.code)
            if place is not None and place.call is not None and function is not None:
                passed = follow(place.call, function, current)
            if passed is None and current in site.code.co_freevars:
                passed = current
        current = known.get(site.code) or passed or (current if current is not None and current.startswith("self.") else None)
        if current is not None:
            found.append((site, current))
    return found[::-1]


def _known_names(study: Study, carrier: Carrier) -> dict[Any, str]:
    """Code object -> the variable of its live frame that is the shared tensor."""
    nodes = set(carrier.link.carriers)
    found: dict[Any, str] = {}
    for view in study.finder.frames:
        for name, value in view.locals.items():
            if _made_by(value, nodes):
                found.setdefault(view.frame.f_code, name)
    if carrier.name is not None and carrier.store is not None:
        for view in study.finder.frames:
            if carrier.name.startswith("self.") and "self" in view.locals:
                found.setdefault(view.frame.f_code, carrier.name)
    return found


def _made_by(value: Any, nodes: set[Any]) -> bool:
    import torch

    if not isinstance(value, torch.Tensor):
        return False
    try:
        return value.grad_fn is not None and value.grad_fn in nodes
    except Exception:
        return False


def _own_function(source: Source, node: ast.AST) -> ast.AST | None:
    return next((above for above in source.ancestors(node) if isinstance(above, FUNCTIONS)), None)


def _feeding(source: Source, scope: ast.AST, place: ResolvedSite) -> set[ast.stmt]:
    """The statements of a function that what is executing there depends on, itself included, as the text tells."""
    at = place.statement
    assert at is not None
    found: set[ast.stmt] = {at}
    wanted = set(names_read(source, [place.node or at]))
    statements = [node for node in ast.walk(scope) if isinstance(node, ast.stmt) and node.lineno <= at.lineno and node is not at
                  and _own_function(source, node) is _own_function(source, at)]  # fmt: skip
    for _ in range(3):  # a loop's turn before may feed as well
        before = len(wanted)
        for statement in sorted(statements, key=lambda item: -item.lineno):
            written = [name for target in targets_of(statement) if (name := dotted(target)) is not None]
            written += [name.partition(".")[0] for name in written]
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and any(name in wanted for name in written):
                found.add(statement)
                wanted.update(names_read(source, [statement.value] if statement.value is not None else []))
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and isinstance(statement.value.func, ast.Attribute):
                if dotted(statement.value.func.value) in wanted:  # losses.append(x)
                    found.add(statement)
                    wanted.update(names_read(source, [statement.value]))
        if len(wanted) == before:
            break
    return found


def _ran(study: Study, carrier: Carrier, entry: Entry) -> bool:
    """Whether a traced op of the time between the tensor and the first backward stands in this statement."""
    first = study.freed_by
    assert first is not None
    lines = range(entry.statement.lineno, (entry.statement.end_lineno or entry.statement.lineno) + 1)
    return any(carrier.link.seq <= op[0] < first.seq and op[2].co_filename == entry.source.filename and resolve_line(op) in lines for op in study.incident.journal.ops)


def resolve_line(op: tuple[Any, ...]) -> int:
    """The line of a recorded op."""
    return CallSite(op[2], op[3]).line


def reaches_foreign_parameters(study: Study, carrier: Carrier) -> bool:
    """Whether the first loss ran into parameters that its own optimizer does not train: then detaching was forgotten.

    Decided by the optimizer that stepped after the first backward; where none has, by whose parameters the rest of the first
    loss has.
    """
    first = study.freed_by
    below = {id(leaf) for leaf in leaves([carrier.link.source])}
    reached = {id(leaf) for leaf in leaves(study.graph.roots)} | {id(leaf) for tensor in live_roots(first) for leaf in leaves([tensor.grad_fn])} if first is not None else set()
    optimizers = [optimizer for optimizer in study.incident.names.optimizers() if reached & parameters_of(optimizer)]
    owners = [optimizer for optimizer in optimizers if below & parameters_of(optimizer)]
    if first is None or not owners:
        return False
    call = study.call
    stepped = [fact.optimizer() for fact in study.incident.journal.steps if fact.seq >= first.seq and (call is None or fact.clock < call.clock)]
    after = [optimizer for optimizer in stepped if optimizer is not None]
    if after:
        return not below & parameters_of(after[0])
    rest: set[int] = set()
    for tensor in live_roots(first):
        rest |= {id(leaf) for leaf in leaves([tensor.grad_fn])} - below
    if rest:
        trained_by = [optimizer for optimizer in optimizers if rest & parameters_of(optimizer)]
        return bool(trained_by) and not any(optimizer in owners for optimizer in trained_by)
    return len(optimizers) > len(owners)
