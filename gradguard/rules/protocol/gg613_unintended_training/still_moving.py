"""Parameters that were frozen and go on moving: they kept a gradient, and the optimizer looks at nothing else. Part of GG613."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import after, patched
from gradguard.monitors.moving_frozen import MovingFrozen
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import the_one


def _held(parameter: Any) -> bool:
    return parameter is not None and not parameter.requires_grad and parameter.grad is not None


def told(incident: Incident, finding: MovingFrozen, book: Book, code: str, name: str) -> Diagnosis | None:
    """The freeze, and the step that does not heed it."""
    parameters: list[Any] = [p for ref in finding.moved if _held(p := ref())]
    if not parameters:
        return None
    zeros = all(not bool(p.grad.any()) for p in parameters[:8])
    optimizer = wording.optimizer_name(book, incident)
    names = wording.parameter_names(parameters, incident.names)
    froze = the_one(incident, lambda sources: _freezes(sources))
    cleared = resolve(book.zero_site)
    keeps = cleared is not None and _keeps(cleared)
    kept = "zeros" if zeros else "a gradient"
    culprit: SourceSpan | None = None
    if froze is not None:
        culprit = froze.statement_span(f"freezes it, and leaves `.grad` as it is ({kept}, not None)", "culprit")
    elif keeps and cleared is not None:
        culprit = cleared.span("fills the gradients with zeros: to the optimizer that is a gradient", "culprit")
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{optimizer}.step()` still moves what is frozen: {wording.listed(names, len(parameters))} "
        f"{'have' if len(parameters) > 1 else 'has'} `requires_grad=False`, and {kept} in `.grad`",
        culprit=culprit,
        related=wording.spans(
            cleared.span("writes zeros instead of None: the frozen ones keep theirs", "context") if keeps and cleared is not None else None,
            wording.span(book.step_site, "moves them: momentum, averages and weight decay go on", "context"),
        ),
        tensors=wording.facts(parameters, incident.names),
        explanation="An optimizer does not look at `requires_grad`: it leaves out parameters whose `.grad` is None, and steps on all "
        "others. With a gradient of zeros, momentum and Adam's averages still move a parameter, and weight decay shrinks it.",
        fixes=[
            Fix(
                title="Drop the gradient when freezing: `p.grad = None`",
                safety="unsafe",
                patch=_patch(froze),
                detail=f"Or call `{optimizer}.zero_grad(set_to_none=True)`, which is the default.",
            )
        ],
    )


def _freezes(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    """`p.requires_grad = False` and `.requires_grad_(False)` that are statements of their own."""
    for source in sources:
        for node in ast.walk(source.tree or ast.Module([], [])):
            if isinstance(node, (ast.Assign, ast.Expr)) and _frozen_name(node) is not None:
                yield source, node


def _frozen_name(node: ast.stmt | None) -> str | None:
    """What a statement freezes."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False:
        target = node.targets[0]
        return dotted(target.value) if isinstance(target, ast.Attribute) and target.attr == "requires_grad" else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        call = node.value
        off = [*call.args, *(k.value for k in call.keywords)]
        if node.value.func.attr == "requires_grad_" and len(off) == 1 and isinstance(off[0], ast.Constant) and off[0].value is False:
            return dotted(node.value.func.value)
    return None


def _keeps(place: ResolvedSite) -> bool:
    """Whether a zero_grad was told to write zeros."""
    given = [] if place.call is None else [*place.call.args, *(k.value for k in place.call.keywords if k.arg == "set_to_none")]
    return len(given) == 1 and isinstance(given[0], ast.Constant) and given[0].value is False


def _patch(froze: ResolvedSite | None) -> str | None:
    """`p.grad = None` below the freeze of a loop's parameter."""
    statement, source = (None, None) if froze is None else (froze.statement, froze.source)
    name = _frozen_name(statement)
    if statement is None or source is None or name is None:
        return None
    loops = [above for above in source.ancestors(statement) if isinstance(above, ast.For)]
    bound = loops and "parameters()" in source.flat(loops[0].iter) and any(dotted(part) == name for part in ast.walk(loops[0].target))
    return patched(source, insert=[after(source, statement, f"{name}.grad = None")]) if bound else None
