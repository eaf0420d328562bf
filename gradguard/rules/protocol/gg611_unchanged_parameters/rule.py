"""# GG611 unchanged-parameters

## What it is
Steps are taken, gradients are there, and yet parameters do not change: the learning rate is zero (a schedule is over, a loaded
state brought the zero along, or the rate is written to an attribute of the optimizer, which no step reads), the updates are smaller
than the parameters' precision can hold, an update by hand binds a variable instead of writing into the parameter, or a target network
is loaded with its own state.

## Why it is wrong
bfloat16 keeps eight bits: adding less than 1/512 of a value leaves the value as it was, however often it is repeated. Weights
held in bfloat16 or float16 so lose small updates altogether. A scheduler made anew starts from the rate that the last one
left, which at the end of a cosine is zero. `optimizer.load_state_dict()` restores the saved rates as well, and a finished
schedule has left zero in them.

## Example
    model = model.to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=2e-4)    # most updates round away

## Use instead
Keep the parameters in float32 and compute in low precision under `torch.autocast`. Set `group["lr"]` back before making a
new scheduler, or use CosineAnnealingWarmRestarts.

## Fix safety
Unsafe: training begins to work, results change.

## When it speaks, what silences it
For the rate: after 30 steps in a row at exactly zero after it was positive (warm-up from zero is silent), or at the end of a
run that never had another. For rounding: at step 41, when at least half of the sampled elements with a gradient are bit for
bit what they were 40 steps before, in parameters of 16-bit type. For updates by hand: where a line
computes, in traced steps that are six apart, a new value of a parameter from its gradient, nothing reads the result, and nothing has
written the parameter in between. The same for an average of two parameters (`k = k * m + q * (1 - m)`), twelve steps apart, where an
optimizer trains one of them and nothing has written the other. A result that is kept, or that a statement could read at another
time, is silent. And at the second
`load_state_dict` in a row that copies a module's parameters onto themselves, if nothing has written them in between.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.learning_rates import RoundedAway, Schedule
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.own_state import OwnState
from gradguard.monitors.surveys import CopiesDue
from gradguard.monitors.unused_updates import UpdateDropped
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.gg611_unchanged_parameters import dropped_updates, loaded_itself, rate_attribute, zero_rate

CODE, NAME = "GG611", "unchanged-parameters"


class Options(BaseModel):
    """What can be set under `rules: {GG611: ...}`."""

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(default=30, ge=8, le=100_000, description="steps in a row with a learning rate of zero before it speaks")


def recognise(incident: Incident) -> Diagnosis | None:
    """The cast, or the schedule that keeps the rate at zero."""
    finding = incident.finding
    if isinstance(finding, UpdateDropped):
        return dropped_updates.dropped_update(incident, finding, CODE, NAME)
    if isinstance(finding, OwnState):
        return loaded_itself.told(incident, finding, CODE, NAME)
    book: Book = finding.book
    if isinstance(finding, CopiesDue):
        dropped_updates.trace_copies(incident, book)
        return None
    name = wording.optimizer_name(book, incident)
    step = wording.span(book.step_site, f"`{name}` steps here", "context")
    if isinstance(finding, RoundedAway):
        return _rounding(incident, book, name, finding)
    beside: float | None = finding.beside
    brought = zero_rate.loaded(book, name, step, (CODE, NAME))
    if brought is not None:
        return brought
    schedule = incident.notes[Ledger].schedules.of_book(book)
    if schedule is not None and book.rates.highest == 0 and schedule.base:
        return _never_warm(book, name, schedule)
    if schedule is not None and schedule.began and beside is None:
        return zero_rate.run_out(book, name, schedule, step, (CODE, NAME))
    made = None if schedule is None else wording.span(schedule.made, "starts from the rate it finds, and that is zero", "culprit")
    scheduler = None if schedule is None else wording.made_name(schedule.made) or schedule.type_name
    if book.rates.highest > 0:
        headline = f"the learning rate (lr) of `{name}` has been zero for {book.rates.zero} steps: no parameter changes any more"
        why = f"The rate was {book.rates.highest:g} before. " + (
            f"`{scheduler}` ({schedule.type_name}) drives it." if schedule is not None else "Nothing sets it back."
        )
    else:
        headline = f"the learning rate (lr) of `{name}` was zero in all {book.rates.zero} steps: no parameter changed"
        why = "With a rate of zero a step changes nothing."
    # an optimizer that was given a rate has lost it since
    culprit = made or (zero_rate.written(incident) if book.rates.given else wording.span(book.made, "its rate is zero", "culprit"))
    if schedule is not None:
        why += (
            " A scheduler takes the rate that the optimizer has when it is made as its start (`initial_lr` is kept, the "
            "running rate goes on from where it stands)."
        )
        title = "Set `group['lr']` (and `group['initial_lr']`) back before making the scheduler, or use CosineAnnealingWarmRestarts"
    else:
        title = f'Give `{name}` a rate above zero: `lr=...` where it is made, or `group["lr"]` in its `param_groups`'
    fix = Fix(title=title, safety="unsafe")
    if beside is not None:
        why += f" `{name}.lr` is {beside:g}, and no step reads it: the rate of a step is `lr` in `{name}.param_groups`."
        found = rate_attribute.place(incident, name)
        if found is not None:
            step = culprit.model_copy(update={"role": "context"}) if culprit is not None else step
            culprit, fix = found
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=wording.spans(step, None if schedule is None else wording.span(schedule.site, "steps the schedule", "context")),
        explanation=why,
        fixes=[fix],
    )


def _never_warm(book: Book, name: str, schedule: Schedule) -> Diagnosis:
    """The optimizer has a rate, and its scheduler multiplies it by zero from the beginning."""
    scheduler = wording.made_name(schedule.made) or schedule.type_name
    which = f"`{scheduler}`" if scheduler == schedule.type_name else f"`{scheduler}` ({schedule.type_name})"
    factor = "what its function returns" if schedule.type_name in ("LambdaLR", "MultiplicativeLR") else "its factor"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{scheduler}` keeps the learning rate (lr) of `{name}` at zero: no parameter changed in {book.rates.zero} steps",
        culprit=wording.span(schedule.made, f"sets the rate to {schedule.base:g} times {factor}, which was always zero", "culprit"),
        related=wording.spans(
            wording.span(schedule.site, "steps the schedule", "context"), wording.span(book.step_site, f"`{name}` steps here", "context")
        ),
        explanation=f"`{name}` was made with a rate of {schedule.base:g}. {which} has set it to zero when it was made and at each "
        "of its steps.",
        fixes=[
            Fix(
                title="Make the warm-up's factor rise above zero: `(step + 1) / warmup` in floating point, not `//`",
                safety="manual",
                detail="A scheduler's counter goes up with each call of its step(), not with the epochs.",
            )
        ],
        confidence="likely",
    )


def _rounding(incident: Incident, book: Book, name: str, finding: RoundedAway) -> Diagnosis:
    parameters = [p for p in book.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    kind = str(parameters[0].dtype).removeprefix("torch.") if parameters else "a 16-bit type"
    roots = wording.roots_of(parameters, incident.names)
    whose = f"`{roots[0]}`" if roots else f"`{name}`"
    share = round(100 * finding.still / finding.of)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"the updates of {whose} round away: its parameters are {kind}, and {share} % of the sampled weights with a gradient "
        "have not changed in 40 steps",
        culprit=wording.span(wording.cast(incident, parameters), f"from here on the parameters are {kind}", "culprit"),
        related=wording.spans(wording.span(book.step_site, f"updates of about {book.rates.highest:g} are below the precision", "context")),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"{kind} keeps {8 if kind == 'bfloat16' else 11} significant bits: an update smaller than half a unit in the last "
        "place leaves a weight as it was, "
        "and as nothing is carried over, it does so at every step.",
        fixes=[
            Fix(
                title="Keep the parameters in float32 and run the forward pass under `torch.autocast`",
                safety="unsafe",
                detail="Or let the optimizer keep float32 master weights.",
            )
        ],
        avoid=["a larger learning rate: only the weights that are small or have large gradients move then, by too much"],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="steps that change nothing: learning rate zero, or updates that round away",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
