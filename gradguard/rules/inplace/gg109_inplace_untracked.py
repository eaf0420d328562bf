"""# GG109 inplace-untracked

## What it is
A value that the backward pass needs was written through `.data` (or by something that left no trace) after it was saved.

## Why it is wrong
`.data` shares the memory but not the version counter: PyTorch cannot see the write, raises nothing, and computes the gradient
from the new values as if they had been there in the forward pass.

## Example
    probs = torch.softmax(scores, dim=-1)
    probs.data.clamp_(min=1e-6)       # softmax's backward reads its own output
    probs.log().sum().backward()      # silently wrong

## Use instead
    probs = torch.softmax(scores, dim=-1).clamp(min=1e-6)

For updates of parameters: `with torch.no_grad():` in place of `.data`, after backward; PyTorch then notices a wrong order.

## Fix safety
An out-of-place operation changes the gradient (to the right one).

## When it speaks, what silences it
In traced steps, before backward: `.data` writes are matched by memory with what the graph about to be used has saved. A numpy
write whose line was found is told as GG101; GG109 tells it where no line was found. Values whose gradient reaches no
optimizer's parameter (a teacher updated early) are left alone.
"""

from __future__ import annotations

from typing import Any

from gradguard.analysis.graph.walk import leaves
from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule
from gradguard.rules.inplace import numpy_write, spans
from gradguard.rules.inplace.repairs import out_of_place
from gradguard.rules.inplace.unseen import Unseen, screen, unseen_writes

CODE, NAME = "GG109", "inplace-untracked"


def recognise(incident: Incident) -> Diagnosis | None:
    """The write through `.data`, or the change that nothing in the source explains."""
    concerned = [item for item in unseen_writes(incident) if item.writes and _matters(incident, item)]
    if concerned:
        return _told(incident, min(concerned, key=lambda item: item.writes[0].clock))
    found = numpy_write.numpy_written(incident)
    return numpy_write.told(incident, CODE, NAME) if found is not None and not found[1].writes else None


def _matters(incident: Incident, item: Unseen) -> bool:
    """Whether the wrong gradient reaches something that trains: one of the graph's leaves that an optimizer has, if it has any."""
    trained = {
        id(parameter) for optimizer in incident.names.optimizers() for group in optimizer.param_groups for parameter in group["params"]
    }
    if not any(id(leaf) in trained for leaf in leaves(incident.root_nodes)):
        return True  # updated by hand, or not for training at all
    return any(id(leaf) in trained for leaf in leaves([item.node]))


def _told(incident: Incident, item: Unseen) -> Diagnosis:
    story = item.story(incident)
    write = story.writes[0]
    target = spans.Target(story, write)
    place = write.place
    name = target.name
    culprit = None if place is None else place.span(f"writes into the memory of `{name or 'the saved value'}` unseen by PyTorch", "culprit")
    related = spans.without(
        spans.compact(
            [
                spans.saved_span(story),
                *target.spans(),
                spans.helper_span(write, target.chain),
                None
                if incident.place is None
                else incident.place.span("backward computes from the overwritten values, without an error", "backward"),
            ]
        ),
        culprit,
    )
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=(
            f"`{spans.short(place.text if place else write.func)}` overwrites "
            f"{target.phrase} through `.data`, after `{story.op_word}` had saved it: "
            "the gradient is computed from other values, without an error"
        ),
        culprit=culprit,
        related=related,
        tensors=[spans.tensor_facts(story, name)],
        explanation=(
            "`.data` shares the memory but not the version counter, so PyTorch "
            f"does not notice and backward runs. But {spans.why(story)}, "
            "and that now finds the new values."
        ),
        notes=spans.other_writes(story),
        fixes=_fixes(story, place, name),
    )


def _fixes(story: Any, place: Any, name: str | None) -> list[Fix]:
    if story.state is not None and not story.state.is_buffer:
        return [
            Fix(
                title=f"update `{story.state.full}` after backward, under `torch.no_grad()` instead of through `.data`",
                safety="manual",
                detail="PyTorch then notices when an update comes too early",
            )
        ]
    made = None if place is None else out_of_place(place)
    text = None if made is None else made[0].replace(".data", "")
    return [
        Fix(
            title=f"make a new tensor instead: `{spans.short(text, 90)}`"
            if text and ".data" in (made[0] if made else "")
            else f"make a new tensor instead of writing through `.data` (`{name or 'x'} = {name or 'x'}.clamp(...)`, `torch.where(...)`)",
            safety="unsafe",
            detail="the change is then part of the graph, and the gradient is right",
        )
    ]


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="A saved value was overwritten unseen by PyTorch; the gradient is silently wrong.",
    recognise=recognise,
    moments=frozenset({"before_backward"}),
    severity="warning",
    traced_only=True,
    screen=screen,
)
