"""# GG108 inplace-module-buffer

## What it is
A buffer of a module (a codebook, a power-iteration vector, a memory bank, running statistics kept by hand) was written in
place after an operation of the same step had saved it for its backward pass.

## Why it is wrong
Buffers get no gradient, but what is multiplied with them does, and needs their value of the forward pass. `copy_`, `mul_` or
an index assignment, under `torch.no_grad()` too, change that value in the graph's hands.

## Example
    distance = z @ self.codebook.t()          # saves the codebook
    with torch.no_grad():
        self.codebook.mul_(0.9).add_(centers) # writes into it
    distance.sum().backward()                 # RuntimeError

## Use instead
    self.codebook = 0.9 * self.codebook + 0.1 * centers   # a new tensor in the same buffer
or use a copy in the forward pass (`self.codebook.clone()`), or update the buffer after `optimizer.step()`.

## Fix safety
A `clone()` in the forward pass is safe. Replacing the buffer by a new tensor is unsafe where something else holds the old
one (DDP's buffer broadcast, a second reference).

## When it speaks, what silences it
Only for PyTorch's exception, when the overwritten value is a registered buffer.
"""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.syntax import range_of
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import patched
from gradguard.rules.base import Rule
from gradguard.rules.inplace import spans
from gradguard.rules.inplace.aliases import aliases
from gradguard.rules.inplace.classify import kind_of
from gradguard.rules.inplace.repairs import out_of_place
from gradguard.rules.inplace.stories import story_of
from gradguard.rules.inplace.write_history import MODIFIED, Story, Write

CODE, NAME = "GG108", "inplace-module-buffer"


def recognise(incident: Incident) -> Diagnosis | None:
    """The buffer, the op that saved it and the write."""
    story = story_of(incident)
    if story is None or kind_of(story) != "buffer":
        return None
    return spans.with_guesses(_told, story)


def _told(story: Story, write: Write) -> Diagnosis:
    state = story.state
    assert state is not None  # it is a buffer
    place = write.place
    chain = aliases(place, write.caller)
    label = f"writes into the buffer `{state.full}`"
    if write.version is not None:
        label += f": version {write.version - 1} becomes {write.version}"
    culprit = None if place is None else place.span(label, "culprit")
    target = spans.Target(story, write)
    related = spans.compact([spans.saved_span(story), *target.spans(), spans.helper_span(write, chain), spans.backward_span(story)])
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=(
            f"`{spans.short(place.text if place else write.func)}` writes into the buffer "
            f"`{state.full}`, which `{story.op_word}` had saved for its backward pass"
        ),
        culprit=culprit,
        related=spans.without(related, culprit),
        tensors=[spans.tensor_facts(story, state.full)],
        explanation=(
            f"The buffer itself gets no gradient, but {spans.why(story)}, and that "
            f"is `{state.full}` as it was at version {story.mismatch.expected}. "
            "`no_grad` does not help: the write changes the memory that the graph refers to."
        ),
        notes=spans.other_writes(story),
        fixes=_fixes(story, write),
        avoid=[spans.NO_DATA],
    )


def _fixes(story: Story, write: Write) -> list[Fix]:
    state = story.state
    assert state is not None  # it is a buffer
    attribute = state.path.rpartition(".")[2]
    fixes = [fix for fix in (_replaced(write, attribute), _cloned(story, attribute)) if fix is not None]
    within = story.saved_at is not None and write.place is not None and story.saved_at.function == write.place.function
    if len(fixes) == 2 and (within or fixes[0].patch is None):
        fixes.reverse()  # within one function the copy is the smaller change, and so it is where a slice is written
    return [*fixes, Fix(title=f"update `{state.full}` after `optimizer.step()`", safety="manual")]


def _replaced(write: Write, attribute: str) -> Fix | None:
    place = write.place
    if place is None:
        return None
    made = out_of_place(place)
    if made is None:
        return Fix(
            title=f"put a new tensor into the buffer (`self.{attribute} = ...`) instead of writing into the old one", safety="unsafe"
        )
    return Fix(title=f"put a new tensor into the buffer: `{spans.short(made[0], 90)}`", safety="unsafe", patch=made[1])


def _cloned(story: Story, attribute: str) -> Fix | None:
    """`self.u.clone()` where the saving op reads the buffer."""
    place = story.saved_at
    if place is None or place.source is None or place.node is None:
        return Fix(title=f"use a copy in the forward pass: `self.{attribute}.clone()`", safety="safe")
    read = [node for node in inside(place.node, ast.Attribute) if node.attr == attribute and isinstance(node.ctx, ast.Load)]
    name = dotted(read[0]) if read else None
    where = range_of(read[0]) if read else None
    if name is None or where is None:
        return Fix(title=f"use a copy in the forward pass: `self.{attribute}.clone()`", safety="safe")
    diff = patched(place.source, [(found, f"{name}.clone()") for found in map(range_of, read) if found is not None])
    savers = {story.incident.place_of_node(item.seq) for item in story.incident.mismatches}
    lines = sorted({saver.line for saver in savers if saver is not None and saver.file == place.file} - {place.line})
    alone = not lines and None not in savers
    listed = ", ".join(map(str, lines))
    others = f"; line {listed} saved it too, and needs the same" if lines else ""
    if len(lines) > 1:
        others = f"; lines {listed} saved it too, and need the same"
    return Fix(
        title=f"use a copy in the forward pass: `{name}.clone()` at line {where[0]}",
        safety="safe" if alone else "manual",
        patch=diff if alone else None,
        detail=f"the op then saves the copy, and the buffer may be written{others}",
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="A module's buffer was written after the forward pass had saved it.",
    recognise=recognise,
    moments=frozenset({"error"}),
    priority=20,
    messages=(MODIFIED,),
)
