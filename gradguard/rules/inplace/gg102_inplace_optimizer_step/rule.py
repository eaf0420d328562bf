"""# GG102 inplace-optimizer-step

## What it is
Parameters were updated (by `optimizer.step()`, a moving average, a hand-written update, weight clipping) between the forward
pass that used them and the backward pass of it.

## Why it is wrong
An update writes into the parameters in place. The graph of an earlier forward pass has saved them; its backward then would
mix old activations with new weights, so PyTorch refuses. The message names neither the optimizer nor the parameter.

## Example
    fake_score = critic(fake)                 # uses the critic's weights
    critic_loss.backward(retain_graph=True)
    critic_optimizer.step()                   # changes them
    generator_loss = -fake_score.mean()       # still hangs on the old ones
    generator_loss.backward()                 # RuntimeError

## Use instead
Run the forward pass again after the step (`fake_score = critic(fake)`), or do all backward passes before the first step, or
cut the path with `.detach()` where no gradient shall flow through the updated network.

## Fix safety
Manual: which of the three is right depends on what the second loss is meant to train.

## When it speaks, what silences it
Only for PyTorch's exception, when the overwritten value is a parameter and what wrote it was an optimizer or an update
outside the forward pass.
"""

from __future__ import annotations

from gradguard.analysis.graph.walk import leaves
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.live.optimizer_contents import holds_memory, trained_by
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule
from gradguard.rules.inplace import spans as tell
from gradguard.rules.inplace.classify import kind_of
from gradguard.rules.inplace.gg102_inplace_optimizer_step.over_update import Carried, carried_over
from gradguard.rules.inplace.gg102_inplace_optimizer_step.recomputed import (
    computed_again,
    detached_where_used,
    trains_nothing_else,
    update_moved,
)
from gradguard.rules.inplace.gg102_inplace_optimizer_step.wrong_network import wrong_network
from gradguard.rules.inplace.stories import story_of
from gradguard.rules.inplace.write_history import MODIFIED, Story, Write

CODE, NAME = "GG102", "inplace-optimizer-step"


def recognise(incident: Incident) -> Diagnosis | None:
    """The update, the parameter and the forward pass that had used it."""
    story = story_of(incident)
    if story is None or kind_of(story) != "step":
        return None
    return tell.with_guesses(_told, story)


def _told(story: Story, write: Write) -> Diagnosis:
    incident = story.incident
    if write.kind == "step" and (swapped := wrong_network(story, write, CODE, NAME)) is not None:
        return swapped
    parameter = story.state.full if story.state is not None else "a parameter"
    boundary = _boundary(story, write)
    carried = None if boundary is None else carried_over(incident, story.mismatch.node, boundary)
    place = write.place
    if write.kind == "step":
        name = incident.names.optimizer(write.optimizer) if write.optimizer is not None else write.type_name
        subject = f"`{name}.step()`"
        label = f"{subject} changes `{parameter}` in place, before the backward pass that needs its old value"
    else:
        name = None
        text = tell.short(place.text if place else write.func)
        subject = f"`{text}`" if text else "something"
        label = f"updates `{parameter}` in place, before the backward pass that needs its old value"
    culprit = None if place is None else place.span(label, "culprit")
    through = f" of `{carried.name}`" if carried is not None and carried.name else ""
    headline = f"{subject} changed `{parameter}` between the forward pass{through} and its backward pass"
    if write.kind != "step" and write.caller is not None and place is not None:
        headline = (
            f"`{place.function.rpartition('.')[2]}` updates `{parameter}` in place between the forward pass{through} and its backward pass"
        )
    if write.sure == "possible" and subject.startswith("`"):
        headline = f"`{parameter}` was changed in place between the forward pass{through} and its backward pass, it may be by {subject}"
    used = story.saved_at
    spans = [
        None
        if used is None
        else used.span(
            f"the forward pass used `{parameter}` here (`{story.op_word}` saved it, version {story.mismatch.expected})", "saved"
        ),
        None if carried is None else carried.made,
        tell.helper_span(write, []),
        None if carried is None else carried.used,
        tell.backward_span(story),
    ]
    related = tell.without(tell.compact(spans), culprit)
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=headline,
        culprit=culprit,
        related=related,
        tensors=[tell.tensor_facts(story, parameter)],
        explanation=_explanation(story, write, carried, subject),
        notes=_notes(story, write),
        fixes=_fixes(story, write, carried, subject),
        avoid=[
            "`retain_graph=True`: it keeps the graph, not the old weights" if write.kind == "step" else tell.NO_RETAIN,
            "`.data` or a deep copy of the weights to get past the check: the gradient would mix old activations with new weights",
        ],
    )


def _boundary(story: Story, write: Write) -> int | None:
    journal = story.incident.journal
    seqs = [fact.seq for fact in journal.steps if fact.clock == write.clock] + [
        fact.seq for fact in journal.writes if fact.clock == write.clock
    ]
    return seqs[0] if seqs else None


def _explanation(story: Story, write: Write, carried: Carried | None, subject: str) -> str:
    parameter = story.state.full if story.state is not None else "the parameter"
    text = (
        f"`{story.op_word}` saved `{parameter}` at version {story.mismatch.expected}; the update made it version {story.mismatch.found}. "
    )
    if carried is not None and carried.name and not carried.is_root:
        text += f"`{carried.name}` was computed with the old weights and is used again after the update: "
        text += "this backward runs through the old forward pass. "
    elif carried is not None:
        text += "The loss was computed with the old weights, but its backward runs only after the update. "
    return text + "A gradient from old activations and new weights would be wrong, so PyTorch refuses."


def _notes(story: Story, write: Write) -> list[str]:
    notes = []
    storages = {item.storage for item in story.incident.mismatches}
    states = [state for storage in storages if storage is not None and (state := story.incident.names.state(storage=storage)) is not None]
    if len(states) > 1:  # by whole names where they are of several networks, and so of several updates
        several = len({state.variable for state in states}) > 1
        names = sorted(state.full if several else state.path for state in states)
        whose = (
            f"{len(names)} parameters that this backward needs have been changed since"
            if several
            else (f"the same update changed {len(names)} parameters that this backward needs")
        )
        notes.append(f"{whose}: {short_list(names)}")
    later = [item for item in story.writes[1:] if item.place is not None and item.place.line != (write.place.line if write.place else None)]
    for item in later[:2]:
        assert item.place is not None  # filtered above
        notes.append(f"changed again, later, at line {item.place.line}: `{tell.short(item.place.text)}`")
    return notes


def _fixes(story: Story, write: Write, carried: Carried | None, subject: str) -> list[Fix]:
    root = story.state.variable if story.state is not None else None
    network = f"`{root}`" if root else "the network"
    name = carried.name if carried is not None else None
    if write.kind != "step":
        called = write.caller or write.place
        line = called.line if called is not None else None
        what = f"`{tell.short(called.text)}`" if called is not None else "the update"
        return [
            Fix(
                title=f"move {what}{f' (line {line})' if line else ''} to after `backward()` and the optimizer's step",
                safety="unsafe",
                detail="an update of the weights belongs after every backward pass that used them",
                patch=update_moved(called, tell.backward_span(story)),
            )
        ]
    if carried is not None and name and not carried.is_root:
        again = Fix(
            title=f"compute `{name}` again after {subject}, so that the second loss is built with the updated {network}",
            safety="unsafe",
            patch=computed_again(story, carried, write.place),
        )
        first = _all_backwards_first(story, write, f"call both backward passes before {subject}")
        if trains_nothing_else(story, write, carried):
            reason = f"all that it was computed from is trained by {subject} alone"
            cut = Fix(title=f"use `{name}.detach()` in the second loss", safety="safe", detail=reason, patch=detached_where_used(carried))
            return [cut, again, first]
        cut = Fix(
            title=f"use `{name}.detach()` in the second loss, if it is not meant to send a gradient through {network}", safety="manual"
        )
        return [again, cut, first]
    again = Fix(
        title=f"compute the loss again after {subject}, with the updated {network}",
        safety="unsafe",
        patch=None if carried is None else computed_again(story, carried, write.place),
    )
    earlier = _all_backwards_first(story, write, f"call this backward before {subject}")
    alone = _others_trained(story, write) and not _shared(story, write)
    return [again, earlier] if alone else [earlier, again]


def _shared(story: Story, write: Write) -> bool:
    """Whether another optimizer holds the changed parameter as well: both losses are to train it."""
    storage = story.mismatch.storage
    others = [optimizer for optimizer in story.incident.names.optimizers() if optimizer is not write.optimizer]
    return storage is not None and any(holds_memory(optimizer, storage) for optimizer in others)


def _all_backwards_first(story: Story, write: Write, title: str) -> Fix:
    """The other order of the calls, which would give the stepping optimizer the second loss's gradients too."""
    others = _others_trained(story, write)
    if not others:
        return Fix(title=title, safety="manual", detail="first all backward passes of one forward pass, then the steps")
    if _shared(story, write):
        return Fix(
            title=title,
            safety="manual",
            detail="first each zero_grad(), then all backward passes of one forward pass, then the steps; `"
            f"{story.state.full if story.state is not None else 'the parameter'}` is held by several optimizers and is updated by each",
        )
    return Fix(
        title=f"{title}, with `inputs=` set to the parameters of `{others[0]}`",
        safety="manual",
        detail="first all backward passes, then the steps; without `inputs=` the second loss adds to the first network's gradient",
    )


def _others_trained(story: Story, write: Write) -> list[str]:
    """Optimizers, by name, that train what else this loss hangs on: it is their loss, not the stepping one's."""
    incident = story.incident
    others = {id(leaf) for leaf in leaves(incident.root_nodes)} - trained_by(write.optimizer)
    return [
        incident.names.optimizer(optimizer)
        for optimizer in incident.names.optimizers()
        if optimizer is not write.optimizer and others & trained_by(optimizer)
    ]


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="Parameters were updated between a forward pass and its backward pass.",
    recognise=recognise,
    moments=frozenset({"error"}),
    priority=20,
    messages=(MODIFIED,),
)
