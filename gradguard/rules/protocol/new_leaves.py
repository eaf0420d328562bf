"""Statements that make a Parameter of a computed value in each step: a new leaf, from which no gradient leads back."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.bindings import library_module
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Fix
from gradguard.rules.spans import function_around, the_one

_FACTORIES = ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "rand", "randn", "eye", "arange", "linspace", "from_numpy")
CALLED_WITH = Fix(
    title="Call the module with the computed tensors: `torch.func.functional_call(module, tensors, inputs)`",
    safety="manual",
)


def new_leaf(incident: Incident) -> ResolvedSite | None:
    """The one such statement outside constructors; of several none is known to be it."""
    return the_one(incident, _wrapped)


def without_wrapper(made: ResolvedSite) -> Fix:
    """The repair; a module's attribute takes no plain tensor where it has a Parameter."""
    if any(isinstance(target, ast.Attribute) for target in getattr(made.statement, "targets", ())):
        return CALLED_WITH
    return Fix(title="Use the computed tensor itself, without `Parameter(...)` around it", safety="unsafe")


def _wrapped(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    for source, call in calls_in(sources, "Parameter"):
        around, statement = function_around(source, call), source.statement(call)
        computed = bool(call.args) and _is_computed(source, call.args[0])
        if computed and statement is not None and getattr(around, "name", "__init__") != "__init__":
            yield source, statement


def _is_computed(source: Source, value: ast.expr) -> bool:
    """Whether a value may have a graph: a variable, or what a call of the user's (or of an op on something) gives."""
    while isinstance(value, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(value, ast.Call):
            name = dotted(value.func)
            if name is not None and library_module(source, name.partition(".")[0]):
                return name.rpartition(".")[2] not in _FACTORIES
            value = value.func
        else:
            value = value.value
    return isinstance(value, (ast.Name, ast.BinOp))
