"""# GG804 oom-activations

## What it is
Memory ran out, and what holds it is what this step has saved for its backward: the activations of a model that is too large for the batch.

## Why it is wrong
Each operation keeps what its backward needs until backward is through. That grows with the batch, and with the length or size of each
sample.

## Example
    loader = DataLoader(data, batch_size=512)

## Use instead
    loader = DataLoader(data, batch_size=128)
    ...
    (criterion(model(inputs), targets) / 4).backward()      # four of them a step

## Fix safety
A smaller batch with as many backward calls a step gives the same gradients, except where the model looks across the batch (BatchNorm).

## When it speaks, what silences it
Where an exception that says that memory could not be had leaves the guard, and what this step has saved for backward is at least a third
of what all tensors hold, and nothing of the family GG8 that is more particular fits.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.memory.allocations import Allocation, allocation
from gradguard.analysis.memory.batches import Batch, batch_of
from gradguard.core.account import Group, Line, size
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.rules.base import Rule
from gradguard.rules.memory.wording import AVOID, asked, breakdown, ran_out

CODE, NAME = "GG804", "oom-activations"
_LINES = 3


def recognise(incident: Incident) -> Diagnosis | None:
    """The lines that hold the most, and the batch."""
    failed = allocation(incident)
    if failed is None or failed.stepping is not None or not failed.is_torchs or failed.is_elsewhere:
        return None
    saved = failed.account.total("saved")
    if not saved or saved < failed.held // 3:
        return None
    groups = [group for group in failed.account.by_line() if group.key is not None]
    batch = batch_of(failed.account, incident.journal)
    lines = [_span(group, saved) for group in groups[:_LINES]]
    culprit = lines[0].model_copy(update={"role": "culprit"}) if lines else None
    related = lines[1:]
    if incident.place is not None:
        failing = incident.place.span(f"{asked(failed)} could not be had here", "context" if culprit else "culprit")
        if culprit is None:
            culprit = failing
        elif (failing.file, failing.line) != (culprit.file, culprit.line):
            related.append(failing)
    many = f" for a batch of {batch.size}" if batch is not None else ""
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed)}: this step has saved {size(saved)} for backward{many}",
        culprit=culprit,
        related=related,
        explanation=f"{size(saved)} of the {size(failed.held)} that tensors hold are what operations of this step keep for their backward. "
        + _where(groups, saved),
        notes=[*breakdown(failed), *_modules(failed, saved)],
        fixes=_fixes(failed, batch),
        avoid=AVOID,
        confidence="likely",
    )


def _span(group: Group[Line], saved: int) -> SourceSpan:
    from gradguard.analysis.places.source import resolve

    row = next(row for row in group.rows if row.saved is not None)
    assert row.saved is not None
    place = resolve(row.saved.site)
    assert place is not None
    count = f" in {len(group.rows)} tensors" if len(group.rows) > 1 else ""
    return place.span(f"has saved {size(group.nbytes)}{count}, {round(100 * group.nbytes / saved)} % of all", "context")


def _where(groups: list[Group[Line]], saved: int) -> str:
    if not groups:
        return "The step was not traced, so that it is not known which lines made them; the next run's first steps are."
    return f"The line that keeps the most keeps {round(100 * groups[0].nbytes / saved)} % of it."


def _modules(failed: Allocation, saved: int) -> list[str]:
    groups = [group for group in failed.account.by_module() if group.key is not None][:4]
    if len(groups) < 2:
        return []
    return ["by module: " + ", ".join(f"`{group.key}` {size(group.nbytes)}" for group in groups)]


def _fixes(failed: Allocation, batch: Batch | None) -> list[Fix]:
    fixes: list[Fix] = []
    if batch is not None and batch.size > 1:
        fits = batch.fits(failed.asked)
        known = f"{fits} would fit, by what was held for {batch.size}" if batch.complete else f"try {fits}"
        fixes.append(
            Fix(
                title=f"Make the batch smaller: {known}; several of them a step, with their losses divided, give the same gradients",
                reason="not where the model looks across the batch, as BatchNorm does",
                detail=f"{size(batch.each)} are saved for each of {batch.size} samples"
                + (", up to the line that failed." if not batch.complete else "."),
            )
        )
    fixes.append(
        Fix(
            title="Save less: checkpoint the blocks that save the most (`torch.utils.checkpoint`), or use bfloat16 (`torch.autocast`)",
            detail="`gradguard memory` shows what each would give.",
        )
    )
    return fixes


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="memory ran out, held by what this step has saved for its backward",
    recognise=recognise,
    priority=5,
)
