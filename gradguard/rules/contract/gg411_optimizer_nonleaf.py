"""# GG411 optimizer-nonleaf

## What it is
An optimizer was given a computed tensor: one that was scaled, cast, moved to another device or reshaped after `requires_grad=True`.

## Why it is wrong
An optimizer changes leaves, tensors that no differentiable operation made. A computed tensor is gone with its graph: changing it
would change none of the values that it is computed from. PyTorch refuses.

## Example
    latents = torch.randn(n, size, requires_grad=True) * 0.01
    optimizer = torch.optim.Adam([latents])

## Use instead
    latents = (torch.randn(n, size) * 0.01).requires_grad_()
    optimizer = torch.optim.Adam([latents])

## Fix safety
Unsafe: where the tensor was computed from something that is to be trained as well, that has to be given to the optimizer instead.

## When it speaks, what silences it
When the optimizer (or `add_param_group`) refuses the tensor.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from gradguard.analysis.graph.walk import leaves, op_name
from gradguard.analysis.incident import Incident
from gradguard.analysis.program.expressions import closed, inside
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import frame_scopes
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.contract.gg409_requires_grad_nonleaf import maker
from gradguard.rules.contract.wording import untraced_note


def recognise(incident: Incident) -> Diagnosis | None:
    place, scopes, tensor = incident.place, frame_scopes(incident.frames), _refused(incident)
    if place is None or not scopes or tensor is None:
        return None
    name = incident.names.tensor(tensor)
    shown = f"`{name}`" if name else "A tensor"
    made, traced = maker(incident, scopes, name, tensor, place)
    op = op_name(tensor.grad_fn)
    trained = [state.full for leaf in leaves([tensor.grad_fn]) if (state := incident.names.state(leaf)) is not None]
    fixes = [
        Fix(
            title="compute the values first and make them a leaf last: `(...).detach().requires_grad_()`, or `nn.Parameter(...)`",
            safety="unsafe",
            patch=_patch(made),
        )
    ]
    if trained:
        fixes.insert(0, Fix(title=f"give the optimizer what {shown} is computed from: `{trained[0]}`", safety="manual"))
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        headline=f"{shown} cannot be optimized: it is a computed tensor (made by `{op}`), not a leaf",
        culprit=None if made is None else made.span(f"`{op}` makes {shown} a computed tensor, with a history", "culprit"),
        related=[place.span("the optimizer is given it here", "context")],
        tensors=[TensorFacts(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), requires_grad=True)],
        explanation="An optimizer changes leaves in place. Whatever differentiable operation comes after `requires_grad=True` (a product, "
        "`.to(device)`, `.cuda()`, a cast, a view) gives a new tensor with a history, and the leaf is the one before it.",
        notes=[] if traced or made is None else [untraced_note(f"the line that made {shown}")],
        fixes=fixes,
        confidence="certain" if traced else "likely",
    )


def _refused(incident: Incident) -> torch.Tensor | None:
    """The computed tensor among what the optimizer was given."""
    for view in incident.all_frames:
        if view.code_name == "add_param_group":
            group: Any = view.locals.get("param_group")
            params = group.get("params", ()) if isinstance(group, dict) else ()
            return next((p for p in params if isinstance(p, torch.Tensor) and p.grad_fn is not None), None)
    return None


def _patch(made: Spot | None) -> str | None:
    """Makes the result a leaf, and leaves out what asked for a gradient before it."""
    if made is None or not isinstance(made.node, (ast.BinOp, ast.Call)):
        return None
    asked = [word for word in inside(made.node, ast.keyword) if word.arg == "requires_grad"]
    text = closed(made.scope.source, made.node)
    return replaced(made.scope.source, [(made.node, f"{text}.detach().requires_grad_()")]) if len(asked) == 1 else None


RULE = Rule(
    code="GG411",
    name="optimizer-nonleaf",
    summary="an optimizer was given a computed tensor",
    recognise=recognise,
    priority=50,
    messages=("can't optimize a non-leaf tensor",),
)
