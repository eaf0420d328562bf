"""# GG110 inplace-detach-view

## What it is
`detach_()` on a view: a slice, one piece of `chunk` or `split`, a gradient that lives in a bucket of DistributedDataParallel.

## Why it is wrong
`detach_()` takes a tensor itself off its graph. A view's history is tied to its base: autograd rebuilds it whenever the base is
written, so it cannot be cut off alone.

## Example
    h, c = state.chunk(2, dim=-1)
    h.detach_()

## Use instead
    h = h.detach()

## Fix safety
Safe where only this variable is meant: the values are the same memory. Other names of the same tensor keep their graph, which
`detach_()` would have cut as well.

## When it speaks, what silences it
Only for PyTorch's exception.
"""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.defuse import reads_of
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.inplace.refused import Refused
from gradguard.rules.inplace.spans import short

CODE, NAME = "GG110", "inplace-detach-view"


def recognise(incident: Incident) -> Diagnosis | None:
    """The line that detaches, and what the tensor is a view of."""
    write = Refused(incident)
    what = f"`{write.written}`" if write.written else "a view"
    base = write.chain[-1].base if write.chain else None
    of = f" of `{base}`" if base and base != write.written else ""
    culprit = write.culprit(f"{what} is a view{of}")
    origin = write.made(write.written, f"{what} is made here") if write.written and not write.chain else None
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{write.text} would take {what}, a view{of}, off its graph in place",
        culprit=culprit,
        related=write.related(culprit, origin, *write.alias_spans(), write.helper()),
        tensors=write.facts(),
        explanation=(
            "A view shares its base's memory and history: autograd makes its node anew whenever the base is written. "
            "That history cannot be cut off for one of the views; a detached tensor beside it can be had at no cost."
        ),
        fixes=[_fix(write)],
    )


def _fix(write: Refused) -> Fix:
    place, name = write.place, write.written
    call = None if place is None else place.call
    looped = next((link for link in write.chain if link.call == "for"), None)
    if looped is not None and place is not None:
        return _of_the_whole(place, looped.base)
    patch = None
    alone = isinstance(place.source.parents.get(call), ast.Expr) if place is not None and place.source is not None and call else False
    plain = name is not None and call is not None and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    if place is not None and place.source is not None and call is not None and alone and plain and _read_after(place, name or ""):
        patch = replaced(place.source, [(call, f"{name} = {name}.detach()")])
    title = (
        f"use `{name} = {name}.detach()`"
        if plain and name
        else f"use `detach()` in place of `{short(place.text if place else 'detach_()')}`"
    )
    return Fix(
        title=title, safety="safe" if patch else "manual", patch=patch, detail="it makes a new tensor on the same memory, without a graph"
    )


def _of_the_whole(place: ResolvedSite, base: str) -> Fix:
    """A loop over the pieces: a new tensor for the loop's variable would change nothing, one for the whole does."""
    loop = next(iter(place.enclosing_loops), None)
    text = f"{base} = {base}.detach()"
    patch = None
    if isinstance(loop, ast.For) and len(loop.body) == 1 and not loop.orelse and place.source is not None and base.isidentifier():
        patch = replaced(place.source, [(loop, text)])
    return Fix(
        title=f"detach the whole in place of its pieces: `{text}`",
        safety="safe" if patch else "manual",
        patch=patch,
        detail="it makes a new tensor on the same memory, without a graph",
    )


def _read_after(place: ResolvedSite, name: str) -> bool:
    """Whether anything reads the variable once it is set anew."""
    scope = place.enclosing_function or (place.source.tree if place.source is not None else None)
    return scope is not None and (bool(place.enclosing_loops) or any(read.lineno > place.line for read in reads_of(scope, name)))


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="A view was to be detached in place.",
    recognise=recognise,
    priority=10,
    messages=("can't detach views in-place",),
)
