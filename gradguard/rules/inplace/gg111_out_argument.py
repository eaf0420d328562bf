"""# GG111 out-argument

## What it is
A torch function with `out=` gets a tensor that requires grad, as an input or as the place for the result.

## Why it is wrong
`out=` writes the result into memory that is there already, and records no node: a gradient could not find its way back through
it. PyTorch refuses before it computes anything.

## Example
    torch.mm(x, self.weight, out=self.buffer)

## Use instead
    y = torch.mm(x, self.weight)

with gradients; `with torch.no_grad():` around the call where none is wanted (inference into a buffer).

## Fix safety
Unsafe: without `out=` the memory that was to be filled keeps its old values, and whoever reads it must read the result.

## When it speaks, what silences it
Only for PyTorch's exception.
"""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import dotted
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.fixes.edits import patched
from gradguard.rules.base import Rule
from gradguard.rules.inplace.refused import Refused
from gradguard.rules.inplace.repairs import drop_argument, under_no_grad
from gradguard.rules.wording import shape_of

CODE, NAME = "GG111", "out-argument"


def recognise(incident: Incident) -> Diagnosis | None:
    """The call with `out=`, and which of its tensors require grad."""
    write = Refused(incident)
    named = _named(write)
    listed = ", ".join(f"`{name}`" for name, _ in named)
    culprit = write.culprit("writes its result into `out`, which records no graph")
    requires = f"{listed} require{'s' if len(named) == 1 else ''} grad" if named else "one of its arguments requires grad"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{write.text} has `out=`, which no gradient can pass, and {requires}",
        culprit=culprit,
        related=write.related(culprit, write.helper()),
        tensors=[
            TensorFacts(
                name=name,
                shape=shape_of(value),
                dtype=str(value.dtype).removeprefix("torch."),
                device=str(value.device),
                requires_grad=True,
            )
            for name, value in named[:4]
        ],
        explanation=(
            "A function with `out=` fills memory that is there already and makes no node in the graph. With an argument "
            "that requires grad the result would silently have no gradient, so PyTorch refuses."
        ),
        fixes=_fixes(write),
        avoid=["`.data` or `.detach()` on the arguments to get past the check, where the result is part of the loss: its gradient is lost"],
    )


def _named(write: Refused) -> list[tuple[str, torch.Tensor]]:
    """The arguments that require grad, by name: from the call, or, where it was not traced, from the variables that it reads."""
    incident, place = write.incident, write.place
    values: list[tuple[str | None, object]] = [(None, value) for value in (*incident.args, *incident.kwargs.values())]
    if not values and place is not None and place.call is not None:
        read = [*place.call.args, *(word.value for word in place.call.keywords)]
        values = [(name, write.value_of(name)) for name in map(dotted, read) if name is not None]
    found = []
    for name, value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            state = incident.names.state(value)
            known = state.full if state is not None else name or incident.names.tensor(value)
            if known is not None:
                found.append((known, value))
    return found


def _fixes(write: Refused) -> list[Fix]:
    place = write.place
    call = place.call if place is not None else None
    out = next((word for word in call.keywords if word.arg == "out"), None) if call is not None else None
    patch, title = None, "leave `out=` away and use the result"
    if place is not None and place.source is not None and call is not None and out is not None:
        edit = drop_argument(call, out)
        target = place.source.flat(out.value)
        alone = isinstance(place.source.parents.get(call), ast.Expr)
        title = f"leave `out=` away and use the result: `{target} = ...`" if alone else title
        if edit is not None and alone and isinstance(out.value, ast.Name):
            start = (call.lineno, call.col_offset, call.lineno, call.col_offset)
            patch = patched(place.source, [(start, f"{target} = "), edit])
        elif edit is not None and not alone:
            patch = patched(place.source, [edit])
    without = None if place is None or write.module is not None else under_no_grad(place)
    return [
        Fix(title=title, safety="unsafe", patch=patch, detail="the result then is a new tensor, with its graph"),
        Fix(title="put the call under `torch.no_grad()`, where no gradient is wanted", safety="manual", patch=without),
    ]


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="A function with out= got a tensor that requires grad.",
    recognise=recognise,
    priority=10,
    messages=("functions with out=... arguments don't support automatic differentiation",),
)
