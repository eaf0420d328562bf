"""# GG741 lightning-no-loss-returned

## What it is
`training_step` returns None, batch after batch, under automatic optimization. Or optimization is manual, and `training_step` only
returns a loss.

## Why it is wrong
Lightning skips a batch without a loss: no backward, no step. Now and then that is a way to skip a bad batch; always, nothing is
trained. Under manual optimization Lightning calls neither backward nor step, whatever is returned.

## Example
    def training_step(self, batch, batch_idx):
        loss = self.compute_loss(batch)
        self.log("loss", loss)          # and no return

## Use instead
    def training_step(self, batch, batch_idx):
        loss = self.compute_loss(batch)
        self.log("loss", loss)
        return loss

## Fix safety
Unsafe: the model is trained from now on, which is the purpose.

## When it speaks, what silences it
If every batch of the run returned None: with the Lightning callback after the first five or at the end of a shorter fit, else
at the end. Batches that are skipped now and then are silent. Under manual optimization: at the end of a fit of ten batches or more
without any backward or step, if the losses returned led to parameters, and none of these has changed. A module that changes them
by other means is silent, and so is one whose loss leads to no parameter.
"""

from __future__ import annotations

from types import CodeType

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import function_def, span_of
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import peek
from gradguard.monitors.findings import Confirmed
from gradguard.monitors.lightning_fits import IdleFit
from gradguard.rules import lightning_manual
from gradguard.rules.base import Rule
from gradguard.rules.lightning_manual import idle_fit, step_code

CODE, NAME = "GG741", "lightning-no-loss-returned"


def recognise(incident: Incident) -> Diagnosis | None:
    """The training_step that the callback has watched."""
    finding = incident.finding
    if isinstance(finding, Confirmed):
        return finding.diagnosis
    if isinstance(finding, IdleFit):
        return idle_fit(finding.fit, CODE, NAME)
    return told(finding.owner, finding.function, finding.batches)


def told(owner: str, code: CodeType, batches: int | None = None) -> Diagnosis:
    """The diagnosis.

    Args:
        owner: the module's class.
        code: of its training_step.
        batches: how many there were so far, every one without a loss; None at the end of the run.
    """
    definition = function_def(code)
    culprit = None
    if definition is not None:
        culprit = span_of(code.co_filename, definition, label="returns None", role="culprit")
        culprit = culprit.model_copy(update={"end_line": culprit.line, "end_column": None, "column": None})
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`training_step` of `{owner}` has returned None for {_all(batches)}: nothing is trained",
        culprit=culprit,
        explanation="Under automatic optimization Lightning skips backward and the optimizer's step for a batch whose "
        "`training_step` returns None.",
        fixes=[Fix(title="Return the loss from `training_step`", safety="unsafe")],
    )


def _all(batches: int | None) -> str:
    if batches is None:
        return "every batch"
    return f"all {batches} batches so far" if batches > 1 else "the only batch"


def automatic_step(incident: Incident) -> tuple[str, CodeType] | None:
    """The class and training_step of the module whose automatic optimization is under way around an incident, if one is.

    There an optimizer's step without a backward is Lightning's own doing, and no bug of the loop's.
    """
    for view in incident.frames:
        if not view.frame.f_globals.get("__name__", "").endswith("loops.optimization.automatic"):
            continue
        module = lightning_manual.module_of(peek(view.locals.get("self"), "trainer"))
        code = step_code(type(module))
        if code is not None:
            return type(module).__name__, code
    return None


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="training_step returns None for every batch",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
