"""`retain_graph=True` where several calls need one graph and nothing changes it in between: when that is so, and the patch."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import edit_of, patched
from gradguard.rules.lifetime import wording
from gradguard.rules.lifetime.second_backward import Study


def retaining(place: ResolvedSite | None) -> str | None:
    """A patch that passes `retain_graph=True` to the call; None where it keeps its graph already, or is too long to rewrite."""
    call = None if place is None else place.call
    if place is None or place.source is None or call is None or "retain_graph" in place.keywords:
        return None
    if place.keywords.get("create_graph") == "True":
        return None
    text = place.source.segment(call)
    if text is None or "\n" in text or not text.endswith(")"):
        return None
    separator = "" if not (call.args or call.keywords) else " " if text[:-1].rstrip().endswith(",") else ", "
    return patched(place.source, edit_of(call, f"{text[:-1]}{separator}retain_graph=True)"))


def only_looked_at(place: ResolvedSite | None) -> bool:
    """Whether only numbers are made of what a call returns, in the function where it stands."""
    scope = None if place is None else place.enclosing_function
    if place is None or place.source is None or scope is None or not place.targets or place.statement is None:
        return False
    names = set(place.targets)
    uses = [node for node in inside(scope, ast.Name) if isinstance(node.ctx, ast.Load) and node.id in names]
    return bool(uses) and all(_is_a_number(place.source, node) for node in uses)


def _is_a_number(source: Source, node: ast.AST) -> bool:
    for above in source.ancestors(node):
        if isinstance(above, ast.stmt):
            return False
        if isinstance(above, ast.Attribute) and above.attr in ("item", "tolist", "numpy", "detach", "shape"):
            return True
        if isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id in ("float", "print"):
            return True
    return False


def is_vector_product(facts: Study) -> bool:
    """Whether the failing call and the one that freed its graph are one `autograd.grad` with `grad_outputs`, with no step between.

    A Jacobian or a Hessian times several vectors: each call needs the graph of them all. Without `grad_outputs` it would be the
    very same gradient once more.
    """
    first, call = facts.freed_by, facts.call
    if first is None or call is None or first.kind != "grad" or call.kind != "grad":
        return False
    if any(fact.clock > first.clock for fact in facts.incident.journal.steps):
        return False
    place = resolve(call.site)
    node = None if place is None else place.call
    return node is not None and place is not None and ("grad_outputs" in place.keywords or len(node.args) > 2)


def vector_product(facts: Study, shown: str, code: str, name: str) -> Diagnosis:
    """What is told of it.

    Args:
        shown: what is differentiated, in backticks.
    """
    place = resolve(facts.call.site) if facts.call is not None else None
    words = wording.call_words(facts.call)
    culprit = None if place is None else place.span("frees the graph that its next call needs", "culprit")
    made = facts.finder.site(facts.graph.roots[0])
    related = [] if made is None else [made.span("what is differentiated was made here", "made")]
    return Diagnosis(
        code=code,
        name=name,
        severity="error",
        headline=f"{words} frees the graph of {shown}, and is called again on the same graph",
        culprit=culprit,
        related=wording.without_repeats(culprit, related),
        tensors=wording.tensor_facts(shown.strip("`") if shown[0] == "`" else None, facts.incident.roots[0]),
        explanation=(
            f"Each call takes the product of a vector (`grad_outputs`) with the derivative of {shown}, from one graph. "
            f"Its saved values were freed {wording.freed_words(facts)}, since no call asked to keep them; "
            "no optimizer has stepped in between."
        ),
        notes=wording.notes(facts),
        fixes=[
            Fix(
                title=f"pass retain_graph=True to {words}",
                safety="safe",
                detail=f"the graph lives as long as {shown} does",
                patch=retaining(place),
            )
        ],
        confidence="certain" if culprit is not None else "likely",
    )
