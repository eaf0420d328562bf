"""# GG701 ddp-unused-parameters

## What it is
Parameters of a DistributedDataParallel module got no gradient in a step: forward did not use them, or the loss does not
depend on what they made. The next forward finds their reduction still open.

## Why it is wrong
DDP averages gradients in buckets and waits until every parameter has reported one. A parameter that has no part in the loss
never reports, so the step before was never finished.

## Example
    def forward(self, x, refine=False):
        h = self.body(x)
        if refine:
            h = self.refiner(h)          # in most steps `refiner` gets no gradient
        return h

    ddp = DDP(net)

## Use instead
    ddp = DDP(net, find_unused_parameters=True)     # where the branch is meant to be optional

## Fix safety
Manual: `find_unused_parameters=True` is right where parameters are left out on purpose and not always. Where the output of a
layer was forgotten in the loss, or the layer is never used, it hides the mistake and costs a walk of the graph in each step.

## When it speaks, what silences it
When PyTorch raises. `find_unused_parameters=True` silences it.
"""

from __future__ import annotations

from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import named_parameters
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import ddp as shared

CODE, NAME = "GG701", "ddp-unused-parameters"


def recognise(incident: Incident) -> Diagnosis | None:
    """Which parameters, and why they had no part."""
    ddp = shared.replica(incident)
    if ddp is None or "training graph has changed" in incident.message:
        return None
    unused = shared.at_indices(incident, ddp)
    held = dict(named_parameters(ddp.module))
    frozen = [name for name in unused if name in held and not held[name].requires_grad]
    if frozen:
        return _frozen(incident, ddp, unused, frozen)
    blamed = shared.blamed(ddp.module, set(unused))
    found = [use for path in blamed for use in shared.uses(ddp.module, path)]
    conditional = [use for use in found if use.condition is not None]
    made = shared.made(incident, ddp, "made without `find_unused_parameters=True`")
    what = short_list(blamed or unused, 3)
    related: list[SourceSpan | None] = []
    culprit: SourceSpan | None
    if conditional:
        use = conditional[0]
        culprit = use.span(f"runs only if `{use.condition_text}`")
        related = [shared.deciding(incident, use), made]
        headline = f"{what} got no gradient in the step before: forward runs it only if `{use.condition_text}`"
        why = f"In the step before, `{use.condition_text}` did not hold, so that these parameters had no part in the loss."
        fixes = _optional(ddp)
    elif found:
        culprit, related = found[0].span("its result does not reach the loss"), [made]
        headline = f"{what} got no gradient in the step before: forward runs it, but its result does not reach the loss"
        why = "Forward uses these parameters in every step, and backward did not come by them: what they make is not part of the loss."
        fixes = [Fix(title=f"Use the output of {what} in the loss, or do not compute it", safety="unsafe"), *_optional(ddp)]
    else:
        culprit = None if made is None else made.model_copy(update={"role": "culprit", "label": f"waits for gradients of {what}"})
        headline = f"{what or 'some parameters'} got no gradient in the step before"
        headline += ": no method of its class uses it" if blamed else ""
        why = "Nothing that forward computes from these parameters is part of the loss."
        fixes = _optional(ddp)
        if blamed:
            fixes.insert(0, Fix(title=f"Remove {what}, or freeze it before the module is wrapped", safety="unsafe"))
    return _diagnosis(ddp, unused, headline, culprit, related, why, fixes)


def _frozen(incident: Incident, ddp: Any, unused: list[str], frozen: list[str]) -> Diagnosis:
    what = short_list(shared.blamed(ddp.module, set(frozen)) or frozen, 3)
    culprit = shared.frozen_at(incident)
    made = shared.made(incident, ddp, "wrapped while the parameters were still trained")
    return _diagnosis(
        ddp, unused, f"{what} was frozen after the module was wrapped: DDP still waits for its gradients", culprit, [made],
        "DDP notes at its construction which parameters require grad. One that is frozen later never reports a gradient.",
        [Fix(title="Freeze first, then wrap (wrap anew where layers are frozen or thawed during training)", safety="manual")],
    )  # fmt: skip


def _optional(ddp: Any) -> list[Fix]:
    if getattr(ddp, "find_unused_parameters", False):
        return [Fix(title="Let forward return its tensors in lists, tuples or dicts, and use all of them in the loss", safety="manual")]
    return [
        Fix(
            title="Pass `find_unused_parameters=True` to DistributedDataParallel if it is left out on purpose in some steps",
            safety="manual",
            detail="DDP then walks the graph after each forward and no longer waits for what is not in it.",
        )
    ]


def _diagnosis(
    ddp: Any, unused: list[str], headline: str, culprit: SourceSpan | None, related: list[SourceSpan | None], why: str, fixes: list[Fix]
) -> Diagnosis:
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=headline,
        culprit=culprit,
        related=[span for span in related if span is not None],
        tensors=shared.facts(ddp, unused),
        explanation=f"{why} DDP waits until each parameter has reported a gradient, and so the step before was never finished. "
        f"Concerned: {short_list(unused, 6)}.",
        fixes=fixes,
        avoid=[
            "`find_unused_parameters=True` where every parameter should be trained in every step: "
            "it hides a layer that was forgotten in the loss, and costs a walk of the graph in each step"
        ],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="parameters of a DistributedDataParallel module had no part in the loss",
    recognise=recognise,
    messages=("expected to have finished reduction in the prior iteration",),
    priority=40,
)
