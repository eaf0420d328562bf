"""Clipping what an exhausted iterator gives: `filter(...)` that the optimizer has gone through already. Part of GG610."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.contents import lookup
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.source import ResolvedSite, assignments_to, at_line, dotted, resolve
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import replaced
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import class_node


def told(incident: Incident, book: Book, site: CallSite, code: str, name: str) -> Diagnosis | None:
    """What was given is an iterator that outlives the turns of the loop, and nothing is left in it."""
    place = resolve(site)
    call = None if place is None else place.call
    view = next((view for view in incident.user_frames if view.frame.f_code is site.code), None)
    if place is None or place.source is None or call is None or view is None:
        return None
    given = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "parameters"), None)
    text = None if given is None else dotted(given)
    if given is None or text is None or not isinstance(_value(view, text), Iterator):
        return None
    made = _made(place, view, text)
    if made is False:
        return None
    clip = (place.callee or "clip_grad_norm_").split(".")[-1]
    spot = place.span(f"`{text}` is empty here: nothing is clipped", "context")
    culprit: SourceSpan | None = spot.model_copy(update={"role": "culprit"})
    related = []
    patch = None
    if isinstance(made, tuple):
        source, statement = made
        value = getattr(statement, "value", None)
        found = at_line(source.filename, statement.lineno)
        if found is not None and isinstance(value, ast.expr):
            culprit, related = found.statement_span("an iterator: it can be gone through once", "culprit"), [spot]
            patch = _listed(source, value)
    optimizer = wording.optimizer_name(book, incident)
    user = resolve(book.made)
    eaten = user is not None and user.call is not None and any(dotted(argument) == text for argument in user.call.args)
    if eaten and user is not None:
        related.append(user.span(f"`{optimizer}` has gone through it", "made"))
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{clip}` gets no parameter: `{text}` is an iterator that has been gone through, and nothing is clipped",
        culprit=culprit,
        related=wording.spans(*related, wording.span(book.step_site, "applies the gradients unclipped", "context")),
        explanation=f"`filter`, `map`, generators and `model.parameters()` give each item once. `{text}` is the same object at each call, "
        f"and was empty at the last three: `{clip}` has nothing to do, and does not complain.",
        fixes=[
            Fix(
                title=f"keep a list: `{text} = list(...)`",
                safety="unsafe",
                patch=patch,
                detail="Updates are clipped from then on, which is the purpose.",
            )
        ],
    )


def _value(view: FrameView, text: str) -> Any:
    """What a dotted name means in a live frame, read without running code."""
    return lookup(view, text)


def _made(place: ResolvedSite, view: FrameView, text: str) -> Any:
    """The one statement that made it, before the loop of the call; None: elsewhere; False: it may be made anew for each call."""
    source, call = place.source, place.call
    if source is None or call is None or source.tree is None:
        return False
    first, _, attribute = text.partition(".")
    if first == "self" and attribute:
        found = class_node(type(view.locals.get("self")))
        if found is None:
            return False
        within, tree = found
        sets = assignments_to(tree, text) or [n for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for n in assignments_to(f, text)]
        around = {id(above) for above in source.ancestors(call) if isinstance(above, FUNCTIONS)}
        if any(around & {id(above) for above in within.ancestors(node)} for node in sets):
            return False
        sets = list({id(node): node for node in sets}.values())
        return (within, sets[0]) if len(sets) == 1 else None
    if attribute:
        return False
    function: ast.AST = place.enclosing_function or source.tree
    loop = next((above for above in _up_to(source, call, function) if isinstance(above, (ast.For, ast.AsyncFor, ast.While))), None)
    sets = assignments_to(function, text)
    if not sets and function is not source.tree and text in view.globals and text not in view.locals:
        sets, function = assignments_to(source.tree, text), source.tree
        return (source, sets[0]) if len(sets) == 1 else False
    if loop is None or any(loop in source.ancestors(node) or node is loop for node in sets):
        return False
    return (source, sets[0]) if len(sets) == 1 else None


def _up_to(source: Source, node: ast.AST, top: ast.AST) -> Iterator[ast.AST]:
    for above in source.ancestors(node):
        if above is top or isinstance(above, FUNCTIONS):
            return
        yield above


def _listed(source: Source, value: ast.expr) -> str | None:
    text = source.segment(value)
    if text is None:
        return None
    if isinstance(value, ast.GeneratorExp) and text.startswith("("):
        return replaced(source, [(value, f"[{text[1:-1]}]")])
    return replaced(source, [(value, f"list({text})")])
