"""# GG103 inplace-leaf

## What it is
An in-place operation on a leaf tensor that requires grad (a parameter, or a tensor made with `requires_grad=True`) while grad
mode is on.

## Why it is wrong
A leaf is where gradients end up. After a tracked in-place change it would no longer be a leaf: the old value, whose gradient
is wanted, would be gone. PyTorch refuses before anything is written.

## Example
    for p in model.parameters():
        p.add_(p.grad, alpha=-lr)

## Use instead
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=-lr)

for updates of parameters; an out-of-place operation (`x = x + noise`) where the result shall be part of the graph.

## Fix safety
`no_grad` around an update of parameters is safe: an update is not meant to be differentiated. Not so where a forward pass adds
what it computes into a parameter: there `no_grad` would cut off all that is added, and overwrite the parameter; a copy
(`out = self.bias.clone()`) or a new tensor is right.

## When it speaks, what silences it
Only for PyTorch's exception.
"""

from __future__ import annotations

import ast

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import edit_of, patched
from gradguard.rules.base import Rule
from gradguard.rules.inplace.aliases import assigned_before
from gradguard.rules.inplace.refused import Refused
from gradguard.rules.inplace.repairs import out_of_place, under_no_grad
from gradguard.rules.inplace.spans import short

CODE, NAME = "GG103", "inplace-leaf"


def recognise(incident: Incident) -> Diagnosis | None:
    """The line that wrote, and what it wrote to."""
    if incident.says("a view of a leaf variable"):
        return None
    write = Refused(incident)
    what = write.state.full if write.state is not None else write.written
    kind = "parameter" if write.state is not None or isinstance(write.tensor, nn.Parameter) else "leaf tensor"
    alias = (
        f" (`{write.written}` here)"
        if write.written and write.state is not None and not str(what).endswith(write.written.removeprefix("self"))
        else ""
    )
    known = f"`{what}`{alias}, a {kind} that requires grad," if what else f"a {kind} that requires grad"
    culprit = write.culprit(f"changes `{write.written or what or 'a leaf'}` in place while grad mode is on")
    origin = write.made(write.written, f"`{write.written}` is made here, as a leaf") if write.written and write.state is None else None
    bound = _plain_binding(write)
    if bound is not None and write.state is not None:
        source, statement = bound
        origin = source.span_of(statement, f"`{write.written}` is the very tensor from here on, no copy", "made")
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{write.text} changes {known} in place outside of `torch.no_grad()`",
        culprit=culprit,
        related=write.related(culprit, origin, *write.alias_spans(), write.helper()),
        tensors=write.facts(),
        explanation=(
            "A leaf's gradient belongs to the value it had in the forward "
            "pass; a tracked in-place change would overwrite that value "
            "and make the tensor the result of an operation, which no optimizer and no `.grad` could use any more."
        ),
        fixes=_fixes(write, kind),
        avoid=["`.data`: it hides the write from autograd, also where a pending backward still needs the old value"],
    )


def _fixes(write: Refused, kind: str) -> list[Fix]:
    place = write.place
    guard = Fix(
        title="do the update under `torch.no_grad()`",
        safety="safe",
        patch=None if place is None or write.module is not None else under_no_grad(place),
        detail="inside `with torch.no_grad():` parameters may be written, and the graph does not grow",
    )
    made = None if place is None or write.module is not None else out_of_place(place)
    fresh = Fix(
        title=f"make a new tensor instead: `{short(made[0], 90)}`" if made else "make a new tensor instead of writing into the leaf",
        safety="unsafe",
        patch=made[1] if made else None,
        detail="the result is part of the graph, and the leaf keeps its value and gets the gradient",
    )
    if write.module is not None:
        return [
            Fix(title=f"build this `nn.{type(write.module).__name__}` without `inplace=True`", safety="safe"),
            Fix(title="do not hand it a leaf", safety="manual"),
        ]
    if _is_update(write):
        return [guard]
    part = write.feeds_the_graph
    if part is None:
        guard = Fix(title="where it is an update that is not to be differentiated: do it under `torch.no_grad()`", safety="manual")
    if kind == "parameter":
        return [guard] if part is False else [*_copies(write), fresh] if part else [*_copies(write), fresh, guard]
    return [fresh] if part else [fresh, guard]


def _plain_binding(write: Refused) -> tuple[Source, ast.Assign] | None:
    """`out = self.bias`, where `out` is what is written: the last assignment before it, in the same function."""
    place = write.place
    if place is None or place.source is None or not write.written or "." in write.written:
        return None
    last = assigned_before(place, write.written)
    if isinstance(last, ast.Assign) and len(last.targets) == 1 and isinstance(last.targets[0], ast.Name) and dotted(last.value) is not None:
        return place.source, last
    return None


def _copies(write: Refused) -> list[Fix]:
    """Where a variable was bound to the parameter itself to be added to: it begins as a copy."""
    bound = _plain_binding(write)
    if bound is None:
        return []
    source, statement = bound
    copy = f"{dotted(statement.value)}.clone()"
    return [
        Fix(
            title=f"begin with a copy: `{write.written} = {copy}`",
            safety="safe",
            patch=patched(source, edit_of(statement.value, copy)),
            detail="the parameter keeps its value and gets its gradient, and so does all that is written into the copy",
        )
    ]


def _is_update(write: Refused) -> bool:
    """Whether the line takes a gradient step: it reads a `.grad`."""
    statement = write.place.statement if write.place is not None else None
    return statement is not None and any(node.attr == "grad" for node in inside(statement, ast.Attribute))


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="A leaf that requires grad was changed in place while grad mode was on.",
    recognise=recognise,
    priority=10,
    messages=(
        "a leaf variable that requires grad is being used in an in-place",
        "a leaf variable that requires grad has been used in an in-place",
    ),
)
