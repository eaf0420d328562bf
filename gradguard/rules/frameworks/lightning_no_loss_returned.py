"""# GG741 lightning-no-loss-returned

## What it is
`training_step` returns None, batch after batch, under automatic optimization.

## Why it is wrong
Lightning skips a batch without a loss: no backward, no step. Now and then that is a way to skip a bad batch; always, nothing is
trained.

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
With the Lightning callback, after the first five batches if every one of them returned None. Manual optimization is silent.
"""

from __future__ import annotations

from gradguard.diagnosis import Diagnosis, Fix
from gradguard.evidence.source import function_def, span_of
from gradguard.rules.base import Rule
from gradguard.rules.incident import Incident

CODE, NAME = "GG741", "lightning-no-loss-returned"


def recognise(incident: Incident) -> Diagnosis | None:
    """The training_step that the callback has watched."""
    suspicion = incident.suspicion
    if suspicion is None or suspicion.code != CODE:
        return None
    owner, code, batches = (suspicion.data[key] for key in ("owner", "function", "batches"))
    definition = function_def(code)
    culprit = None
    if definition is not None:
        culprit = span_of(code.co_filename, definition, label="returns None", role="culprit")
        culprit = culprit.model_copy(update={"end_line": culprit.line, "end_column": None, "column": None})
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`training_step` of `{owner}` has returned None for all {batches} batches: nothing is trained",
        culprit=culprit,
        explanation="Under automatic optimization Lightning skips backward and the optimizer's step for a batch whose `training_step` returns None.",
        fixes=[Fix(title="Return the loss from `training_step`", safety="unsafe")],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="training_step returns None for every batch",
    recognise=recognise,
    moments=frozenset({"suspicion"}),
    severity="warning",
)
