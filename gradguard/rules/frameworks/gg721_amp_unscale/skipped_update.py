"""A batch that is left out between `unscale_` and `update`: the next `unscale_` is refused. Part of GG721."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from gradguard.analysis.places.sites import short, site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import targets_of
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.expressions import calls_inside, inside, last_part
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import inserted

_FINITE = ("isfinite", "isnan", "isinf")
_NORMS = ("clip_grad_norm_", "clip_grad_norm", "get_total_norm")


class Skip(NamedTuple):
    """What leads past the one call of `update()` where the gradients are not as they should be."""

    update: ast.Call
    tests: list[ast.If]
    exits: list[ast.stmt]  # `continue`, `return`; none where the call stands under the condition itself


def diagnosis(code: str, name: str, place: ResolvedSite, receiver: str) -> Diagnosis | None:
    """The diagnosis, where the source around the refused call has such a way and no other."""
    source = place.source
    skip = None if source is None or place.statement is None else _skip(source, place.statement, receiver)
    if source is None or skip is None:
        return None
    update = site_at(source, skip.update)
    here = place.span("refused: for the scaler these are the gradients that were left out", "backward")
    condition = f"`if {short(source.flat(skip.tests[0].test), 40)}`"
    fix = Fix(title=f"Call `{receiver}.update()` where {condition} leaves the step out, too", safety="unsafe")
    if skip.exits:
        words = source.flat(skip.exits[0])
        headline = f"`{short(words, 24)}` leads past `{receiver}.update()`: the next `{receiver}.unscale_` is refused"
        only = skip.exits[0] if len(skip.exits) == 1 else None
        spans = [site_at(source, each).span(f"leaves the turn without `{receiver}.update()`", "context") for each in skip.exits[:3]]
        culprit = None if only is None else spans.pop().model_copy(update={"role": "culprit"})
        related = [*spans, update.span("is not reached then", "context"), here]
        if only is not None:
            title = f"Call `{receiver}.update()` before `{short(words, 24)}`"
            fix = Fix(title=title, safety="unsafe", patch=_patch(source, only, receiver))
    else:
        headline = f"`{receiver}.update()` is not called where {condition} fails: the next `{receiver}.unscale_` is refused"
        culprit = update.span(f"is left out together with the step, where {condition} fails", "culprit")
        related = [here]
        fix = Fix(title=f"Take `{receiver}.update()` out of {condition}: call it after every `unscale_`", safety="unsafe")
    return Diagnosis(
        code=code,
        name=name,
        headline=headline,
        culprit=culprit,
        related=related,
        explanation=f"`{receiver}` keeps in mind that an optimizer's gradients are unscaled, and whether they are infinite, until "
        f"`update()`. A turn that ends between `unscale_` and `update()` leaves that behind for the next; and the scale, which an overflow "
        "is to lower, stays as it is.",
        fixes=[
            fix.model_copy(
                update={"detail": f"Or leave nothing out by hand: `{receiver}.step()` skips a step whose gradients are not finite."}
            )
        ],
        confidence="likely",
    )


def guarded(place: ResolvedSite, receiver: str) -> bool:
    """Whether the same function steps or updates under a condition that the call does not stand under."""
    source = place.source
    around = None if source is None else place.enclosing_function or source.tree
    if source is None or around is None or place.statement is None:
        return False
    mine = {id(each) for each in source.ancestors(place.statement)}
    return any(
        isinstance(above, ast.If) and id(above) not in mine
        for name in ("step", "update")
        for call in _calls(around, receiver, name)
        for above in source.ancestors(call)
    )


def _skip(source: Source, statement: ast.stmt, receiver: str) -> Skip | None:
    """Outwards from the call, through conditions: the first block in which `update()` follows."""
    told = _judged(source, statement)
    inner: ast.AST = statement
    exits: list[ast.stmt] = []
    tests: list[ast.If] = []
    while True:
        parent = source.parents.get(inner)
        if parent is None:
            return None
        for following in _after(parent, inner):
            test = isinstance(following, ast.If) and told(following.test)
            calls = list(_calls(following, receiver, "update"))
            if len(calls) > 1:
                return None
            if calls and (isinstance(following, ast.Expr) or (test and not exits)):
                under = [following] if isinstance(following, ast.If) else tests
                return Skip(calls[0], under, exits) if under else None
            if calls:
                return None
            ways = list(_exits(following))
            if ways and not test:
                return None  # another way out, of accumulation perhaps
            if isinstance(following, ast.If) and ways:
                tests.append(following)
                exits += ways
        if not isinstance(parent, (ast.If, ast.With, ast.Try)):
            return None
        inner = parent


def _after(parent: ast.AST, child: ast.AST) -> list[ast.stmt]:
    """The statements of the same block that come later."""
    for body in (getattr(parent, name, []) for name in ("body", "orelse", "finalbody")):
        if isinstance(body, list) and child in body:
            return body[body.index(child) + 1 :]
    return []


class _judged:
    """Whether an expression looks at the gradients: their norm, or whether a value is a finite number."""

    def __init__(self, source: Source, statement: ast.stmt) -> None:
        self._names: set[str] = set()
        around = function_around(source, statement) or source.tree
        assigned = [node for node in inside(around or statement, ast.Assign, ast.AnnAssign) if node.value]
        for _ in range(3):
            for node in assigned:
                if node.value is not None and self(node.value):
                    self._names |= {target.id for target in targets_of(node) if isinstance(target, ast.Name)}

    def __call__(self, node: ast.expr) -> bool:
        for item in inside(node, ast.Call, ast.Name):
            if isinstance(item, ast.Call) and last_part(item) in (*_FINITE, *_NORMS):
                return True
            if isinstance(item, ast.Name) and item.id in self._names:
                return True
        return False


def _calls(around: ast.AST, receiver: str, name: str) -> Iterator[ast.Call]:
    for call in calls_inside(around, name):
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == receiver:
            yield call


def _exits(statement: ast.stmt) -> Iterator[ast.stmt]:
    """What ends the turn inside of a statement: not a loop's of its own."""
    if isinstance(statement, (ast.Continue, ast.Return)):
        yield statement
    elif isinstance(statement, (ast.If, ast.With)):
        for each in [*statement.body, *getattr(statement, "orelse", [])]:
            yield from _exits(each)


def _patch(source: Source, way: ast.stmt, receiver: str) -> str | None:
    """`update()` on a line of its own before the exit, where that has a line of its own."""
    line = source.lines[way.lineno - 1].strip()
    return inserted(source, way.lineno, f"{receiver}.update()") if line.startswith(("continue", "return")) else None
