"""Whether a place decides for the whole run what it did in the first steps: no condition, no second way to call what it cuts off.

A finding about "never" is certain at the end of a run. Before that it is told, as likely, only where the program has nothing that
could change it: no branch around the place or around the calls of its function, and one call alone of what gets no gradient.
"""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import at_line
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.diagnosis import SourceSpan
from gradguard.rules.spans import function_around, in_tiers

_BRANCHES = (ast.If, ast.IfExp, ast.BoolOp, ast.While, ast.Try, ast.Match, ast.ExceptHandler)


def settled(incident: Incident, culprit: SourceSpan | None, paths: list[str]) -> bool:
    """Whether a culprit stands under no condition, and what the paths name is called in one place alone.

    Args:
        paths: of the parameters, with or without the variable in front.
    """
    place = None if culprit is None else at_line(culprit.file, culprit.line)
    if place is None or place.source is None or place.statement is None or is_conditional(place.source, place.statement):
        return False
    sources = next(in_tiers(incident), [])
    function = place.enclosing_function
    if isinstance(function, FUNCTIONS) and not isinstance(function, ast.Lambda) and function.name != "forward":
        calls = [(source, node) for source in sources for node in _calls(source, function.name)]
        if len(calls) > 1 or any(is_conditional(source, node) for source, node in calls):
            return False
    names = {name for path in paths for name in _modules(path)[-1:]}
    return bool(names) and all(sum(1 for source in sources for _ in _calls(source, name)) <= 1 for name in names)


def _modules(path: str) -> list[str]:
    """The attributes on the way to a parameter: `enc` of `model.enc.0.weight`."""
    return [part for part in path.split(".")[:-1] if not part.isdigit()]


def _calls(source: Source, name: str) -> list[ast.Call]:
    """Calls of something by its last name: `enc(x)`, `self.enc(x)`, `self.enc[0](x)`; and of its methods that compute."""
    found = []
    for node in ast.walk(source.tree) if source.tree is not None else ():
        if isinstance(node, ast.Call):
            callee: ast.AST = node.func
            while isinstance(callee, ast.Subscript):
                callee = callee.value
            if (isinstance(callee, ast.Attribute) and callee.attr == name) or (isinstance(callee, ast.Name) and callee.id == name):
                found.append(node)
    return found


def is_conditional(source: Source, node: ast.AST) -> bool:
    """Whether a branch of the node's function decides if it runs, or a statement before it can leave the function."""
    if any(isinstance(inner, (ast.IfExp, ast.BoolOp)) for inner in ast.walk(node)):
        return True
    above = list(source.ancestors(node))
    function = function_around(source, node) or source.tree
    inside = above[: next((i for i, each in enumerate(above) if each is function), len(above))]
    if any(isinstance(each, _BRANCHES) for each in inside if not _is_main(each)):
        return True
    line = getattr(node, "lineno", 0)
    leaves = (ast.Return, ast.Continue, ast.Break, ast.Raise)
    return any(
        isinstance(each, leaves) and each.lineno < line and function_around(source, each) is function_around(source, node)
        for each in (() if function is None else ast.walk(function))
    )


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test))
