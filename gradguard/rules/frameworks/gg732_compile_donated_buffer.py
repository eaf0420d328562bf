"""# GG732 compile-donated-buffer

## What it is
`backward(retain_graph=True)` (or `create_graph=True`) runs through a `torch.compile`d function whose backward was compiled to
reuse the memory of its saved tensors ("donated buffers").

## Why it is wrong
A donated buffer is overwritten during the first backward, so the graph cannot be kept for a second one. Compilation decides
this the first time, when no `retain_graph` was in sight.

## Example
    trunk = torch.compile(trunk)
    h = trunk(x)
    policy_loss(h).backward(retain_graph=True)
    value_loss(h).backward()

## Use instead
    (policy_loss(h) + value_loss(h)).backward()

or, where two backwards are needed, `torch._functorch.config.donated_buffer = False` before the first compilation.

## Fix safety
Unsafe: one backward of the sum gives the same gradients, but changes where they are accumulated.

## When it speaks, what silences it
When PyTorch raises.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.user_calls import compilations, only
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule

CODE, NAME = "GG732", "compile-donated-buffer"


def recognise(incident: Incident) -> Diagnosis | None:
    """The backward call that wants to keep the graph, and the compiled function."""
    place = resolve(incident.call.site) if incident.call is not None else incident.place
    if place is None:
        return None
    found = compilations(incident)
    compiled = only(found, "compiled here: its backward reuses the memory of what it saved")
    asked = "create_graph=True" if incident.call is not None and incident.call.create_graph else "retain_graph=True"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{asked}` cannot keep a graph whose compiled backward overwrites what it saved",
        culprit=place.span(f"`{asked}`: the graph shall be kept", "culprit"),
        related=[compiled] if compiled is not None else [],
        explanation="torch.compile lets a backward reuse the memory of the tensors saved for it (donated buffers) "
        "unless it has seen that the graph "
        "is kept. After one backward those values are gone.",
        fixes=[
            Fix(title="Add the losses and call backward once: `(loss_a + loss_b).backward()` needs no `retain_graph`", safety="unsafe"),
            Fix(title="Set `torch._functorch.config.donated_buffer = False` before the first call of the compiled function", safety="safe"),
        ],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="retain_graph through a compiled function with donated buffers",
    recognise=recognise,
    messages=("non-empty donated buffers",),
    priority=5,
)
