"""# GG616 accumulation-scale

## What it is
Gradients of several mean losses are accumulated into one step without dividing by their number.

## Why it is wrong
`backward()` adds. The sum of k mean losses has a gradient k times as large as the mean over the large batch that is meant:
the step is k times too long, and changing the number of micro-batches changes the effective learning rate.

## Example
    loss = criterion(model(x), y)             # a mean over the micro-batch
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()

## Use instead
    (loss / accumulation_steps).backward()

## Fix safety
Unsafe: the steps become k times smaller; a rate tuned with the bug in place has to be raised.

## When it speaks, what silences it
At the third step in a row that uses the same number of backward calls of one line, each on a loss that is a plain mean (no
factor, no quotient between the reduction and the root), where the step stands under `if ... % n == 0` and the file never
divides or multiplies by that n. Sums over different losses, losses that are scaled, sum reductions and closures are silent.
"""

from __future__ import annotations

import ast

from gradguard.analysis.history.loss_expressions import is_method, root_expression
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.at_places import applied_to, sees
from gradguard.fixes.edits import replaced
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.spans import gate_of

CODE, NAME = "GG616", "accumulation-scale"
_SCALES = ("div", "div_", "mul", "mul_", "true_divide")


def recognise(incident: Incident) -> Diagnosis | None:
    """The unscaled backward, and the count."""
    book: Book = incident.finding.book
    times: int = incident.finding.times
    if book.last_part is None:
        return None
    backward, step = resolve(book.last_part.call.site), resolve(book.step_site)
    if backward is None or step is None or step.source is None or step.node is None:
        return None
    gate = gate_of(step.source, step.node)
    counts = (
        [] if gate is None else [node.right for node in ast.walk(gate.test) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)]
    )
    if not counts:
        return None
    text = ast.unparse(counts[0])
    last = text.split(".")[-1]
    if any(_scales(source, last) for source in (step.source, backward.source) if source is not None):
        return None
    root = root_expression(backward)
    loss = "the loss" if root is None or backward.source is None else wording.short(backward.source.flat(root), 40)
    shown = loss if root is None else f"`{loss}`"
    called = backward.call is not None and is_method(backward.call) and backward.receiver == loss
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{wording.optimizer_name(book, incident)}` steps on the sum of {times} mean losses: {shown} is not divided by `{text}`",
        culprit=backward.span(f"adds the gradient of a mean over this micro-batch, unscaled, {times} times a step", "culprit"),
        related=wording.spans(step.span(f"applies the sum of {times} gradients", "context")),
        explanation=(
            f"Each of the last steps used {times} backward calls of this line, every one on a mean. Their sum is {times} times "
            "the gradient of the mean over all "
            "micro-batches: the effective learning rate grows with the number of micro-batches."
        ),
        fixes=[
            Fix(
                title=f"Divide the loss: `({loss} / {text}).backward()`" if called else f"Divide {shown} by `{text}` before its backward",
                safety="unsafe",
                patch=_divided(backward, root, text) if step.enclosing_function is backward.enclosing_function else None,
            )
        ],
        confidence="likely",
    )


def _scales(source: Source, name: str) -> bool:
    """Whether the file divides or multiplies by the number anywhere (also in the learning rate, or of gradients)."""
    for node in ast.walk(source.tree or ast.Module([], [])):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Mult)):
            inner = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
            if any(_mentions(each, name) for each in inner):
                return True
        scaling = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SCALES
        if scaling and isinstance(node, ast.Call) and any(_mentions(each, name) for each in node.args):
            return True
    return False


def _mentions(node: ast.AST, name: str) -> bool:
    return any(
        (isinstance(each, ast.Name) and each.id == name)
        or (isinstance(each, ast.Attribute) and each.attr == name)
        or (isinstance(each, ast.Constant) and str(each.value) == name)
        for each in ast.walk(node)
    )


def _divided(backward: ResolvedSite, root: ast.expr | None, count: str) -> str | None:
    """What backward is called on, divided, where it stands in the call itself."""
    source, call = backward.source, backward.call
    if source is None or call is None or root is None or not sees(backward, count) or not any(node is root for node in ast.walk(call)):
        return None
    text = applied_to(source, root, "{} / " + count)
    if text is None:
        return None
    inside = isinstance(call.func, ast.Attribute) and call.func.value is root
    return replaced(source, [(root, f"({text})" if inside else text)])


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="accumulated mean losses that are not divided by their number",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
