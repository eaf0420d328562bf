"""`x.require_grad = True`: a tensor takes any attribute, and the switch is called `requires_grad`."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import at_line
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.core.safe_read import attributes
from gradguard.fixes.edits import replaced
from gradguard.rules.spans import the_one

_SWITCH = "requires_grad"


def attribute(tensor: torch.Tensor) -> str | None:
    """The attribute that was set on this tensor in place of the switch."""
    own = attributes(tensor)
    found = difflib.get_close_matches(_SWITCH, [name for name in own if isinstance(name, str)], 1, 0.8)
    return found[0] if found and own[found[0]] is True else None


def place(incident: Incident, name: str) -> tuple[SourceSpan, Fix] | None:
    """The one statement that sets the attribute, and the repair."""
    found = the_one(incident, lambda sources: _assignments(sources, name))
    statement = None if found is None else found.statement
    if found is None or found.source is None or not isinstance(statement, ast.Assign):
        return None
    target = statement.targets[0]
    assert isinstance(target, ast.Attribute)
    owner = found.source.flat(target.value)
    fix = Fix(
        title=f"Set `{owner}.{_SWITCH}`",
        safety="safe",
        patch=replaced(found.source, [(target, f"{owner}.{_SWITCH}")]),
    )
    line = at_line(found.source.filename, statement.lineno)
    if line is None:
        return None
    return line.statement_span(f"`{name}` is an attribute of its own: the switch is called `{_SWITCH}`", "culprit"), fix


def _assignments(sources: list[Source], name: str) -> Iterator[tuple[Source, ast.stmt]]:
    for source in sources:
        for node in inside(source.tree, ast.Assign):
            if len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Attribute) and target.attr == name:
                    yield source, node
