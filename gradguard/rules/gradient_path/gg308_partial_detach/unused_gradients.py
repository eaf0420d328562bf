"""Gradients taken with create_graph=True, so that a term of the loss can be made of them, and of which no loss is made. Part of GG308."""

from __future__ import annotations

import ast

from gradguard.analysis.places.sites import short
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.undifferentiated import UnusedGradients


def told(finding: UnusedGradients) -> Diagnosis | None:
    """The statement whose value nothing reads; silent where something does, which may use it in other steps."""
    taken, backward = finding.taken, finding.backward
    codes = {site.code for site in backward.stack}
    site = next((site for site in taken.stack if site.code in codes), None)
    place = resolve(site)
    names = [] if place is None else _unread(place)
    if place is None or names is None:
        return None
    subject = " and ".join(f"`{name}`" for name in names) or f"the result of `{short(place.text, 40)}`"
    loss = resolve(backward.site)
    inner = resolve(taken.site)
    return Diagnosis(
        code="GG308",
        name="partial-detach",
        severity="warning",
        headline=f"{subject} {'are' if len(names) > 1 else 'is'} computed to be differentiated, and nothing uses "
        f"{'them' if len(names) > 1 else 'it'}: no loss contains {'these terms' if len(names) > 1 else 'this term'}",
        culprit=place.statement_span("its gradients are taken with create_graph=True, and nothing reads the value", "culprit"),
        related=[
            *([] if inner is None or inner.line == place.line else [inner.span("takes gradients that have a graph of their own", "made")]),
            *([] if loss is None else [loss.span("starts from a loss without it", "backward")]),
        ],
        explanation="`create_graph=True` costs time and memory to make gradients that a further backward() can go through. In the traced "
        "steps no backward() and no other `autograd.grad` went through these.",
        fixes=[Fix(title=f"Add {subject}, times its weight, to the loss that backward() starts from", safety="unsafe")],
    )


def _unread(place: ResolvedSite) -> list[str] | None:
    """The names that a statement binds and that nothing ever reads; none of a value that is dropped; None where it may be read."""
    statement, source = place.statement, place.source
    if statement is None or source is None or source.tree is None:
        return None
    if isinstance(statement, ast.Expr):
        return [] if statement.value is place.call else None
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    parts = [part for target in targets for part in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]
    scope = place.enclosing_function or source.tree
    unread = [part for part in parts if isinstance(part, (ast.Name, ast.Attribute)) and not _is_read(part, scope, source.tree)]
    whole = len(parts) == 1
    if not unread or (whole and statement.value is not place.call):
        return None
    return [source.flat(part) for part in unread]


def _is_read(target: ast.Name | ast.Attribute, scope: ast.AST, tree: ast.AST) -> bool:
    if isinstance(target, ast.Name):
        return any(node.id == target.id and isinstance(node.ctx, ast.Load) for node in inside(scope, ast.Name))
    return any(node.attr == target.attr and isinstance(node.ctx, ast.Load) for node in inside(tree, ast.Attribute))
