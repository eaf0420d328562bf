"""Hooks that have no name of their own: objects with a `__call__`, and functions with some arguments given beforehand (`partial`)."""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.expressions import argument, last_part
from gradguard.analysis.program.index import program_of, programs_of
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope

UNNAMED = "<unknown>"  # what PyTorch calls them


def functions_given(incident: Incident, spot: Spot) -> list[Scope]:
    """The functions that a registration call is given as a hook: by name, made by a factory, `partial`, or an object that is called."""
    call, program = spot.node, program_of(spot.scope.source)
    given = argument(call, "hook", 0) if isinstance(call, ast.Call) else None
    if program is None or given is None:
        return []
    own = program.functions(given)
    if own:
        return [Scope(program.source, each) for each in own]
    made = [value for value in program.values(given) if isinstance(value, ast.Call)]  # of a class or function of another file
    names = {last_part(each.args[0] if last_part(each) == "partial" and each.args else each) for each in made}
    return [Scope(other.source, each) for other in programs_of(incident.sources) for name in names for each in other.functions_named(name)]
