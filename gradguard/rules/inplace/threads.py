"""What other threads hold of a saved value: a loader that fills its slots again while the training loop still needs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.live.contents import tensors_in
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.source import function_def
from gradguard.analysis.program.bindings import dotted, flatten
from gradguard.analysis.program.defuse import reads_of
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.inplace import spans
from gradguard.rules.inplace.reaching_writes import Scope, other_threads
from gradguard.rules.inplace.write_history import Story
from gradguard.torch_compat.private_api import storage_key


def held_in_threads(scopes: list[Scope], storage: int) -> Iterator[tuple[Scope, str]]:
    """The variables of functions running in other threads whose tensors live in this memory, and what loops take out of them."""
    for view in other_threads():
        definition = function_def(view.frame.f_code)
        scope = next((each for each in scopes if each.node is definition), None)
        if scope is None:
            continue
        names = _holding(view, storage)
        for name in names:
            yield scope, name
        for loop in scope.statements:
            if isinstance(loop, (ast.For, ast.AsyncFor)) and any(reads_of(loop.iter, name) for name in names):
                yield from ((scope, taken) for target in flatten(loop.target) if (taken := dotted(target)) is not None)


def told(story: Story, code: str, name: str) -> Diagnosis | None:
    """What is told of a write that no probe saw, into memory that another thread holds; None where no thread does."""
    storage, write = story.mismatch.storage, story.blamed
    if story.writes or storage is None:
        return None
    running = next((view.code_name for view in other_threads() if _holding(view, storage)), None)
    if running is None:
        return None
    place = None if write is None else write.place
    saved = _named(story, storage)
    others = [_named(story, item.storage) for item in story.incident.mismatches if item.storage not in (storage, None)]
    names = list(dict.fromkeys(each for each in [saved, *others] if each is not None))
    shown = f"`{saved}`" if saved else "a value"
    by = f", it may be by `{spans.short(place.text)}`" if place is not None else ""
    culprit = None if place is None else place.span("writes in another thread, while this one still needs the value", "culprit")
    copies = ", ".join(f"`{each}.clone()`" for each in names) or "a clone"
    facts = spans.tensor_facts(story, saved)
    return Diagnosis(
        code=code,
        name=name,
        headline=f"{shown}, which `{story.op_word}` had saved for its backward pass, was written over while `{running}` ran in "
        f"another thread{by}",
        culprit=culprit,
        related=spans.without(spans.compact([spans.saved_span(story), spans.backward_span(story)]), culprit),
        tensors=[facts],
        explanation=(
            f"{spans.why(story)[:1].upper()}{spans.why(story)[1:]}. {shown if saved else 'It'} was saved at version "
            f"{story.mismatch.expected} and is at version {story.mismatch.found} now. `{running}`, which runs in another thread, holds the "
            "same memory; this thread needs what is in it until its backward pass is through."
        ),
        notes=["what other threads do is not recorded at any level: the write was looked for in the source of what runs there"],
        fixes=[
            Fix(
                title=f"work on copies where they are taken over from the other thread: {copies}",
                safety="safe",
                detail="the thread can then fill its memory again at any time",
            ),
            Fix(title=f"give the memory back to `{running}` only after `backward()`", safety="manual"),
        ],
        avoid=[spans.NO_DATA],
        confidence="certain" if write is None else write.sure,
    )


def _named(story: Story, storage: int | None) -> str | None:
    return next((each for each in story.incident.names.of_storage(storage) if each.isidentifier()), None)


def _holding(view: FrameView, storage: int) -> list[str]:
    values = {name: value for name, value in view.locals.items() if name != "self"}
    return [name for name, value in values.items() if any(storage_key(tensor) == storage for tensor in tensors_in(value, 2))]
