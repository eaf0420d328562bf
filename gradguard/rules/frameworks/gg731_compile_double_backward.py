"""# GG731 compile-double-backward

## What it is
A gradient that was computed through a `torch.compile`d function with `create_graph=True` is differentiated again.

## Why it is wrong
AOTAutograd compiles forward and the first backward together. The compiled backward is opaque: it has no graph of its own.

## Example
    model = torch.compile(model)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.norm().backward()

## Use instead
Run the part that is differentiated twice uncompiled: `model._orig_mod(x)` or `torch.compiler.disable(...)`.

## Fix safety
Safe: the same numbers, slower where the penalty is computed.

## When it speaks, what silences it
When PyTorch raises.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.user_calls import compilations, only
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule

CODE, NAME = "GG731", "compile-double-backward"


def recognise(incident: Incident) -> Diagnosis | None:
    """The call that asked for a graph of the gradient, and the compiled function."""
    first = next((fact for fact in reversed(incident.journal.backwards) if fact.create_graph and fact is not incident.call), None)
    place = resolve(first.site) if first is not None else None
    compiled = only(compilations(incident), "compiled here")
    culprit = place.span("asks for a gradient that can be differentiated again", "culprit") if place is not None else compiled
    here = incident.place
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline="a gradient through a `torch.compile`d function is differentiated a second time, which compiled code does not support",
        culprit=culprit,
        related=[
            span
            for span in (compiled, None if here is None else here.span("differentiates it again", "backward"))
            if span is not None and span is not culprit
        ],
        explanation=(
            "AOTAutograd compiles the forward and one backward; the compiled "
            "backward records no graph, so there is nothing to differentiate."
        ),
        fixes=[
            Fix(
                title=(
                    "Run the twice-differentiated part uncompiled: call the module's "
                    "`_orig_mod` there, or wrap it in `torch.compiler.disable`"
                ),
                safety="safe",
            )
        ],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a gradient through a compiled function is differentiated again",
    recognise=recognise,
    messages=("does not currently support double backward",),
)
