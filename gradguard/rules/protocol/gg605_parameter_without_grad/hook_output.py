"""A forward hook that gives back what it has only looked at: its return value takes the place of the module's output. Part of GG605."""

from __future__ import annotations

import ast
import functools
from typing import Any

from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import at_line
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.core.safe_read import elements, function_code, modules_in, peek, unless_loud
from gradguard.fixes.edits import removed, replaced
from gradguard.rules.protocol.cut_off import CutOff
from gradguard.rules.spans import names_in


def in_hook(incident: Incident, origin: Origin, cut: CutOff) -> CutOff | None:
    """The cut told anew where it stands in a function that is a module's forward hook, and that returns something."""
    place = origin.place
    source, function = (None, None) if place is None else (place.source, place.enclosing_function)
    if source is None or not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or cut.culprit is None:
        return None
    holders = [path for path in _holders(incident, source.filename, function) if path]
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return) and _own(source, node, function) and _gives(node)]
    if not holders or len(returns) != 1:
        return None
    statement = returns[0]
    told = at_line(source.filename, statement.lineno)
    if told is None or statement.value is None or place is None:
        return None
    given, within = source.flat(statement.value), any(node is place.node for node in ast.walk(statement.value))
    if not within and not any(target == given or target in names_in(statement.value) for target in place.targets):
        return None  # what is given back is another value
    whose = f"`{holders[0]}`" + (f" and {len(holders) - 1} more" if len(holders) > 1 else "")
    culprit = told.statement_span(f"what a forward hook returns takes the place of the output of {whose}", "culprit")
    context = cut.culprit.model_copy(update={"role": "context"})
    related: list[SourceSpan] = [] if (context.file, context.line) == (culprit.file, culprit.line) else [context]
    alone = function.body[-1] is statement and len(function.body) > 1
    patch = removed(source, statement.lineno, statement.end_lineno or statement.lineno) if alone else None
    if alone and any(isinstance(node, ast.Call) for node in ast.walk(statement.value)):  # what it calls may matter
        patch = replaced(source, [(statement.value, "None")])
    fix = Fix(
        title=f"Return nothing from `{function.name}`: a hook that only looks gives back None",
        safety="unsafe",
        patch=patch,
        detail="What it keeps may stay detached.",
    )
    clause = f"the forward hook `{function.name}` returns a value without a graph, which takes the place of the output of {whose}"
    return CutOff(culprit, [*related, *cut.related[1:]], clause, fix)


def _gives(node: ast.Return) -> bool:
    return node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None)


def _own(source: Any, node: ast.AST, function: ast.AST) -> bool:
    """Whether a statement belongs to the function itself, not to one inside it."""
    return next((above for above in source.ancestors(node) if isinstance(above, FUNCTIONS)), None) is function


def _holders(incident: Incident, filename: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str | None]:
    """The modules that have this function as a forward hook."""
    found: dict[int, str | None] = {}
    lines = range(min([function.lineno, *(d.lineno for d in function.decorator_list)]), (function.end_lineno or function.lineno) + 1)
    for _, root in incident.names.modules:
        for module in modules_in(root):
            for hook in elements(peek(module, "_forward_hooks")):
                while isinstance(hook, functools.partial):
                    hook = unless_loud(hook.func)
                code = function_code(hook)
                if code is not None and code.co_filename == filename and code.co_name == function.name and code.co_firstlineno in lines:
                    found.setdefault(id(module), incident.names.module_path(module))
    return list(found.values())
