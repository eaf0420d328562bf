"""A learning rate that is written where no optimizer looks: `optimizer.lr = ...`. Part of GG611."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.index import writes_in
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.fixes.edits import indent_of, replaced
from gradguard.rules import wording
from gradguard.rules.spans import the_one


def place(incident: Incident, name: str) -> tuple[SourceSpan, Fix] | None:
    """The one statement that writes such an attribute, and what to write instead."""
    found = the_one(incident, lambda sources: _sets(sources))
    statement = None if found is None else found.statement
    if found is None or found.source is None or not isinstance(statement, ast.Assign):
        return None
    target = statement.targets[0]
    owner = dotted(target.value) if isinstance(target, ast.Attribute) else None
    source, value = found.source, found.source.segment(statement.value)
    indent = indent_of(source, statement.lineno)
    text = f'for group in {owner}.param_groups:\n{indent}    group["lr"] = {value}'
    first = source.lines[statement.lineno - 1][: statement.col_offset].strip() == ""
    patch = replaced(source, [(statement, text)]) if first and value and owner else None
    span = found.statement_span(f"an attribute of `{owner}` that no step reads", "culprit")
    title = f"""Set the rate in the parameter groups: `for group in {owner}.param_groups: group["lr"] = {wording.short(value, 30)}`"""
    return span, Fix(title=title, safety="unsafe", patch=patch)


def _sets(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    """Assignments to `<something>.lr`, where that is not the object's own."""
    for source, write in writes_in(sources, "lr"):
        owner = None if write.owner is None else dotted(write.owner)
        if isinstance(write.node, ast.Assign) and len(write.node.targets) == 1 and owner not in (None, "self", "cls"):
            yield source, write.node
