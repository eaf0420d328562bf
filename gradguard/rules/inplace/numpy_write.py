"""A saved value that numpy overwrote: the silent form of GG101, and of GG109 where the line is not known."""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.memory import peel
from gradguard.core.diagnosis import Confidence, Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import appended, patched
from gradguard.rules.inplace import spans
from gradguard.rules.inplace.arrays import ArrayStory, array_story
from gradguard.rules.inplace.handed import handed_over
from gradguard.rules.inplace.unseen import Unseen, unseen_writes
from gradguard.torch_compat.private_api import numpy_reachable

EXPLAINED = (
    "A numpy array made with `.numpy()` or `torch.from_numpy` shares the tensor's memory. Numpy's writes do not raise the version counter, "
    "so backward runs without an error and computes from the overwritten values."
)
FOREIGN = (
    "The contents changed between forward and backward, and no write went through PyTorch: a C++ extension, another library or a process "
    "that shares the memory wrote there. Such writes do not raise the version counter, so backward computes from the overwritten values."
)


def numpy_written(incident: Incident) -> tuple[Unseen, ArrayStory] | None:
    """The first saved value whose memory numpy changed, with what the source tells of the array."""
    if "_inplace_arrays" not in incident.__dict__:
        incident.__dict__["_inplace_arrays"] = _find(incident)
    found: tuple[Unseen, ArrayStory] | None = incident.__dict__["_inplace_arrays"]
    return found


def _find(incident: Incident) -> tuple[Unseen, ArrayStory] | None:
    found = None
    for item in unseen_writes(incident):
        if item.mark is not None:
            found = (item, array_story(incident, item.tensor, item.mark))
            if found[1].writes:
                break
    return found


def told(incident: Incident, code: str, name: str) -> Diagnosis | None:
    """The diagnosis, for the rule whose it is."""
    found = numpy_written(incident)
    if found is None:
        return None
    item, array = found
    story = item.story(incident)
    left = array.left
    source = dotted(peel(left.node)[0]) if left is not None and isinstance(left.node, ast.expr) else None
    around = incident.names.of_storage(item.mark.storage) if item.mark is not None else []
    value = story.state.full if story.state is not None else (around[0] if around else source)
    handed = handed_over(incident, array.writes) if array.left is None else None
    if handed is not None:  # what was written before the tensor was made of the array has overwritten nothing
        array.writes.sort(key=lambda write: not handed.comes_after(write))
    value = value or (handed.text if handed is not None else None)
    shown = f"`{value}`" if value else "a tensor"
    if source and value and source != value:
        shown += f" (`{source}`)"
    variable = array.writes[0].name if array.writes else array.name
    via = f" through the array `{variable}`" if variable else ""
    culprit: SourceSpan | None = None
    notes = []
    if array.writes:
        culprit = array.writes[0].span(f"writes into the memory of {shown}{via}")
        notes += [
            f"also written at line {getattr(write.node, 'lineno', 0)}: `{spans.short(write.source.flat(write.node))}`"
            for write in array.writes[1:4]
        ]
    else:
        notes.append(
            "no statement that writes into that memory was found in the functions around; the contents did change after they were saved"
        )
    text = f"`{spans.short(culprit.text)}`" if culprit is not None else "Something outside PyTorch"
    related = spans.without(
        spans.compact(
            [
                None if left is None else left.span(f"shares its memory with `{source or value}`: it is not a copy", "made"),
                None if handed is None else handed.span("shares the array's memory: it is not a copy", "made"),
                spans.saved_span(story),
                None
                if incident.place is None
                else incident.place.span("backward computes from the overwritten values, without an error", "backward"),
            ]
        ),
        culprit,
    )
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"{text} overwrites {shown}{via}, which `{story.op_word}` had saved for its backward pass: "
        "the gradient is computed from other values",
        culprit=culprit,
        related=related,
        tensors=[spans.tensor_facts(story, value)],
        explanation=f"{EXPLAINED if numpy_reachable(item.tensor) else FOREIGN} Here {spans.why(story)}.",
        notes=notes,
        fixes=[handed.copying()] if handed is not None else _fixes(array, item.tensor),
        confidence=_sure(array),
    )


def _sure(array: ArrayStory) -> Confidence:
    """The contents did change; the line is certain where every candidate stands in one function, on one array."""
    places = {(write.source.filename, write.source.qualname_around(write.node), write.name) for write in array.writes}
    return "certain" if len(places) <= 1 else "likely"


def _fixes(array: ArrayStory, tensor: torch.Tensor) -> list[Fix]:
    left = array.left
    if left is not None and left.source is not None and left.node is not None and left.callee is not None:
        diff = patched(left.source, appended(left.node, ".copy()"))
        return [Fix(title=f"copy the array before writing into it: `{spans.short(left.text, 60)}.copy()`", safety="safe", patch=diff)]
    if not numpy_reachable(tensor):
        return [Fix(title="give the writer a copy: `tensor.clone()`, or let it write before forward or after backward", safety="manual")]
    return [
        Fix(
            title="copy what is handed to PyTorch: `torch.from_numpy(array.copy())` or `torch.tensor(array)`",
            safety="safe",
            detail="or wait with re-using the buffer until backward has run",
        )
    ]
