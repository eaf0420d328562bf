"""# GG307 not-a-leaf-grad

## What it is
`.grad` is read from a tensor that is the result of an operation (a non-leaf), and is None: the variable was rebound from
the leaf to something computed from it (`x = (x - mean) / std`, `w = torch.randn(3, requires_grad=True).to(device)`).

## Why it is wrong
backward() fills `.grad` of leaves only. The result of an operation gets none, unless `retain_grad()` was called on it before.

## Example
```python
images.requires_grad_(True)
images = (images - mean) / std
criterion(model(images), labels).backward()
step = epsilon * images.grad.sign()     # 'NoneType' object has no attribute 'sign'
```

## Use instead
```python
images.requires_grad_(True)
normalised = (images - mean) / std
criterion(model(normalised), labels).backward()
step = epsilon * images.grad.sign()
```

## Fix safety
Manual: whether the gradient at the leaf or at the result is wanted is for the author to say.

## When it speaks, what silences it
When an AttributeError or TypeError over None arises in a line that uses `.grad` of a live non-leaf tensor.
"""

from __future__ import annotations

import ast

from gradguard.analysis.graph import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.stores import returns_of
from gradguard.analysis.places.sites import same_place, short, site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import calls_inside, inside, reads
from gradguard.analysis.program.index import writes_in
from gradguard.analysis.program.search_scopes import definitions
from gradguard.analysis.program.stored_values import puts_result_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import before, edit_of, patched
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import lost_path, missing_grad
from gradguard.rules.gradient_path.missing_grad import Missing
from gradguard.torch_compat.private_api import node_sequence


def recognise(incident: Incident) -> Diagnosis | None:
    """The non-leaf whose `.grad` was used, and where the name was taken from the leaf."""
    missing = missing_grad.missing(incident)
    if missing is None or missing.tensor.is_leaf or missing.tensor.retains_grad:
        return None
    name = missing.text
    bound = _rebound(incident, missing)
    rebound = _returned(incident, bound, missing) or bound
    op = walk.op_name(missing.tensor.grad_fn)
    leaf = _leaf(incident, missing)
    related: list[SourceSpan] = []
    culprit: SourceSpan | None = None
    headline = f"`{name}.grad` is None: `{name}` is the result of an operation ({op}), and backward() fills `.grad` of leaves only"
    if rebound is not None:
        culprit = rebound.statement_span(f"`{name}` is the result of an operation from here on, no longer the leaf", "culprit")
        headline = f"`{name}.grad` is None: `{name}` was rebound to the result of an operation, and backward() fills `.grad` of leaves only"
    if rebound is not bound and bound is not None:
        culprit = rebound.statement_span("returns the result of an operation on the leaf", "culprit") if rebound is not None else None
        related.append(bound.statement_span(f"`{name}` is that result from here on", "made"))
    if leaf is not None:
        related.append(leaf.span("the leaf: its `.grad` is filled", "made"))
    if not same_place(rebound, missing.place):
        related.append(missing.place.span(f"`{name}.grad` is None", "backward"))
    short_name = name.rpartition(".")[2]
    patch = None if leaf is None or rebound is None else _leaf_kept(rebound, missing)
    kept = f"Keep the leaf as `leaf` before `{name}` is rebound, and read `leaf.grad`"
    return Diagnosis(
        code="GG307",
        name="not-a-leaf-grad",
        headline=headline,
        culprit=culprit,
        related=related,
        tensors=[lost_path.facts(name, missing.tensor)],
        explanation="A leaf is a tensor the user made; the result of any operation on it, even `.to(device)`, a slice or a "
        "multiplication at its creation, is not. "
        "Gradients of results are used on the way and let go.",
        fixes=[
            Fix(
                title=kept
                if patch
                else f"Keep the leaf under its own name, give the result another, and read `.grad` of the leaf `{short_name}`",
                safety="unsafe" if patch else "manual",
                patch=patch,
                detail="Where the leaf is only made here: finish it first, then `.requires_grad_(True)` "
                "(`torch.randn(3).to(device).requires_grad_(True)`).",
            ),
            Fix(title=f"If the gradient at the result is wanted, call `{name}.retain_grad()` before backward()", safety="safe"),
        ],
        confidence="certain" if rebound is not None else "likely",
    )


def _leaf_kept(rebound: ResolvedSite, missing: Missing) -> str | None:
    """The diff that gives the leaf a second name before its first one is rebound, and reads the gradient through that."""
    source, statement, used = rebound.source, rebound.statement, missing.place.statement
    name = missing.text
    if source is None or not isinstance(statement, ast.Assign) or used is None or missing.place.source is not source:
        return None
    taken = {node.id for node in inside(source.tree, ast.Name)}
    own = any(dotted(target) == name for target in statement.targets) and bool(reads(statement.value, name))
    asked = [node for node in inside(used, ast.Attribute) if node.attr == "grad" and dotted(node.value) == name]
    if not name.isidentifier() or "leaf" in taken or not own or not asked or rebound.function != missing.place.function:
        return None
    return patched(source, [edit for read in asked for edit in edit_of(read, "leaf.grad")], [before(source, statement, f"leaf = {name}")])


def _rebound(incident: Incident, missing: Missing) -> ResolvedSite | None:
    """The statement that bound the name to the result: as recorded, else the last assignment before the use."""
    made = incident.place_of_node(node_sequence(missing.tensor.grad_fn))
    if made is not None and any(target in (missing.text, missing.text.rpartition(".")[2]) for target in made.targets):
        return made
    scope = missing.scope
    node = missing.place.node
    if scope is None or node is None:
        return made
    base = missing.text.split("[")[0]
    found = definitions(scope, base, node)
    if found:
        place = site_at(scope.source, found[0].value if not isinstance(found[0].statement, ast.For) else found[0].statement)
        return made if made is not None and made.line == place.line else place
    from gradguard.analysis.history.follower import Follower

    follower = Follower(incident)
    live = follower.live(0)
    if live is not None and base.startswith("self."):
        for source, write in writes_in(incident.sources, base.rpartition(".")[2]):
            if isinstance(write.node, ast.Assign) and write.owner is not None and dotted(write.owner) == base.rpartition(".")[0]:
                return site_at(source, write.node)
    argument = follower.argument(base, live) if live is not None else None
    if argument is not None:
        caller, expression = argument
        outer = definitions(caller, caller.source.flat(expression), expression)
        if outer:
            return site_at(caller.source, outer[0].value)
    return made


def _returned(incident: Incident, bound: ResolvedSite | None, missing: Missing) -> ResolvedSite | None:
    """The `return` of the user's function that the name was bound to the result of, where it is the only one that gives such a result."""
    statement = None if bound is None else bound.statement
    value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
    called = None if not isinstance(value, ast.Call) else (dotted(value.func) or "").rpartition(".")[2]
    if not called:
        return None
    op = walk.op_name(missing.tensor.grad_fn)
    found = [
        site_at(source, statement)
        for source in incident.sources
        for function in source.scopes
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.name == called
        for statement in returns_of(function)
    ]
    fitting = [place for place in found if isinstance(place.statement, ast.Return) and puts_result_of(place.statement.value, op)]
    return fitting[0] if len(found) == len(fitting) == 1 else None


def _leaf(incident: Incident, missing: Missing) -> ResolvedSite | None:
    """Where `requires_grad_()` or `requires_grad=True` made the leaf, in the same function."""
    scope = missing.scope
    if scope is None:
        return None
    base = missing.text.rpartition(".")[2]
    calls = calls_inside(scope.function, "requires_grad_")
    found = (call for call in calls if isinstance(call.func, ast.Attribute) and base in short(scope.source.flat(call.func.value), 200))
    return next((site_at(scope.source, call) for call in found), None)


RULE = Rule(
    code="GG307",
    name="not-a-leaf-grad",
    summary="`.grad` of a non-leaf tensor is None",
    recognise=recognise,
    priority=60,
    messages=("nonetype",),
)
