"""# GG107 inplace-overlapping-memory

## What it is
An in-place operation on a tensor several of whose elements are one and the same place in memory, as `expand` makes them; or
one that reads and writes overlapping parts of the same memory.

## Why it is wrong
`expand` copies nothing: the repeated elements are one element seen many times. A write to "each of them" has no meaning, so
PyTorch refuses.

## Example
    image = gray.expand(-1, 3, -1, -1)
    image.sub_(mean).div_(std)

## Use instead
    image = gray.expand(-1, 3, -1, -1).clone()   # or gray.repeat(1, 3, 1, 1)
or an out-of-place operation: `image = (image - mean) / std`.

## Fix safety
Both are safe; they cost the memory that the expanded tensor had saved.

## When it speaks, what silences it
Only for PyTorch's exception.
"""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.graph.walk import op_name, walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import calls_inside
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.user_files import files_of, sources_of
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import appended, patched
from gradguard.rules.base import Rule
from gradguard.rules.inplace import spans
from gradguard.rules.inplace.aliases import OVERLAPPING
from gradguard.rules.inplace.refused import Refused
from gradguard.rules.inplace.repairs import out_of_place
from gradguard.torch_compat.private_api import node_sequence

CODE, NAME = "GG107", "inplace-overlapping-memory"


def recognise(incident: Incident) -> Diagnosis | None:
    """The write and the call that made elements share memory."""
    write = Refused(incident)
    what = f"`{write.written}`" if write.written else "a tensor"
    if incident.says("some elements of the input tensor and the written-to tensor"):
        return _reads_what_it_writes(write, what)
    maker = _expanded_in_graph(incident, write.tensor) or _expanded_in_source(write)
    source, how = None, "`expand`"
    span = None
    if maker is not None and maker.node is not None and isinstance(maker.node, ast.Call):
        source = maker.receiver
        how = f"`{spans.short(maker.text, 60)}`"
        span = maker.span(f"the elements of this are one place in memory, seen many times: {what} is it", "made")
    of = f" by {how}" if source else ""
    culprit = write.culprit(f"writes into {what}, whose elements share memory")
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{write.text} writes in place into {what}, whose elements were made to share memory{of or ' (expand)'}",
        culprit=culprit,
        related=write.related(culprit, span, *write.alias_spans(), write.helper()),
        tensors=write.facts(),
        explanation=f"{how} copies nothing: every repeated element is the same place in memory"
        + (f", that of `{source}`" if source else "")
        + ". Writing to each of them would write to one place many times, so PyTorch refuses.",
        notes=[] if span is not None or write.chain else ["where the tensor was expanded is not known: " + spans.UNSEEN],
        fixes=_fixes(write, maker, what),
    )


def _fixes(write: Refused, maker: ResolvedSite | None, what: str) -> list[Fix]:
    fixes = []
    made = None if write.place is None or write.module is not None else out_of_place(write.place)
    if made is not None:
        fixes.append(Fix(title=f"make a new tensor instead: `{spans.short(made[0], 90)}`", safety="safe", patch=made[1]))
    if maker is not None and maker.node is not None and maker.source is not None:
        diff = patched(maker.source, appended(maker.node, ".clone()"))
        fixes.append(
            Fix(
                title=f"give it memory of its own: `{spans.short(maker.text, 60)}.clone()`",
                safety="safe",
                patch=diff,
                detail="`repeat` does the same in one call",
            )
        )
    elif not fixes:
        fixes.append(Fix(title=f"write into a copy: `{what.strip('`')}.clone()`", safety="safe"))
    return fixes


def _expanded_in_graph(incident: Incident, tensor: torch.Tensor | None) -> ResolvedSite | None:
    """The traced call whose graph node expanded the tensor: the newest one behind it."""
    node = getattr(tensor, "grad_fn", None)
    if node is None:
        return None
    for count, (found, _) in enumerate(walk([node], 256)):
        if op_name(found) in ("expand", "as_strided", "unfold", "broadcast_to"):
            op = incident.journal.op_at(node_sequence(found))
            return None if op is None else resolve(op.site)
        if count > 16:
            return None
    return None


def _expanded_in_source(write: Refused) -> ResolvedSite | None:
    """The only call of the files around that expands something, or the one that the written name was assigned from."""
    from gradguard.analysis.places.source import at_line

    for link in write.chain:
        if link.call in OVERLAPPING:
            found = at_line(link.span.file, link.span.line)
            return None if found is None else _narrowed(found)
    calls = [
        (source, call)
        for source, call in calls_in(sources_of(files_of(write.incident.user_frames, ())), "expand", "expand_as", "broadcast_to")
        if "." in (dotted(call.func) or "")
    ]
    return site_at(*calls[0]) if len(calls) == 1 else None


def _narrowed(place: ResolvedSite) -> ResolvedSite | None:
    """The expanding call of a statement."""
    call = next(calls_inside(place.statement, *OVERLAPPING), None)
    return None if call is None or place.source is None else site_at(place.source, call)


def _reads_what_it_writes(write: Refused, what: str) -> Diagnosis:
    culprit = write.culprit(f"reads and writes overlapping parts of {what}")
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{write.text} reads from memory that it writes to: {what} and its other operand overlap",
        culprit=culprit,
        related=write.related(culprit, *write.alias_spans(), write.helper()),
        tensors=write.facts(),
        explanation=(
            "Both operands are views of one memory, shifted against each other; what is read would depend on the order of the writes."
        ),
        fixes=[Fix(title="read from a copy: put `.clone()` on the operand that is read", safety="safe")],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="An in-place write to a tensor whose elements share memory.",
    recognise=recognise,
    priority=10,
    messages=(
        "more than one element of the written-to tensor refers to a single memory location",
        "some elements of the input tensor and the written-to tensor refer to a single memory location",
    ),
)
