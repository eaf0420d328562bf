"""# GG743 lightning-backward-bypassed

## What it is
A LightningModule under manual optimization calls `loss.backward()` in place of `self.manual_backward(loss)`, where the strategy or
the precision plugin has something to do for a backward.

## Why it is wrong
Under manual optimization Lightning switches DDP's averaging off around `training_step`, and gets it ready again in
`manual_backward` alone; a gradient scaler scales the loss there, and nowhere else. Called directly, backward leaves each rank with
its own gradients, and the scaler with none.

## Example
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        opt.step()

## Use instead
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        opt.step()

## Fix safety
Unsafe: gradients are averaged over the ranks, or scaled, which is the purpose.

## When it speaks, what silences it
Over several ranks at the second step at which their gradients differ (as GG703 does); with a gradient scaler when the scaler
refuses to step. On one device without a scaler the two calls do the same, and it is silent.
"""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.monitors import lightning_fits, replica_drift
from gradguard.probes.replicas import Drift
from gradguard.rules import lightning_manual
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import ddp as shared

CODE, NAME = "GG743", "lightning-backward-bypassed"


def recognise(incident: Incident) -> Diagnosis | None:
    """The newest backward call, where it is the user's own and Lightning waits for one through `manual_backward`."""
    if incident.moment == "error":
        return _unscaled(incident)
    drift = incident.finding
    if not isinstance(drift, Drift) or drift.told or not drift.gradients or not _by_hand(drift.ddp.module):
        return None
    place = _direct(incident)
    if place is None:
        return None
    drift.told = True
    return _tell(
        incident, place,
        "over several ranks the gradients are never averaged",
        "Under manual optimization Lightning switches DDP's averaging off while `training_step` runs, and gets it ready again in "
        "`manual_backward` alone. The optimizer steps with this rank's own gradients, and the ranks' models drift apart.",
        [
            drift.evidence,
        ],
        drift,
    )  # fmt: skip


def _unscaled(incident: Incident) -> Diagnosis | None:
    place = _direct(incident) if any(_by_hand(view.locals.get("self")) for view in incident.user_frames) else None
    if place is None:
        return None
    return _tell(
        incident, place,
        "the precision plugin's scaler has scaled no loss",
        "With float16 Lightning scales the loss in `manual_backward`, and the optimizer's step goes through the scaler, which refuses "
        "to step where nothing was scaled.",
        [], None,
    )  # fmt: skip


def _by_hand(module: Any) -> bool:
    """Whether this is a LightningModule under manual optimization."""
    return lightning_manual.is_module(module) and not lightning_fits.automatic(module)


def _direct(incident: Incident) -> ResolvedSite | None:
    """The newest backward call's place, if a loss's own `backward()` stands there."""
    newest = incident.journal.backwards[-1] if incident.journal.backwards else None
    place = None if newest is None else resolve(newest.site)
    call = None if place is None else place.call
    if call is None or not isinstance(call.func, ast.Attribute) or call.func.attr != "backward" or call.args:
        return None  # strategies and fabrics have a `backward` too, which takes the loss
    return place


def _tell(incident: Incident, place: ResolvedSite, what: str, why: str, notes: list[str], drift: Drift | None) -> Diagnosis:
    root = place.receiver or "loss"
    rest = "".join(f", {name}={value}" for name, value in place.keywords.items())
    instead = f"self.manual_backward({root}{rest})"
    inside = place.enclosing_function
    mine = not isinstance(inside, (ast.Lambda, type(None))) and bool(inside.args.args) and inside.args.args[0].arg == "self"
    patch = replaced(place.source, [(place.call, instead)]) if mine and place.source is not None and place.call is not None else None
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning" if incident.error is None else "error",
        headline=f"`{root}.backward()` goes past `manual_backward`: {what}",
        culprit=place.span(f"`{instead}` would hand it to the strategy and the precision plugin", "culprit"),
        related=[] if incident.place is None else [incident.place.span("steps with what that left", "changed")],
        tensors=[] if drift is None else shared.facts(drift.ddp, drift.names),
        explanation=why,
        notes=notes,
        fixes=[Fix(title=f"Call `{instead}`", safety="unsafe", patch=patch)],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="loss.backward() in place of self.manual_backward(loss) under Lightning's manual optimization",
    recognise=recognise,
    moments=frozenset({"error", "before_step"}),
    messages=("attempted unscale_ but _scale is none", "no inf checks were recorded for this optimizer"),
    priority=20,
    severity="warning",
    screen=replica_drift.screen,
    idle=replica_drift.idle,
)
