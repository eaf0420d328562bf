"""A loop over a list of modules that calls the same one each time: `[self.heads[0](x) for head in self.heads]`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from gradguard.evidence.names import Names
from gradguard.evidence.source import ResolvedSite, at_line, dotted
from gradguard.evidence.syntax import Source
from gradguard.rules.protocol.places import class_node
from gradguard.safe_read import peek


@dataclass(frozen=True)
class FixedIndex:
    """The call, and whose place it takes.

    Attributes:
        place: the line with the constant index.
        items: the list as written, such as `self.heads`.
        index: the constant.
        variable: the loop's variable, which nothing reads.
    """

    place: ResolvedSite
    items: str
    index: int
    variable: str


def fixed_index(names: Names, parameters: list[torch.Tensor]) -> FixedIndex | None:
    """The one such loop that explains why none of these parameters, all of one list's items, is ever used."""
    lists = {found for parameter in parameters if (found := _list_of(names, parameter)) is not None}
    if len(lists) != 1 or not parameters:
        return None
    owner, attribute = next(iter(lists))
    indices = {index for parameter in parameters if (index := _index_of(names, parameter, attribute)) is not None}
    written = class_node(type(owner))
    if written is None:
        return None
    source, node = written
    items = f"self.{attribute}"
    loops = [loop for loop in _loops(node, items) if not _reads(loop[1], loop[0])]
    constants = _constants(source, node, items)
    if len(loops) != 1 or constants is None or len(constants) != 1 or constants[0][1] in indices:
        return None
    subscript, constant = constants[0]
    if not any(subscript is item for body in loops[0][1] for item in ast.walk(body)):
        return None
    place = at_line(source.filename, subscript.lineno)
    return None if place is None else FixedIndex(place, items, constant, loops[0][0])


def _list_of(names: Names, parameter: torch.Tensor) -> tuple[nn.Module, str] | None:
    state = names.state(parameter)
    if state is None:
        return None
    owner, steps = state.root, state.path.split(".")
    for step, following in pairwise(steps):
        if following.isdigit():
            return owner, step
        owner = peek(owner, step, owner)
    return None


def _index_of(names: Names, parameter: torch.Tensor, attribute: str) -> int | None:
    state = names.state(parameter)
    steps = state.path.split(".") if state is not None else []
    return next((int(b) for a, b in pairwise(steps) if a == attribute and b.isdigit()), None)


def _loops(node: ast.AST, items: str) -> list[tuple[str, list[ast.AST]]]:
    """The loops over a list: the variable, and what runs for each item."""
    found: list[tuple[str, list[ast.AST]]] = []
    for item in ast.walk(node):
        if isinstance(item, ast.For) and isinstance(item.target, ast.Name) and dotted(item.iter) == items:
            found.append((item.target.id, list(item.body)))
        elif isinstance(item, (ast.ListComp, ast.GeneratorExp)):
            first = item.generators[0]
            if isinstance(first.target, ast.Name) and dotted(first.iter) == items:
                found.append((first.target.id, [item.elt]))
    return found


def _reads(body: list[ast.AST], variable: str) -> bool:
    return any(isinstance(item, ast.Name) and item.id == variable for part in body for item in ast.walk(part))


def _constants(source: Source, node: ast.AST, items: str) -> list[tuple[ast.Subscript, int]] | None:
    """The constant indices with which the list is read; None where it is read in any other way than these and plain loops."""
    found = []
    for item in ast.walk(node):
        if not isinstance(item, ast.Attribute) or dotted(item) != items or not isinstance(item.ctx, ast.Load):
            continue
        above = source.parents.get(item)
        if isinstance(above, ast.Subscript) and isinstance(above.slice, ast.Constant) and isinstance(above.slice.value, int):
            found.append((above, above.slice.value))
        elif not isinstance(above, (ast.For, ast.comprehension)):
            return None
    return found
