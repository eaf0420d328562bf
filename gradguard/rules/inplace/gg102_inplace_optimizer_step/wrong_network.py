"""An optimizer that was given another one's network: its step changes what it should not, and its own network is in no optimizer."""

from __future__ import annotations

from typing import Any

from gradguard.analysis.graph.walk import leaves
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import reads
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.rules.inplace import spans as tell
from gradguard.rules.inplace.write_history import Story, Write


def wrong_network(story: Story, write: Write, code: str, name: str) -> Diagnosis | None:
    """The diagnosis, where two optimizers hold the very same parameters and the loss goes through a network that none holds."""
    names = story.incident.names
    mine = trained_by(write.optimizer)
    every = names.optimizers()
    twin = next((other for other in every if other is not write.optimizer and mine and trained_by(other) == mine), None)
    if twin is None or story.state is None:
        return None
    held: set[int] = set().union(*map(trained_by, every))
    states = [names.state(leaf) for leaf in leaves(story.incident.root_nodes) if id(leaf) not in held]
    forgotten = list(dict.fromkeys(state.variable for state in states if state is not None and state.variable))
    made = _made(story, write.optimizer)
    if len(forgotten) != 1 or made is None:
        return None
    stepped, other, network = names.optimizer(write.optimizer), names.optimizer(twin), story.state.variable or "one network"
    label = f"`{stepped}` is given the parameters of `{network}`, which `{other}` has as well"
    spans = [
        None if write.place is None else write.place.span(f"`{stepped}.step()` changes `{story.state.full}`", "changed"),
        None if story.saved_at is None else story.saved_at.span(f"the forward pass used `{story.state.full}` here", "saved"),
        tell.backward_span(story),
    ]
    culprit = made.span(label, "culprit")
    return Diagnosis(
        code=code,
        name=name,
        headline=f"`{stepped}` trains `{network}`, as `{other}` does, and `{forgotten[0]}` is in no optimizer",
        culprit=culprit,
        related=tell.without(tell.compact(spans), culprit),
        tensors=[tell.tensor_facts(story, story.state.full)],
        explanation=(
            f"`{stepped}` and `{other}` hold the very same parameters, and this loss goes through `{forgotten[0]}`, which no optimizer "
            f"trains. `{stepped}.step()` so changed `{story.state.full}` between a forward pass that had used it and its backward."
        ),
        fixes=[
            Fix(
                title=f"give `{stepped}` the parameters of `{forgotten[0]}`",
                safety="unsafe",
                patch=_patch(made, network, forgotten[0]),
            )
        ],
    )


def _made(story: Story, optimizer: Any) -> ResolvedSite | None:
    book = story.incident.notes[Ledger].books.get(id(optimizer))
    return None if book is None else resolve(book.made)


def _patch(made: ResolvedSite, written: str, meant: str) -> str | None:
    call = made.call
    if call is None or made.source is None or not call.args or not meant.isidentifier():
        return None
    read = reads(call.args[0], written)
    return replaced(made.source, [(read[0], meant)]) if len(read) == 1 else None
