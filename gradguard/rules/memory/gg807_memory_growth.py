"""# GG807 memory-growth

## What it is
Every step puts tensors or arrays into a container that the program never looks at, or into a dictionary under keys that are never found
again: memory grows with every step, though no graph is kept.

## Why it is wrong
Detached values take memory, too: their own. A tensor as a key is found by what object it is, not by what it holds: the batch of the next
step is another object, even where it is equal.

## Example
    self.history.append(features.detach())     # and self.history is read nowhere

    if inputs not in self.cache:               # a tensor: never the same object again
        self.cache[inputs] = encoder(inputs).detach()

## Use instead
    self.history = deque(maxlen=100)

    self.cache[sample_id] = ...

## Fix safety
Removing what is never read changes nothing. Another key is the author's to choose.

## When it speaks, what silences it
Where the process's memory has grown in several steps in a row and at three looks in a row, step by step, a container of the program's
has become longer, by at least 64 KiB of tensors or arrays each time, and either no file of the program's reads it, or all that is done
with it is looking up keys, and the keys that it has are tensors that nothing else holds. Stores that are read (a replay buffer, a memory
bank, results that are joined at the end), that are emptied, or that are bounded (`deque(maxlen=n)`) are silent, and so are notebooks, where
they may be read later.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.holders import held_by_objects, holdings
from gradguard.analysis.memory.growing import Census, Grown, look
from gradguard.analysis.program.store_reads import reads_of_store, saves_objects
from gradguard.core.account import size
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.at_places import taken_out
from gradguard.rules.base import Rule
from gradguard.rules.keepers import Keeper, Kept
from gradguard.rules.spans import written_in

CODE, NAME = "GG807", "memory-growth"
_TRIED = 4


class Options(BaseModel):
    """What can be set under `rules: {GG807: ...}`."""

    model_config = ConfigDict(extra="forbid")

    least: int = Field(default=64 << 10, ge=1 << 10, description="bytes a step that are worth a word")


def recognise(incident: Incident) -> Diagnosis | None:
    """The container that grows, where what is put into it is of no use."""
    census = incident.notes[Census]
    for grown in look(census, incident.finding.step, incident.options(RULE).least)[:_TRIED]:
        found = _judged(incident, grown)
        if found is not None:
            return found
    return None


def _judged(incident: Incident, grown: Grown) -> Diagnosis | None:
    if grown.graphed:
        return None  # GG608 follows graphs
    (held,) = holdings([grown.container], incident.user_frames, {id(grown), *map(id, (grown.newest, grown.keys))})
    if not held or any(view.frame.f_code.co_filename.startswith("<") for view in incident.user_frames):
        return None
    name = held[0].attribute
    sources = written_in(incident, lambda text: name in text)
    reads = reads_of_store(sources, name)
    if reads.other or not sources:
        return None
    if not reads.by_key and held[0].owner is not None and saves_objects(written_in(incident, lambda text: True)):
        return None
    if reads.by_key and not _are_lost(grown):
        return None
    kept = Kept(incident, [Keeper(held[0], {0}, 1)])
    if kept.place is None:
        return None
    rate = size(grown.nbytes)
    if reads.by_key:
        return Diagnosis(
            code=CODE,
            name=NAME,
            severity="warning",
            headline=f"{kept.subject} grows by {rate} in every step: its keys are tensors, and none is ever found again",
            culprit=kept.place.statement_span("a tensor as a key is found by identity: an equal one is another key", "culprit"),
            explanation=f"Each of the last steps has put {rate} into {kept.subject}. A dictionary finds a tensor only as the very object "
            "that it was given, and nothing else holds those objects any more.",
            fixes=[
                Fix(title="Use a key that comes back: the number of the sample, or of the batch"),
                Fix(title=f"Do without {kept.subject}, which never finds anything"),
            ],
        )
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"{kept.subject} grows by {rate} in every step, and nothing reads it",
        culprit=kept.place.statement_span(f"keeps {rate} more in every step", "culprit"),
        explanation=f"Each of the last steps has put {rate} of tensors or arrays into {kept.subject}, and no file of the program reads it. "
        "They have no graph; the memory is their own.",
        fixes=[
            Fix(
                title=f"Leave it out: nothing reads {kept.subject}",
                safety="safe",
                reason="it changes nothing but memory",
                patch=taken_out(kept.place),
            ),
            Fix(title="Keep only the last ones (`collections.deque(maxlen=n)`), or a number of each (`.item()`)"),
        ],
        confidence="likely",
    )


def _are_lost(grown: Grown) -> bool:
    """Whether the keys are tensors that only the dictionary itself holds; the newest may still be a variable."""
    keys: list[Any] = list(grown.keys)
    if not keys or not all(type(key) in (torch.Tensor, torch.nn.Parameter) for key in keys):
        return False
    older = [key for key in list(dict.keys(grown.container))[: -1 - grown.added][-16:] if type(key) is torch.Tensor]
    return bool(older) and not held_by_objects(older, {id(grown.container), id(older), id(keys), id(grown.keys), id(grown.newest)})


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="every step puts tensors into a store that is never read",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
