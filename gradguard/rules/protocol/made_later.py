"""An optimizer that is made too early: the later statement that gives the model new parameters, and the making moved after it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, at_line, resolve
from gradguard.analysis.program.bindings import dotted, names_read, targets_of
from gradguard.analysis.program.index import Program, only, program_of
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import SourceSpan
from gradguard.fixes.statements import moved_after, siblings

_DEPTH = 3  # calls
_LISTING = {"parameters", "named_parameters", "children", "named_children", "modules", "named_modules"}


class Later(NamedTuple):
    """What runs after an optimizer was made, in the function that made it.

    Attributes:
        statement: the one that runs later.
        call: the same where it leads to a line in another function; None where the line itself stands there.
        patch: the diff that makes the optimizer afterwards.
    """

    statement: ast.stmt
    call: ResolvedSite | None
    patch: str | None


def later(incident: Incident, made: CallSite | None, culprit: SourceSpan | None) -> Later | None:
    """The one statement after the making from which the culprit's line runs; None where there is none, or several."""
    making = resolve(made)
    place = None if culprit is None else at_line(culprit.file, culprit.line)
    if making is None or place is None or place.source is None or place.statement is None:
        return None
    for source, statement in _outwards(making):
        program = program_of(source)
        if program is None:
            return None
        found = _after(incident, program, statement, place)
        if found is not None:
            call = None if found is place.statement else site_at(source, found)
            return Later(found, call, _moved(program, statement, found))
    return None


def _outwards(making: ResolvedSite) -> Iterator[tuple[Source, ast.stmt]]:
    """The statement that makes the optimizer, then those that call the function which returns it, as long as there is one such call."""
    source, statement = making.source, making.statement
    for _ in range(_DEPTH):
        program = program_of(source)
        if source is None or statement is None or program is None:
            return
        yield source, statement
        function = program.function(statement)
        call = only(program.callers(function)) if function is not None else None
        statement = None if call is None else source.statement(call)


def _after(incident: Incident, program: Program, statement: ast.stmt, place: ResolvedSite) -> ast.stmt | None:
    """The one later statement of its function that is the place, or leads to it by calls."""
    assert place.source is not None and place.statement is not None
    around, found = program.function(statement), set[ast.stmt]()
    pending: list[tuple[Source, ast.stmt, int]] = [(place.source, place.statement, 0)]
    while pending:
        source, current, depth = pending.pop()
        inside = program_of(source)
        function = None if inside is None else inside.function(current)
        if source is program.source and function is around:
            if current.lineno > (statement.end_lineno or statement.lineno):
                found.add(current)
        elif isinstance(function, FUNCTIONS) and not isinstance(function, ast.Lambda) and depth < _DEPTH:
            pending += [(each, call, depth + 1) for each, call in _calls(incident, program, source, function)]
    return only(found)


def _calls(
    incident: Incident, program: Program, source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[Source, ast.stmt]]:
    """The statements that call a function, in its file and by its name in the others that take part."""
    for each in {file.filename: file for file in (source, program.source, *incident.sources)}.values():
        known = program_of(each)
        calls = [] if known is None else known.callers(function) if each is source else known.calls(function.name)
        for call in calls:
            statement = each.statement(call)
            if statement is not None:
                yield each, statement


def _moved(program: Program, making: ast.stmt, anchor: ast.stmt) -> str | None:
    """The diff that moves the making, and what reads the optimizer meanwhile, to after a statement of its block."""
    source = program.source
    block = siblings(source, making)
    outer: ast.AST = anchor
    while outer not in block and (above := source.parents.get(outer)) is not None:
        outer = above
    if outer not in block or not isinstance(outer, ast.stmt) or (outer is not anchor and not isinstance(outer, (ast.If, ast.With))):
        return None
    bound, moved = _bound(making), [making]
    for statement in block[block.index(making) + 1 : block.index(outer)]:
        if _reads(source, statement, bound):
            if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)):
                return None
            moved.append(statement)
            bound |= _bound(statement)
    if _reads(source, outer, bound) or _listed_before(program, making) or _reads_inside(program, outer, bound):
        return None
    return moved_after(source, moved, outer)


def _reads(source: Source, statement: ast.stmt, bound: set[str]) -> bool:
    read = {f"{name}." for name in names_read(source, [statement])}
    return any(name.startswith(f"{each}.") for name in read for each in bound)


def _bound(statement: ast.stmt) -> set[str]:
    return {name for target in targets_of(statement) if (name := dotted(target)) is not None}


def _listed_before(program: Program, making: ast.stmt) -> bool:
    """Whether the optimizer is given a list of parameters that was made before: moving the optimizer alone would not help."""
    reads = [node for node in ast.walk(making) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    values = [each.value for read in reads for each in program.reaching(read) if each.kind == "assign" and each.value is not None]
    return any(isinstance(node, ast.Attribute) and node.attr in _LISTING for value in values for node in ast.walk(value))


def _reads_inside(program: Program, statement: ast.stmt, bound: set[str]) -> bool:
    """Whether functions that a statement runs read what is moved after it: an attribute, or a variable of the module's."""
    last = {name.rpartition(".")[2] for name in bound}
    functions = [each for each in program.may_run(statement) if isinstance(each, FUNCTIONS)]
    return any(isinstance(node, (ast.Name, ast.Attribute)) and _last(node) in last for each in functions for node in ast.walk(each))


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr
