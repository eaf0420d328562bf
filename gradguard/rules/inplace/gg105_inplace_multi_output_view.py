"""# GG105 inplace-multi-output-view

## What it is
An in-place operation on one of several views that a single call returned: what `unbind`, `chunk`, `split` or a loop over a
tensor gives; or on their base while they are in use.

## Why it is wrong
Autograd rewrites the history of a view that is changed in place. It can do so for a view that stands alone, not for one of
many outputs of the same node. PyTorch refuses.

## Example
    for row, length in zip(scores, lengths):
        row[length:] = float("-inf")

## Use instead
    mask = torch.arange(scores.size(1)) >= lengths.unsqueeze(1)
    scores = scores.masked_fill(mask, float("-inf"))

One out-of-place operation on the whole tensor; or indexing (`scores[i, length:] = ...`) in place of the loop's views, where
no operation has saved the tensor; or a new tensor for each piece.

## Fix safety
Manual: the change has to be written for the whole tensor.

## When it speaks, what silences it
Only for PyTorch's exception. A view that a custom `autograd.Function` or a module with a full backward hook returned is told
by the rules for those.
"""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import dotted, flatten
from gradguard.analysis.program.defuse import reads_of
from gradguard.analysis.program.expressions import reads
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.inplace import spans
from gradguard.rules.inplace.aliases import MULTI
from gradguard.rules.inplace.multi_base import base_write, view_maker
from gradguard.rules.inplace.refused import Refused
from gradguard.rules.inplace.repairs import out_of_place, under_no_grad
from gradguard.rules.inplace.write_history import Write

CODE, NAME = "GG105", "inplace-multi-output-view"


def recognise(incident: Incident) -> Diagnosis | None:
    """The write, the call that made the views, and their base."""
    if incident.says("its base or another view of its base has been modified"):
        return _base_written(incident)
    if incident.says("created inside a custom function"):
        return None  # a view out of a custom Function or of a module with a backward hook: that contract's rules tell it
    write = Refused(incident)
    link = next((item for item in write.chain if item.call in MULTI or item.call == "for"), None)
    maker = None if link is not None else view_maker(incident)
    base = link.base if link is not None else None
    callee = maker.callee if maker is not None else None
    if callee is not None and len(callee) > 40:
        callee = f".{callee.rpartition('.')[2]}()"
    how = f"`{spans.short(link.text, 50)}`" if link is not None else f"`{callee}`" if callee else None
    what = f"`{write.written}`" if write.written else "a view"
    looped = link is not None and link.call == "for"
    of = f" of `{base}`" if base else ""
    source = "the loop" if looped else how or "one call"
    headline = (
        f"{write.text} changes {what} in place, one of several views{of} that {source} returned"
        if not looped
        else (f"{write.text} changes {what} in place, which is one of the views{of} that the loop runs over")
    )
    explanation = (
        "Looping over a tensor, like `unbind`, `chunk` and `split`, gives views that are "
        "all outputs of one node; autograd cannot rewrite the history of one of them. "
        f"The write would go into the memory of `{base}`."
        if base
        else "`unbind`, `chunk`, `split` and loops over a tensor give views that are all outputs of one node; "
        "autograd cannot rewrite the history of one of them."
    )
    fixes = _fixes(write, base)
    culprit = write.culprit(f"changes {what} in place")
    label = f"{what} is one of several views made here"
    related = write.related(culprit, *write.alias_spans(), None if maker is None else maker.span(label, "made"), write.helper())
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=headline,
        culprit=culprit,
        related=related,
        tensors=write.facts(),
        explanation=explanation,
        fixes=fixes,
    )


def _fixes(write: Refused, base: str | None) -> list[Fix]:
    fixes = [
        _picked_one_by_one(write, base)
        or Fix(
            title=f"change the whole of `{base}` out of place (`masked_fill`, `torch.where`), instead of its pieces one by one"
            if base
            else "change the whole tensor out of place (`masked_fill`, `torch.where`) instead of its pieces",
            safety="manual",
        )
    ]
    made = None if write.place is None or write.module is not None else out_of_place(write.place)
    if made is not None:
        fixes.append(
            Fix(
                title=f"make a new tensor of the piece: `{spans.short(made[0], 90)}`",
                safety="unsafe",
                patch=made[1],
                detail="the base keeps its values; join the pieces again where they are needed",
            )
        )
    elif write.written:
        fixes.append(
            Fix(title=f"work on a copy of the piece: `{write.written}.clone()`", safety="unsafe", detail="the base keeps its values")
        )
    if write.state is not None and not write.state.is_buffer and write.place is not None:
        guard = Fix(
            title="write under `torch.no_grad()`: initialising or changing a parameter is no part of the graph",
            safety="safe",
            patch=under_no_grad(write.place),
        )
        return [guard, *fixes]
    # where the base is not used again (or has no name at all) the piece is all that matters, and the change of one line is the cure
    whole = (_is_looped(write) or not made) if base is None else _read_below(write, base)
    return fixes if whole else fixes[::-1]


def _picked_one_by_one(write: Refused, base: str | None) -> Fix | None:
    """A loop over a tensor as a loop over views that are each picked by an index: those may be written."""
    place = write.place
    for loop in place.enclosing_loops if place is not None else ():
        if place is None or place.source is None or not isinstance(loop, ast.For) or base is None:
            continue
        iterated = reads(loop.iter, base)
        if len(iterated) != 1 or write.written not in {dotted(target) for target in flatten(loop.target)}:
            continue
        text = f"[{base}[i] for i in range(len({base}))]"
        return Fix(
            title=f"loop over views that are each picked by an index: `{text}`, in place of `{base}`",
            safety="safe",
            detail=f"each write then goes into `{base}` as before; one `masked_fill` or `torch.where` of the whole is faster",
            patch=replaced(place.source, [(iterated[0], text)]),
        )
    return None


def _is_looped(write: Refused) -> bool:
    return write.place is None or bool(write.place.enclosing_loops)


def _read_below(write: Refused, base: str) -> bool:
    """Whether the function of the write reads the base after it, or may do so in another turn of a loop."""
    place = write.place
    if place is None or place.statement is None or place.enclosing_loops:
        return True
    scope = place.enclosing_function or (place.source.tree if place.source is not None else None)
    end = place.statement.end_lineno or place.statement.lineno
    return scope is None or any(read.lineno > end for read in reads_of(scope, base))


def _base_written(incident: Incident) -> Diagnosis | None:
    """The error surfaces where a view is used; the bug is the write to its base before."""
    use = incident.place
    found = base_write(incident)
    culprit: SourceSpan | None = None
    text = "an in-place operation"
    if found is not None and found.place is not None:
        text = f"`{spans.short(found.place.text)}`"
        culprit = found.place.span("changes the memory of views that are still in use", "culprit")
    maker = view_maker(incident)
    related = spans.without(
        spans.compact(
            [
                None if maker is None else maker.span("the views are made here", "made"),
                _caller(found),
                None if use is None else use.span("a view is used here, after its memory was changed", "changed"),
            ]
        ),
        culprit,
    )
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{text} changes a tensor in place whose views, made by one call, are still in use",
        culprit=culprit,
        related=related,
        explanation=(
            "`unbind`, `chunk`, `split` and loops over a tensor give views that "
            "are all outputs of one node. After their base was changed in place "
            "autograd would have to rewrite the history of each of them, which it cannot."
        ),
        notes=[] if found is not None and found.sure == "certain" else [spans.UNSEEN],
        confidence="certain" if found is None else found.sure,
        fixes=[
            Fix(title="make a new tensor instead of changing the base in place", safety="unsafe"),
            Fix(title="make the views after the change", safety="manual"),
            Fix(title="take views one by one (`x[i]`) instead of all in one call", safety="manual"),
        ],
    )


def _caller(write: Write | None) -> SourceSpan | None:
    return None if write is None else spans.helper_span(write, [])


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="One of several views made by one call was changed in place.",
    recognise=recognise,
    priority=10,
    messages=(
        "is a view and is being modified inplace",
        "is a view and its base or another view of its base has been modified inplace",
    ),
)
