"""# GG407 function-contract

## What it is
A custom `autograd.Function` does not keep to what autograd expects of it: forward writes into its input without
`ctx.mark_dirty`, or hands an input back as it is; a method is not static; backward returns something that is no tensor, or a
gradient at the place of an input that is no tensor; a
tensor that forward computed is kept as an attribute of ctx and used by a backward that is itself differentiated.

## Why it is wrong
Autograd knows of a custom Function only what forward and ctx tell it. What it is not told it cannot take into account: a
write leaves other users of the input with a wrong value, a value kept past `save_for_backward` is a constant for the second
derivative, which then silently lacks a term.

## Example
    @staticmethod
    def forward(ctx, x):
        ctx.slope = torch.cos(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * ctx.slope

## Use instead
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad_out):
        x, = ctx.saved_tensors
        return grad_out * torch.cos(x)

## Fix safety
Manual. Recomputing in backward costs the forward's computation once more.

## When it speaks, what silences it
On PyTorch's errors about views made in a custom Function, about its methods and their results. Without an error when a
backward pass that was recorded with `create_graph=True` went through a Function whose forward kept a floating-point result
of its differentiable inputs on ctx, whose backward computes with it, and the recorded gradient is now differentiated.
Where a backward writes into its gradient in place and an addition gives that same tensor to a branch that runs later.
Silent for constants, masks, shapes, inputs themselves, what went through `save_for_backward`, and while nobody takes a
second derivative.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, find_function, view_of
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.expressions import calls_inside
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.memory import bases, memory_writes, statements_of
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import frame_scopes
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.notes import Notes
from gradguard.fixes.edits import inserted
from gradguard.instrumentation.facts import CallableRef
from gradguard.rules.base import Rule
from gradguard.rules.contract import custom_views
from gradguard.rules.contract.gg407_function_contract import function_methods, kept_on_ctx, misplaced_gradient, written_gradient

_VIEW = re.compile(r"Output (\d+) of (\w+?)(?:Backward)? is a view and is being modified inplace")
_GOT = re.compile(r"expected Variable or None \(got ([\w.]+)\)")


def _screen(notes: Notes, moment: str, facts: dict[str, Any], traced: bool) -> bool:
    return written_gradient.wanted(notes, moment, traced) or kept_on_ctx.screen(notes, moment, facts, traced)


def recognise(incident: Incident) -> Diagnosis | None:
    if incident.moment != "error":
        kept = kept_on_ctx.watch(incident)
        return kept or (
            written_gradient.look(incident) if written_gradient.wanted(incident.notes, incident.moment, incident.traced) else None
        )
    view_error = _VIEW.search(incident.message)
    if view_error is not None:
        node = custom_views.maker(incident)
        if view_error[2] == "BackwardHookFunction" or custom_views.of_hooks(node):
            return None
        made = getattr(node, "_forward_cls", None)
        view = view_of(made) if isinstance(made, type) else find_function(incident, view_error[2])
        return None if view is None else _view_written(incident, view)
    got = _GOT.search(incident.message)
    if got is not None:
        return function_methods.wrong_type(incident, got[1])
    misplaced = misplaced_gradient.MESSAGE.search(incident.message)
    if misplaced is not None:
        return misplaced_gradient.diagnose(incident, misplaced[1], int(misplaced[2]) - 1)
    if incident.says("non-static forward method"):
        return function_methods.not_static(incident)
    if incident.says("save_for_backward can only save"):
        return function_methods.saved_no_tensor(incident)
    return function_methods.dirty(incident) if incident.says("marked as dirty during the forward") else None


# -- in place, or handed back ----------------------------------------------------------------------------------------


def writes_to_inputs(view: FunctionView) -> list[tuple[str, Spot]]:
    """The in-place writes that forward does to its inputs: (input, place)."""
    scope = view.forward
    statements = [] if scope is None else statements_of(scope.tree)
    writes = [write for statement in statements for write in memory_writes(scope.source, statement)] if scope is not None else []
    return [(name, Spot(scope, write.node)) for write in writes if scope is not None for name in _inputs_in(view, write.written)]


def _inputs_in(view: FunctionView, expr: ast.expr) -> list[str]:
    """The inputs of forward whose memory an expression can be."""
    program = None if view.forward is None else program_of(view.forward.source)
    found = {each.name for each in bases(program, expr) if each.kind == "parameter"} if program is not None else set()
    return [name for name in view.inputs if name in found]


def _view_written(incident: Incident, view: FunctionView) -> Diagnosis:
    writes = writes_to_inputs(view)
    place = incident.place
    scopes = frame_scopes(incident.frames)
    marked = view.forward is not None and any(calls_inside(view.forward.tree, "mark_dirty"))
    handed: list[tuple[str, Spot]] = []
    if view.forward is not None:
        for value in returns_of(view.forward):
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            handed += [(root, Spot(view.forward, value)) for part in parts for root in _inputs_in(view, part)]
    written_name = None
    if place is not None:
        written_name = place.receiver or (place.targets[0] if place.targets else None)
    related: list[SourceSpan] = []
    fixes: list[Fix] = []
    if writes and not marked:
        name, spot = writes[0]
        culprit = spot.span(f"forward changes its input `{name}` in place, and ctx does not know", "culprit")
        related += [item.span(f"and returns it as it is: the output is a view of `{root}`", "context") for root, item in handed[:1]]
        if place is not None:
            related.append(
                place.span(
                    f"`{written_name}` is written here, where PyTorch noticed" if written_name else "PyTorch noticed here", "changed"
                )
            )
        context = view.context or "ctx"
        patch = None
        statement = spot.statement
        if statement is not None and view.forward is not None:
            patch = inserted(view.forward.source, statement.lineno, f"{context}.mark_dirty({name})")
        fixes = [
            Fix(
                title=f"tell autograd about the write: `{context}.mark_dirty({name})`",
                safety="safe",
                patch=patch,
                detail=f"`{name}` must then be returned by forward, as it is here.",
            ),
            Fix(title=f"compute out of place in the forward of `{view.name}`", safety="safe"),
        ]
        headline = (
            f"The forward of `{view.name}` changes its input `{name}` in place without `{context}.mark_dirty({name})`, and hands "
            "it back as its output."
        )
        why = (
            f"Autograd does not know that `{name}` was changed, and takes the output for a view of the untouched input. A "
            "later in-place write to the output "
            "would bypass the custom backward, which PyTorch refuses; had it not been written, the gradient could have been "
            "wrong without a word."
        )
    else:
        root = handed[0][0] if handed else None
        if place is None and not handed:
            return Diagnosis(
                code="GG407",
                name="function-contract",
                headline=f"The output of `{view.name}` is a view of its input and was written in place.",
            )
        shown = f"`{written_name}`" if written_name else "The output"
        culprit = (
            place.span(f"{shown} is the output of `{view.name}`, and is written in place here", "culprit")
            if place is not None
            else handed[0][1].span(role="culprit")
        )
        related += [
            item.span(f"forward hands its input `{root}` back{'' if isinstance(item.node, ast.Name) else ' as a view'}", "made")
            for root, item in handed[:1]
        ]
        apply = _apply_of(incident, view)
        related += apply
        fixes = [
            Fix(title=f"write out of place: make a new tensor instead of changing {shown}", safety="safe"),
            Fix(
                title=f"let the forward of `{view.name}` return a copy: `{root or 'x'}.clone()`",
                safety="safe",
                detail="Costs one more tensor of that size.",
            ),
        ]
        headline = (
            f"{shown} is written in place, but it is the output of `{view.name}`, whose forward returns its "
            f"input{f' `{root}`' if root else ''} itself (a view of it)."
        )
        why = (
            "The output shares its memory with the input, so the in-place write would have to be differentiated on the "
            "input, past the custom backward of "
            f"`{view.name}`. PyTorch refuses rather than compute a wrong gradient."
        )
    return Diagnosis(
        code="GG407",
        name="function-contract",
        headline=headline,
        culprit=culprit,
        related=related,
        explanation=why,
        fixes=fixes,
        notes=[f"Another write to an input: line {item.line} (`{item.text}`)." for _, item in writes[1:3]] if writes and not marked else [],
        avoid=["`.data` or `torch.no_grad()` around the write: the gradient would then be wrong without a word."],
        confidence="certain" if scopes else "likely",
    )


def _apply_of(incident: Incident, view: FunctionView) -> list[SourceSpan]:
    for fact in reversed(incident.journal.ops):
        if type(fact[4]) is CallableRef and fact[4]() is view.cls:
            place = incident.place_of_node(fact[0])
            return [] if place is None else [place.span(f"made by `{view.name}` here", "made")]
    return []


RULE = Rule(
    code="GG407",
    name="function-contract",
    summary="a custom autograd.Function does not keep to what autograd expects",
    recognise=recognise,
    priority=55,
    moments=frozenset({"error", "before_backward", "after_backward"}),
    screen=_screen,
    idle=kept_on_ctx.idle,
    messages=(
        "this view was created inside a custom function",
        "expected variable or none (got",
        "non-static forward method",
        "save_for_backward can only save",
        "marked as dirty during the forward",
        "but the corresponding forward input was not a variable",
    ),
)
