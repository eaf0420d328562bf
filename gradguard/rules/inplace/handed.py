"""Where an array that is written later was handed to PyTorch without a copy: `torch.from_numpy(obs)`.

Followed through the source: from the attribute or variable that is written, through the methods that return it, to the call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import dotted, full_name
from gradguard.analysis.program.blocks import class_around, function_around
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.analysis.program.index import Definition, calls_in, program_of
from gradguard.analysis.program.memory import peel
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Fix, Role, SourceSpan
from gradguard.fixes.edits import appended, patched
from gradguard.rules.inplace.arrays import ArrayWrite

_SHARING = {"torch.from_numpy", "torch.as_tensor", "torch.asarray"}
_COPYING = {"clone", "to", "type", "float", "double", "half", "bfloat16", "cuda", "tolist"}
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Handed:
    """The one call that made a tensor on the array's memory."""

    def __init__(self, source: Source, call: ast.Call) -> None:
        self.source = source
        self.call = call

    @property
    def text(self) -> str:
        return self.source.flat(self.call)

    def span(self, label: str, role: Role) -> SourceSpan:
        return self.source.span_of(self.call, label, role)

    def copying(self) -> Fix:
        """The call with a copy of the array."""
        argument = self.call.args[0]
        return Fix(
            title=f"copy what is handed to PyTorch: `{self.source.flat(argument)}.copy()`",
            safety="safe",
            patch=patched(self.source, appended(argument, ".copy()")),
            detail="or wait with re-using the buffer until backward has run",
        )

    def comes_after(self, write: ArrayWrite) -> bool:
        """Whether the write can run after the call: it stands below, or in a function called from there on or in a loop around both."""
        source = self.source
        at = source.statement(self.call)
        loops = [above for above in source.ancestors(self.call) if isinstance(above, _LOOPS)]
        scope = _scope(source, self.call)
        function = _scope(write.source, write.node)
        if write.source is source and function is scope:
            return write.node.lineno > self.call.lineno or any(loop in list(source.ancestors(write.node)) for loop in loops)  # type: ignore[attr-defined]
        name = getattr(function, "name", "")
        behind = [call for call in calls_inside(scope, name) if at is not None and call.lineno > (at.end_lineno or at.lineno)]
        return bool(behind) or any(any(calls_inside(loop, name)) for loop in loops)


def handed_over(incident: Incident, writes: list[ArrayWrite]) -> Handed | None:
    """The call through which the written array came to PyTorch; None where the source shows none, or several."""
    found: dict[ast.Call, Source] = {}
    for write in writes[:4]:
        for source, scope, names in _holders(incident, write):
            for call in inside(scope, ast.Call):
                if _shares(source, call) and dotted(peel(call.args[0])[0]) in names and _scope(source, call) is scope:
                    found[call] = source
    return Handed(next(iter(found.values())), next(iter(found))) if len(found) == 1 else None


def _shares(source: Source, call: ast.Call) -> bool:
    """Whether a call makes a tensor on the memory of an array, and no conversion that may copy stands with it."""
    if full_name(source, dotted(call.func) or "") not in _SHARING or len(call.args) != 1 or call.keywords:
        return False
    above = source.parents.get(call)
    return not (isinstance(above, ast.Attribute) and above.attr in _COPYING)


def _holders(incident: Incident, write: ArrayWrite) -> Iterator[tuple[Source, ast.AST, set[str]]]:
    """Scopes, with the variables in them that are the array."""
    yield write.source, _scope(write.source, write.node), {write.name}
    owner = class_around(write.source, write.node)
    for method in owner.body if owner is not None and write.name.startswith("self.") else ():
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            places = set(_returned_at(write.source, method, write.name))
            for source, call in calls_in(incident.sources, method.name) if places else ():
                names = {each.name for each in _bound_by(source, call) if each.path in places}
                yield source, _scope(source, call), names


def _returned_at(source: Source, method: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[tuple[int, ...]]:
    """Where the array is in what a method returns: at a place of a tuple, or it alone."""
    program = program_of(source)
    for value in program.returns(method) if program is not None else ():
        if dotted(value) == name:
            yield ()
        yield from ((i,) for i, part in enumerate(getattr(value, "elts", ())) if dotted(part) == name)


def _bound_by(source: Source, call: ast.Call) -> list[Definition]:
    """The variables that an assignment binds to what a call gives, or to a part of it."""
    program, statement = program_of(source), source.statement(call)
    defined = program.defined_by(statement) if program is not None and statement is not None else ()
    return [each for each in defined if each.value is call]


def _scope(source: Source, node: ast.AST) -> ast.AST:
    return function_around(source, node) or source.tree or node
