"""Where a value ends that a call has made: the variables that nothing reads, in the function around it or in those it was returned to."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.index import Program, program_of
from gradguard.analysis.program.reaching import Definition
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.core.callsite import CallSite


class DeadEnd(NamedTuple):
    """A statement after which nothing can use a value.

    Attributes:
        names: what it binds to it; none of a value that is dropped.
    """

    place: ResolvedSite
    names: list[str]


def dead_end(stack: Sequence[CallSite], *, unchanged: bool = False) -> DeadEnd | None:
    """Where a value ends, and all that is computed from it, outwards through the functions that return it; None where it may be used.

    Args:
        stack: the calls around its making, innermost first.
        unchanged: follow the value itself alone, not what is computed from it.
    """
    inner: _Inside | None = None
    for site in stack:
        place = resolve(site)
        program = None if place is None or place.statement is None else program_of(place.source)
        if place is None or program is None or (unchanged and place.call is None):
            return None
        statement = place.statement
        if isinstance(statement, ast.Expr):
            return DeadEnd(place, []) if statement.value is place.call else None
        if not isinstance(statement, ast.Return):
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or (unchanged and statement.value is not place.call):
                return None
            ended, returned = _followed(program, statement, inner, unchanged)
            if ended:
                return DeadEnd(place, ended)
            if not returned:
                return None
            inner = _Inside(place, returned)
        elif unchanged and statement.value is not place.call:
            return None
        else:
            inner = _Inside(place, set())
    return None


class _Inside(NamedTuple):
    """The call that a function was left from with the value, and the variables that have it there."""

    place: ResolvedSite
    variables: set[Definition]


def _followed(
    program: Program, statement: ast.Assign | ast.AnnAssign, inner: _Inside | None, unchanged: bool
) -> tuple[list[str], set[Definition]]:
    """The last names that have a value which a statement binds, where nothing reads these; the variables that have it, if it is returned.

    Neither where something else may use it.
    """
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    plain = [each for target in targets for each in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]
    if not all(isinstance(each, (ast.Name, ast.Attribute)) for each in plain):
        return [], set()
    attributes = [each for each in plain if isinstance(each, ast.Attribute)]
    carriers = [each for each in program.defined_by(statement) if _carries(inner, each)]
    if unchanged and (len(carriers) != 1 or carriers[0].path or attributes):
        return [], set()
    if any(program.attribute_reads(each.attr) for each in attributes):
        return [], set()
    ended, pending, seen, returned = dict[str, None](), carriers, set[Definition](), False
    ended.update(dict.fromkeys(program.source.flat(each) for each in attributes))
    while pending:
        definition = pending.pop()
        if definition in seen:
            continue
        seen.add(definition)
        reads = program.uses(definition)
        if not reads:
            ended.setdefault(definition.name)
        for read in reads:
            user = program.source.statement(read)
            if isinstance(user, ast.Return) and (not unchanged or user.value is read):
                returned = True
            elif unchanged or not isinstance(user, (ast.Assign, ast.AnnAssign)) or not _only_names(user):
                return [], set()
            else:
                pending += program.defined_by(user)
    return ([], seen) if returned else (list(ended), set())


def _only_names(statement: ast.Assign | ast.AnnAssign) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return all(isinstance(each, ast.Name) for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target]))


def _carries(inner: _Inside | None, definition: Definition) -> bool:
    """Whether a variable can have what the call inside has made, of the several values that the function around that returns."""
    if inner is None or len(definition.path) != 1 or definition.path[0] is None:
        return True
    program, index, function = program_of(inner.place.source), definition.path[0], inner.place.enclosing_function
    if program is None or not isinstance(function, FUNCTIONS):
        return True
    for value in program.returns(function):
        item = value.elts[index] if isinstance(value, ast.Tuple) and index < len(value.elts) else value
        if any(node is inner.place.node for node in ast.walk(item)) or inner.variables & program.slice(item).definitions.keys():
            return True
    return False
