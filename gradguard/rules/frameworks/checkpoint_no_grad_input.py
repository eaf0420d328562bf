"""# GG711 checkpoint-no-grad-input

## What it is
Reentrant checkpointing of a module whose inputs do not require grad: its parameters get no gradient.

## Why it is wrong
`checkpoint(..., use_reentrant=True)` runs the module inside a custom autograd Function. Whether its output takes part in the
graph depends on the *inputs* alone; parameters used inside do not count. The first module behind the data is the usual victim:
it is never trained, and the rest trains on.

## Example
    x = checkpoint(stem, images, use_reentrant=True)

## Use instead
    x = checkpoint(stem, images, use_reentrant=False)

## Fix safety
Safe: the same forward; gradients now reach the parameters.

## When it speaks, what silences it
In a traced step, at the call: grad mode is on, the module is in training mode and has parameters that require grad, and no
input does. Under no_grad, in eval mode and for frozen modules it is silent.
"""

from __future__ import annotations

from gradguard.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.evidence.source import resolve
from gradguard.rules.base import Rule
from gradguard.rules.incident import Incident

CODE, NAME = "GG711", "checkpoint-no-grad-input"
_CUT = ("does not require grad and does not have a grad_fn",)


def recognise(incident: Incident) -> Diagnosis | None:
    """The checkpoint call; also behind the error it causes when nothing else requires grad."""
    if incident.error is not None:
        data = incident.memory.get(CODE)
        if not data or data["step"] != incident.journal.step:
            return None
    elif incident.suspicion is not None and incident.suspicion.code == CODE:
        data = incident.memory[CODE] = dict(incident.suspicion.data, step=incident.journal.step)
    else:
        return None
    place = resolve(data["site"])
    if place is None:
        return None
    what = data["module"] or "the module"
    loops = place.enclosing_loops
    target: SourceSpan = place.span("no input of this call requires grad", "culprit")
    inner = f" (`{_iterated(loops, what)}`)" if loops and _iterated(loops, what) else ""
    arguments = [argument for argument in place.arguments if "=" not in argument]
    first = arguments[0] if arguments else what
    spoken = "use_reentrant=True" if place.keywords.get("use_reentrant") == "True" else "use_reentrant left at True"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="error" if incident.error is not None else "warning",
        headline=f"the parameters of `{first}`{inner} get no gradient: it is checkpointed with `{spoken}`, and no input requires grad",
        culprit=target,
        explanation="Reentrant checkpointing runs the module inside a custom autograd Function, "
        "whose output requires grad only if an input does. "
        f"The {data['parameters']} parameters inside ({data['names']}) do not count, so they are cut off.",
        fixes=[Fix(title="Pass `use_reentrant=False`", safety="safe")],
        avoid=["setting `requires_grad_()` on the input data: it works, at the price of a gradient for the data that nobody uses"],
    )


def _iterated(loops: object, name: str) -> str | None:
    import ast

    for loop in loops if isinstance(loops, list) else []:
        node = getattr(loop, "node", loop)
        if isinstance(node, ast.For):
            return ast.unparse(node.iter)
    return None


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="reentrant checkpointing of a module whose inputs do not require grad",
    recognise=recognise,
    moments=frozenset({"error", "suspicion"}),
    messages=_CUT,
    priority=60,
)
