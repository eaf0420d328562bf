"""The closure that a step is given: where it returns a loss on which it never calls backward. Part of GG606."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import ResolvedSite, at_line, dotted
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.fixes.at_places import put_before


def without_backward(step: ResolvedSite | None) -> tuple[SourceSpan, Fix] | None:
    """The `return` of the one function that is handed to this step, and what is to be called before it."""
    if step is None or step.call is None or step.source is None:
        return None
    given = [*step.call.args, *(keyword.value for keyword in step.call.keywords if keyword.arg == "closure")]
    name = (dotted(given[0]) or "").rpartition(".")[2] if len(given) == 1 else ""
    function = _function(step.source, step.enclosing_function, name)
    if function is None or any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(function)):
        return None
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    place = at_line(step.source.filename, returns[-1].lineno) if returns else at_line(step.source.filename, function.lineno)
    if place is None:
        return None
    loss = dotted(returns[-1].value) if returns and returns[-1].value is not None else None
    label = f"`{name}` returns the loss, and nothing in it calls backward()"
    return place.statement_span(label, "culprit"), Fix(
        title=f"Call `{loss or 'loss'}.backward()` in `{name}` before it returns",
        safety="unsafe",
        patch=put_before(place, f"{loss}.backward()") if loss is not None and returns[-1] is place.statement else None,
    )


def _function(source: Source, around: ast.AST | None, name: str) -> ast.FunctionDef | None:
    """The one function of this name: inside the function that steps, or else anywhere in the file."""
    for scope in (around, source.tree):
        found = [node for node in ast.walk(scope) if isinstance(node, ast.FunctionDef) and node.name == name] if scope is not None else []
        if found:
            return found[0] if len(found) == 1 else None
    return None
