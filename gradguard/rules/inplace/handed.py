"""Where an array that is written later was handed to PyTorch without a copy: `torch.from_numpy(obs)`.

Followed through the source: from the attribute or variable that is written, through the methods that return it, to the call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.history.carried_graphs import called_in
from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import dotted, full_name
from gradguard.analysis.program.syntax import FUNCTIONS, Source, range_of
from gradguard.core.diagnosis import Fix, Role, SourceSpan
from gradguard.fixes.edits import patched
from gradguard.rules.inplace.aliases import peel
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
        return self.source.span(range_of(self.call) or (1, 0, 1, 1), label, role, self.source.qualname_around(self.call))

    def copying(self) -> Fix:
        """The call with a copy of the array."""
        argument = self.call.args[0]
        where = range_of(argument)
        copied = f"{self.source.flat(argument)}.copy()"
        patch = patched(self.source, [((where[2], where[3], where[2], where[3]), ".copy()")]) if where is not None else None
        return Fix(
            title=f"copy what is handed to PyTorch: `{copied}`",
            safety="safe",
            patch=patch,
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
        behind = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Call) and at is not None and node.lineno > (at.end_lineno or at.lineno) and name in called_in(node)
        ]
        return bool(behind) or any(name in called_in(loop) for loop in loops)


def handed_over(incident: Incident, writes: list[ArrayWrite]) -> Handed | None:
    """The call through which the written array came to PyTorch; None where the source shows none, or several."""
    found: dict[ast.Call, Source] = {}
    for write in writes[:4]:
        for source, scope, names in _holders(incident, write):
            for node in ast.walk(scope):
                if isinstance(node, ast.Call) and _shares(source, node):
                    base = dotted(peel(node.args[0])[0])
                    if base in names and _scope(source, node) is scope:
                        found[node] = source
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
    owner = next((above for above in write.source.ancestors(write.node) if isinstance(above, ast.ClassDef)), None)
    if owner is None or not write.name.startswith("self."):
        return
    returning = dict(_returning(owner, write.name))
    for source in incident.sources:
        for scope in [source.tree, *source.scopes]:
            if scope is None or isinstance(scope, ast.ClassDef):
                continue
            names = {name for node in ast.walk(scope) if isinstance(node, ast.Assign) for name in _received(node, returning)}
            if names:
                yield source, scope, names


def _returning(owner: ast.ClassDef, name: str) -> Iterator[tuple[str, int | None]]:
    """The methods that return the array, and at which place of a tuple (None: it alone)."""
    for function in owner.body:
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                if dotted(node.value) == name:
                    yield function.name, None
                elif isinstance(node.value, ast.Tuple):
                    for index, item in enumerate(node.value.elts):
                        if dotted(item) == name:
                            yield function.name, index


def _received(statement: ast.Assign, returning: dict[str, int | None]) -> Iterator[str]:
    """The variables of an assignment that get the array."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for target in statement.targets:
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple) and len(target.elts) == len(statement.value.elts):
            pairs += zip(target.elts, statement.value.elts, strict=True)
        else:
            pairs.append((target, statement.value))
    for target, value in pairs:
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr not in returning:
            continue
        index = returning[value.func.attr]
        if index is None:
            name = dotted(target)
        else:
            name = dotted(target.elts[index]) if isinstance(target, ast.Tuple) and index < len(target.elts) else None
        if name is not None:
            yield name


def _scope(source: Source, node: ast.AST) -> ast.AST:
    return next((above for above in source.ancestors(node) if isinstance(above, FUNCTIONS)), source.tree or node)
