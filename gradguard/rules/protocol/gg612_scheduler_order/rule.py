"""# GG612 scheduler-order

## What it is
A learning-rate scheduler is stepped at the wrong rhythm (after every batch, when its numbers mean epochs), or for an
optimizer that is no longer the one that steps. Or a decay written by hand (`group["lr"] *= 0.1`) runs at that rhythm.

## Why it is wrong
The rate falls by orders of magnitude within the first epochs and nothing is learnt any more; or the schedule has no effect.

## Example
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)   # meant: every 30 epochs
    for epoch in range(90):
        for batch in loader:
            ...
            scheduler.step()                                 # every 30 batches

## Use instead
Call `scheduler.step()` once an epoch, or give the schedule's numbers in batches. Make schedulers anew with a new optimizer.

## Fix safety
Unsafe: it changes the learning rate.

## When it speaks, what silences it
At the end of a run of thirty steps or more: about a scheduler that was made for as many calls as the optimizer took steps and got a
fifth of them or fewer; about a CosineAnnealingLR that was stepped with each optimizer step eight times as often as its T_max, or more;
about a LambdaLR whose function's highest value was the initial rate itself. At the end too, or after 30 steps at zero: about a
scheduler that was stepped half as often again as its optimizer, or more, and has brought the rate to zero for half of the run. And
while it runs:
When the rate has fallen below 1/10,000 of its highest value, the scheduler is stepped with (nearly) every optimizer step, and
at least half of all steps so far (30 at least) ran at such a rate; or no scheduler is there, and the rate was cut at several looks in
a row by the program itself, or cut at four or more of them and is below 1e-7 of its highest value. Or
when five calls of a scheduler in a row find that its own optimizer has not stepped while another one over the same parameters has.
"""

from __future__ import annotations

import ast

from pydantic import BaseModel, ConfigDict, Field

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.at_places import brought_after, out_of_the_loop, repeated_after
from gradguard.fixes.edits import indent_of, replaced
from gradguard.monitors.learning_rates import (
    OtherSchedule,
    RateByHand,
    RateForFactor,
    Schedule,
    ScheduleAhead,
    ScheduleSwings,
    SteppedPerEpoch,
)
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import accelerated, wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.gg612_scheduler_order import rate_by_hand

CODE, NAME = "GG612", "scheduler-order"


class Options(BaseModel):
    """What can be set under `rules: {GG612: ...}`."""

    model_config = ConfigDict(extra="forbid")

    vanished: float = Field(default=1e-4, gt=0, lt=1, description="of its highest value: a learning rate below that counts as vanished")
    steps: int = Field(default=30, ge=8, le=100_000, description="steps with such a rate, and at least half of all, before it speaks")


def recognise(incident: Incident) -> Diagnosis | None:
    """The scheduler's step, and what became of the learning rate."""
    finding = incident.finding
    book: Book = finding.book
    if isinstance(finding, RateByHand):
        return rate_by_hand.told(incident, book, finding.rate, CODE, NAME)
    schedule: Schedule = finding.schedule
    place = resolve(schedule.site)
    scheduler = (place.receiver if place is not None else None) or wording.made_name(schedule.made) or schedule.type_name
    name = wording.optimizer_name(book, incident)
    made = wording.span(schedule.made, "made here", "made")
    if isinstance(finding, OtherSchedule):
        other = wording.optimizer_name(finding.other, incident)
        return Diagnosis(
            code=CODE,
            name=NAME,
            severity="warning",
            headline=f"`{scheduler}` schedules an optimizer that no longer steps: the rate of `{other}`, which does, never changes",
            culprit=wording.span(schedule.made, "made for an optimizer that is not the one that steps", "culprit")
            or (place.span("has no effect", "culprit") if place is not None else None),
            related=wording.spans(
                place.span("changes the other optimizer's rate only", "context") if place is not None else None,
                wording.span(finding.other.made, f"`{other}` was made here", "made"),
            ),
            explanation="The scheduler's own optimizer has not stepped since its last calls, while another optimizer "
            f"{_shares(book, finding.other)} has.",
            fixes=[_made_anew(schedule, finding.other, scheduler, other)],
        )
    if isinstance(finding, SteppedPerEpoch):
        return Diagnosis(
            code=CODE,
            name=NAME,
            severity="warning",
            headline=f"`{scheduler}` was made for {finding.span} steps and stepped {schedule.calls} times, in a run of {book.steps} "
            "optimizer steps",
            culprit=None if place is None else place.span(f"called {schedule.calls} times in {book.steps} optimizer steps", "culprit"),
            related=wording.spans(wording.span(schedule.made, f"made for {finding.span} calls of step()", "made")),
            explanation=f"`{schedule.type_name}` counts the calls of its step(). Made for as many as the optimizer took, it has come "
            f"{schedule.calls} calls far: the learning rate stayed at the beginning of its curve.",
            fixes=[
                Fix(
                    title=f"Call `{scheduler}.step()` after each `{name}.step()`",
                    safety="unsafe",
                    patch=brought_after(place, resolve(book.step_site)),
                    detail="Or make the scheduler for the number of epochs.",
                )
            ],
            confidence="likely",
        )
    if isinstance(finding, RateForFactor):
        return Diagnosis(
            code=CODE,
            name=NAME,
            severity="warning",
            headline=f"the rate of `{name}` was {finding.rate:g} at most: the function of `{scheduler}` returns a rate, not a factor",
            culprit=wording.span(schedule.made, "multiplies the initial rate by what its function returns", "culprit"),
            related=wording.spans(wording.span(book.step_site, f"`{name}` steps at {finding.rate:g} at most", "context")),
            explanation=f"LambdaLR sets the rate to the initial one ({schedule.base:g}) times the function's value. The highest value was "
            f"{finding.rate / schedule.base:g}, which is the initial rate itself: it is squared.",
            fixes=[Fix(title="Return a factor: 1.0 where the initial rate is meant", safety="unsafe")],
            confidence="likely",
        )
    if isinstance(finding, ScheduleAhead):
        return _ahead(incident, book, name, scheduler, schedule)
    if isinstance(finding, ScheduleSwings):
        return _swings(book, name, scheduler, schedule)
    rates = book.rates
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{scheduler}.step()` runs with every optimizer step and has driven the learning rate (lr) from {rates.highest:g} to "
        f"{finding.rate:.2g} in {book.steps} steps",
        culprit=None if place is None else place.span(_pace(schedule.calls, book.steps), "culprit"),
        related=wording.spans(made, wording.span(book.step_site, f"`{name}` steps at a rate of {finding.rate:.2g}", "context")),
        explanation=(
            f"{rates.tiny} of {book.steps} steps ran at less than 1/10,000 of the starting rate: nothing is learnt there. "
            f"`{schedule.type_name}` counts calls; numbers that mean epochs need one call an epoch."
        ),
        fixes=[
            Fix(
                title=f"Call `{scheduler}.step()` once an epoch, after the loop over batches",
                safety="unsafe",
                patch=out_of_the_loop(place),
                detail="Or give the schedule's numbers in batches.",
            )
        ],
    )


def _shares(book: Book, other: Book) -> str:
    """Which parameters the other optimizer has, beside those of the scheduler's own."""
    own, others = ({id(parameter) for parameter in each.parameters()} for each in (book, other))
    return (
        "over the same parameters"
        if own == others
        else "with these parameters and more"
        if own < others
        else "that shares parameters with it"
    )


def _made_anew(schedule: Schedule, other: Book, scheduler: str, name: str) -> Fix:
    """A scheduler for the newer optimizer, made after it: at its line, or, where one line makes both, after the call that leads there."""
    old, new = resolve(schedule.made), resolve(other.made)
    where, patch = "", None
    if new is not None and old is not None and old.statement is not None and new.enclosing_function is not None:
        where = f" (line {new.line})"
        if new.enclosing_function is not old.enclosing_function:
            where = f", after each call of `{getattr(new.enclosing_function, 'name', 'the function')}()`"
        elif old.statement.lineno < new.line:
            patch = repeated_after(old, new)
    elif new is not None:
        where = f" (line {new.line})"
        patch = repeated_after(old, new) if old is not None and old.line < new.line else None
    return Fix(
        title=f"Make a new scheduler for `{name}` once that is made{where}",
        safety="unsafe",
        detail=f"`{scheduler}` keeps the optimizer that it was given, and a new one begins its schedule anew.",
        patch=patch,
    )


def _ahead(incident: Incident, book: Book, name: str, scheduler: str, schedule: Schedule) -> Diagnosis:
    """It is stepped for every micro-batch, and was made for as many calls as the optimizer takes steps."""
    place = resolve(schedule.site)
    steps = max(1, book.steps - schedule.began_at)
    fix = Fix(
        title=f"Call `{scheduler}.step()` right after `{name}.step()`, under the same condition",
        safety="unsafe",
        detail="Or make the schedule for as many calls as there are.",
        patch=brought_after(place, resolve(book.step_site)),
    )
    accelerator = accelerated.accelerator_name(incident) if accelerated.wrapper_of(incident, book.ref()) is not None else None
    if accelerator is not None:  # whose optimizers' step() stands under no condition, and waits by itself
        fix = Fix(
            title=f"Step it only with the optimizer: `if {accelerator}.sync_gradients: {scheduler}.step()`",
            safety="unsafe",
            patch=_gated(place, f"{accelerator}.sync_gradients"),
            detail=f"Or hand `{scheduler}` to `{accelerator}.prepare(...)`, which then steps it only with the optimizer.",
        )
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{scheduler}.step()` was called {schedule.calls} times in {steps} steps of `{name}`: the learning rate (lr) was zero in "
        f"the last {book.rates.zero} of them",
        culprit=None if place is None else place.span(f"called {schedule.calls} times in {steps} optimizer steps", "culprit"),
        related=wording.spans(
            wording.span(schedule.made, "counts the calls of its step()", "made"),
            wording.span(book.step_site, f"`{name}` steps here, less often", "context"),
        ),
        explanation=f"The rate was {book.rates.highest:g} at most. `{schedule.type_name}` counts the calls of its step(), "
        f"{schedule.calls / steps:.3g} for each step of the optimizer here: where gradients are accumulated over several batches, one "
        "call a batch runs through the schedule too early, and nothing is learnt after that.",
        fixes=[fix],
    )


def _gated(place: ResolvedSite | None, condition: str) -> str | None:
    """The diff that puts the statement of a call under a condition."""
    statement, source = (None, None) if place is None else (place.statement, place.source)
    if place is None or source is None or not isinstance(statement, ast.Expr) or statement.value is not place.call:
        return None
    if statement.lineno != statement.end_lineno or source.lines[statement.lineno - 1].strip() != source.flat(statement):
        return None
    below = indent_of(source, statement.lineno) + "    "
    return replaced(source, [(statement, f"if {condition}:\n{below}{source.flat(statement)}")])


def _swings(book: Book, name: str, scheduler: str, schedule: Schedule) -> Diagnosis:
    """A cosine that was made to fall once: past its T_max it rises again."""
    place = resolve(schedule.site)
    low, high, span = schedule.low, schedule.base, schedule.span
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{scheduler}` has a T_max of {span} and was stepped {schedule.calls} times: the learning rate of `{name}` falls and "
        f"rises again every {2 * span} steps",
        culprit=None if place is None else place.span(_pace(schedule.calls, book.steps), "culprit"),
        related=wording.spans(wording.span(schedule.made, f"reaches its lowest rate after {span} calls of step()", "made")),
        explanation=f"`{schedule.type_name}` counts the calls of its step() and follows a cosine with no end: from {high:g} it is at "
        f"{low:g} after {span} of them, at {high:g} again after {2 * span}, and so on. Epochs as T_max need one call an epoch.",
        fixes=[
            Fix(
                title=f"Give T_max in the unit in which `{scheduler}.step()` is called: epochs times batches an epoch",
                safety="unsafe",
                detail="Or call it once an epoch. Where the swings are meant, CosineAnnealingWarmRestarts says so.",
            )
        ],
        confidence="likely",
    )


def _pace(calls: int, steps: int) -> str:
    """How often a schedule was stepped; the call after the newest optimizer step may be yet to come."""
    return "called after every optimizer step" if calls in (steps - 1, steps) else f"called {calls} times in {steps} optimizer steps"


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a scheduler stepped at the wrong rhythm, or for another optimizer",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
