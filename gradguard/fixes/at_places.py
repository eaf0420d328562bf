"""Patches at resolved places: a statement removed, moved, repeated, detached, or put beside another; None wherever that is not sure.

A statement is only touched where its lines are its own, and only names that can be seen from a place are written there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.syntax import FUNCTIONS, Source, range_of
from gradguard.core.safe_read import elements, pairs
from gradguard.fixes.edits import after, before, patched, removed, replaced
from gradguard.fixes.statements import moved_after, moved_before, siblings

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


def own_statement(place: ResolvedSite | None, simple: bool = True) -> tuple[Source, ast.stmt] | None:
    """The statement at a place, where no other stands on its lines.

    Args:
        simple: whether it must not be a block.
    """
    if place is None or place.source is None or place.statement is None:
        return None
    source, statement = place.source, place.statement
    if simple and hasattr(statement, "body"):
        return None
    head = source.lines[statement.lineno - 1][: source.characters(statement.lineno, statement.col_offset)]
    last, end = statement.end_lineno or statement.lineno, statement.end_col_offset or 0
    tail = source.lines[last - 1][source.characters(last, end) :].strip()
    alone = not head.strip() and (hasattr(statement, "body") or not tail or tail.startswith("#"))
    return (source, statement) if alone else None


def bare_call(place: ResolvedSite | None) -> tuple[Source, ast.stmt] | None:
    """The statement at a place, where it is nothing but the call, whose result nobody uses."""
    own = own_statement(place)
    if own is None or place is None or place.call is None or not isinstance(own[1], ast.Expr) or own[1].value is not place.call:
        return None
    return own


def sees(place: ResolvedSite, expression: str) -> bool:
    """Whether all names in an expression are variables of the function at a place, of one around it, or of its module."""
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError):
        return False
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    source = place.source
    if source is None or source.tree is None or not names:
        return False
    function: ast.AST | None = place.enclosing_function
    known = set(_bound_in(source.tree))  # what is imported or defined may be a class: `Adam.step()`
    while function is not None:
        if isinstance(function, FUNCTIONS):
            known |= set(_bound_in(function))
        function = source.parents.get(function)
    return names <= known


def _bound_in(scope: ast.AST) -> Iterator[str]:
    """Names that a function or module binds itself: parameters and assignments, not those of functions within it."""
    ahead = list(ast.iter_child_nodes(scope))
    for node in ahead:  # grows while it is read
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            ahead.extend(ast.iter_child_nodes(node))


def put_before(place: ResolvedSite | None, text: str, variables: str | None = None) -> str | None:
    """The diff that puts a call before the statement at a place.

    Args:
        variables: the part of the call whose names are variables of the program; all of it, where it is not given.
    """
    own = own_statement(place, simple=False)
    return None if own is None or place is None or not sees(place, variables or text) else patched(own[0], insert=[before(*own, text)])


def put_after(place: ResolvedSite | None, text: str) -> str | None:
    """The diff that puts a call after the statement at a place."""
    own = own_statement(place)
    if own is None or place is None or isinstance(own[1], (ast.Return, ast.Raise, ast.Continue, ast.Break)) or not sees(place, text):
        return None
    return patched(own[0], insert=[after(*own, text)])


def put_around(place: ResolvedSite | None, first: str, last: str) -> str | None:
    """The diff that puts calls before and after the statement at a place; around the `with` blocks that it is the beginning of."""
    own = own_statement(place)
    if own is None or place is None or not (sees(place, first) and sees(place, last)):
        return None
    source, statement = own
    if isinstance(statement, (ast.Return, ast.Raise)):
        return None
    return patched(source, insert=[before(source, statement, first), after(source, statement, last)])


class Stretch(NamedTuple):
    """From a call in a block to the end of a later statement of that block."""

    begin: ResolvedSite
    end: ast.stmt

    @property
    def lines(self) -> range:
        """The lines of the later statement."""
        return range(self.end.lineno, (self.end.end_lineno or self.end.lineno) + 1)

    @property
    def is_left(self) -> bool:
        """Whether the later statement may leave its block, so that what comes after it need not run."""
        jumps: tuple[type[ast.AST], ...] = (ast.Return, ast.Yield, ast.YieldFrom)
        if not isinstance(self.end, (ast.For, ast.While)):
            jumps += (ast.Break, ast.Continue)
        return any(isinstance(node, jumps) for node in ast.walk(self.end))


def stretch(begin: ResolvedSite, last: ResolvedSite) -> Stretch | None:
    """From a call to the statement in its block that a later place is in; None where it comes to no such statement."""
    source, statement = begin.source, begin.statement
    if source is None or source is not last.source or statement is None or last.statement is None:
        return None
    block = siblings(source, statement)
    end = next((node for node in (last.statement, *source.ancestors(last.statement)) if node in block), None)
    return Stretch(begin, end) if isinstance(end, ast.stmt) and end.lineno > statement.lineno else None


def put_behind(found: Stretch, calls: Sequence[str]) -> str | None:
    """The diff that puts calls after a stretch; None where their names are not those of its beginning."""
    source, last = found.begin.source, found.lines[-1]
    if source is None or source.tree is None or found.is_left or not all(sees(found.begin, call) for call in calls):
        return None
    bound = {
        node.id
        for node in ast.walk(found.begin.enclosing_function or source.tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and found.begin.line <= node.lineno <= last
    }
    shared = any(node is not found.end and node.lineno == last for node in siblings(source, found.end))
    if shared or any(call.partition(".")[0] in bound for call in calls):
        return None
    return patched(source, insert=[after(source, found.end, call) for call in calls])


def taken_out(place: ResolvedSite | None) -> str | None:
    """The diff that removes the statement of a call; `pass` stays where it was all that a block had."""
    own = bare_call(place)
    if own is None:
        return None
    source, statement = own
    if siblings(source, statement) == [statement]:
        return replaced(source, [(statement, "pass")])
    return removed(source, statement.lineno, statement.end_lineno or statement.lineno)


def brought_after(place: ResolvedSite | None, anchor: ResolvedSite | None) -> str | None:
    """The diff that moves the statement of a call to right after that of another place in the same function."""
    return _brought(place, anchor, behind=True)


def brought_before(place: ResolvedSite | None, anchor: ResolvedSite | None) -> str | None:
    """The diff that moves the statement of a call to right before that of another place in the same function."""
    return _brought(place, anchor, behind=False)


def _brought(place: ResolvedSite | None, anchor: ResolvedSite | None, behind: bool) -> str | None:
    moved, fixed = bare_call(place), own_statement(anchor)
    if moved is None or fixed is None or place is None or anchor is None or moved[0] is not fixed[0] or moved[1] is fixed[1]:
        return None
    source, statement = moved
    if place.enclosing_function is not anchor.enclosing_function or siblings(source, statement) == [statement]:
        return None
    if _changes_between(source, statement, fixed[1]):
        return None
    return (moved_after if behind else moved_before)(source, [statement], fixed[1])


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)}


def _changes_between(source: Source, statement: ast.stmt, anchor: ast.stmt) -> bool:
    """Whether what a statement reads is given another value on the way from its place to another one."""
    reads = _names(statement, ast.Load)
    first, last = sorted((statement.lineno, anchor.lineno))
    stores = [node for node in ast.walk(source.tree or statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    return any(node.id in reads and first <= node.lineno <= last for node in stores)


def out_of_the_loop(place: ResolvedSite | None) -> str | None:
    """The diff that moves the statement of a call from a loop to right after it, where the loop is in another loop."""
    moved = bare_call(place)
    if moved is None or place is None:
        return None
    source, statement = moved
    loop = source.parents.get(statement)
    if not isinstance(loop, (ast.For, ast.While)) or loop.orelse or statement not in loop.body or len(loop.body) == 1:
        return None
    if _names(statement, ast.Load) & _names(loop, ast.Store):
        return None  # what it is called with belongs to the loop
    around = [node for node in source.ancestors(loop) if isinstance(node, (ast.For, ast.While, *FUNCTIONS))]
    if not around or isinstance(around[0], FUNCTIONS):
        return None
    return moved_after(source, [statement], loop)


def repeated_after(place: ResolvedSite | None, anchor: ResolvedSite | None) -> str | None:
    """The diff that repeats an assignment right after the statement of another place in the same function."""
    first, fixed = own_statement(place), own_statement(anchor)
    if first is None or fixed is None or place is None or anchor is None or first[0] is not fixed[0] or first[1] is fixed[1]:
        return None
    if place.enclosing_function is not anchor.enclosing_function or not isinstance(first[1], ast.Assign):
        return None
    made = {name for target in getattr(fixed[1], "targets", ()) for name in _names(target, ast.Store) | _names(target, ast.Load)}
    if not made & _names(first[1].value, ast.Load):  # by way of another variable, which still has the old values
        return None
    return moved_after(first[0], [first[1]], fixed[1], keep=True)


def detached(source: Source, node: ast.expr) -> str | None:
    """The expression with `.detach()`, as text."""
    return applied_to(source, node, "{}.detach()")


def detached_value(text: str, value: Any, depth: int = 0) -> str | None:
    """What is to be written for a value in place of its name, so that no tensor in it has a graph, and its type is kept.

    Args:
        value: the live value: a tensor, or tuples, lists and dicts of tensors; None is answered for anything else.
    """
    if isinstance(value, torch.Tensor):
        return f"{text}.detach()"
    kind, part = type(value), ("part", "item", "each")[depth % 3]
    items = [item for _, item in pairs(value)] if kind is dict else elements(value)
    inner = {detached_value(part, item, depth + 1) for item in items} if depth < 3 else set()
    one = inner.pop() if len(inner) == 1 else None  # the same is to be done with all of them
    if one is None:
        return None
    if kind is dict:
        return f"{{key: {one} for key, {part} in {text}.items()}}"
    if kind is list:
        return f"[{one} for {part} in {text}]"
    if kind is tuple:
        return f"tuple({one} for {part} in {text})"
    return f"type({text})(*({one} for {part} in {text}))" if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def applied_to(source: Source, node: ast.expr, template: str) -> str | None:
    """The expression put into a template, in brackets where it needs them."""
    text = source.segment(node)
    if text is None:
        return None
    return template.format(text if isinstance(node, _ATOMS) or not template.startswith("{}") else f"({text})")


def made_with(places: Sequence[ResolvedSite], constructor: str, kinds: tuple[type[ast.expr], ...] = (ast.expr,)) -> str | None:
    """The diff that puts what statements assign into a call of one of torch's classes.

    Args:
        constructor: its full name, such as `torch.nn.Parameter`.
        kinds: what the assigned expressions have to be.
    """
    source = places[0].source if places else None
    name = None if source is None else spelt(source, constructor)
    changes: list[tuple[ast.AST, str]] = []
    for place in places:
        own = own_statement(place)
        value = None if own is None or not isinstance(own[1], (ast.Assign, ast.AnnAssign)) else own[1].value
        text = None if own is None or own[0] is not source or not isinstance(value, kinds) else own[0].segment(value)
        if text is None or value is None:
            return None
        changes.append((value, f"{name}({text})"))
    return None if source is None or name is None else replaced(source, changes)


def spelt(source: Source, full: str) -> str | None:
    """One of torch's names as this file writes such names; None where it imports nothing that leads there."""
    found = []
    for statement in source.tree.body if source.tree is not None else ():
        for alias in statement.names if isinstance(statement, (ast.Import, ast.ImportFrom)) else ():
            module = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
            whole = module + alias.name
            local = alias.asname or (whole.partition(".")[0] if isinstance(statement, ast.Import) else alias.name)
            reached = whole if alias.asname or module else local
            if full == reached or full.startswith(reached + "."):
                found.append(local + full[len(reached) :])
    return min(found, key=len, default=None)


def without_keyword(source: Source, call: ast.Call, name: str) -> str | None:
    """The diff that takes a keyword argument out of a call."""
    nodes: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    places = sorted(place for node in nodes if (place := range_of(node)) is not None)
    place = next((range_of(each) for each in call.keywords if each.arg == name), None)
    if place is None:
        return None
    i = places.index(place)
    start = places[i - 1][2:] if i else place[:2]
    end = places[1][:2] if not i and len(places) > 1 else place[2:]
    return patched(source, [((*start, *end), "")])


def kept_detached(places: Sequence[ResolvedSite]) -> str | None:
    """The diff that detaches what statements keep: the value that they assign, or the last argument of a call such as `append`."""
    source = places[0].source if places else None
    changes: list[tuple[ast.AST, str]] = []
    for place in places:
        value = getattr(place.statement, "value", None)
        if isinstance(place.statement, ast.Expr) and isinstance(value, ast.Call) and value.args:
            value = value.args[-1]
        if place.source is not source or source is None or not isinstance(value, ast.expr):
            return None
        if isinstance(value, (ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.Constant)):  # what is in them is not known to be a tensor
            return None
        text = detached(source, value)
        if text is None:
            return None
        if not any(node is value for node, _ in changes):
            changes.append((value, text))
    return None if source is None else replaced(source, changes)
