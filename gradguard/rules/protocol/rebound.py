"""An update by hand that only rebinds the loop's variable: `for p in params: p = p - lr * p.grad`. Part of GG611."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.monitors.without_optimizer import NeverUpdated
from gradguard.rules import wording
from gradguard.rules.spans import function_around, the_one


def told(incident: Incident, finding: NeverUpdated, code: str, name: str) -> Diagnosis | None:
    """The one statement of the user's files that computes an update and binds it to the loop's variable."""
    parameters = [p for ref in finding.parameters if (p := ref()) is not None]
    place = the_one(incident, lambda sources: _rebinding(sources))
    statement, source = (None, None) if place is None else (place.statement, place.source)
    found = next((each for each in dropped(source) if each.statement is statement), None) if source is not None else None
    if place is None or source is None or found is None or not parameters:
        return None
    variable = found.target or "the result"
    names = wording.parameter_names(parameters, incident.names)
    change = _changed_by(source, found)
    how = f": `{wording.short(change, 50)}`" if change else " in place, under `torch.no_grad()`"
    what = f"it binds `{variable}` to a new tensor" if found.target else "it computes a new tensor and drops it"
    label = f"the new tensor is dropped: nothing reads `{variable}`" if found.target else "the new tensor is dropped"
    if any(isinstance(node, ast.Name) and node.id == found.target for node in ast.walk(found.loop.target)):
        label = f"the new tensor is dropped: `{variable}` is bound anew in the next turn of the loop"
    have = "have" if len(parameters) > 1 else "has"
    fix = Fix(
        title=f"Write into the parameter{how}",
        safety="unsafe",
        patch=replaced(source, [(found.statement, change)]) if change else None,
        detail="Or let `torch.optim.SGD` do it.",
    )
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{wording.short(source.flat(found.statement), 60)}` updates nothing: {what}, and the parameters stay as they are",
        culprit=place.statement_span(label, "culprit"),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"No optimizer has stepped in this run, and {wording.listed(names, len(parameters))} {have} "
        f"not been written in {finding.backwards} backward calls. An assignment to a name does not change the tensor that the "
        "name stood for.",
        fixes=[fix],
    )


class Dropped(NamedTuple):
    """A statement of a loop that computes a value which nothing reads.

    Attributes:
        target: the name it is bound to; None where the value is an expression's.
    """

    source: Source
    loop: ast.For
    statement: ast.Assign | ast.AnnAssign | ast.Expr
    value: ast.expr
    target: str | None


def dropped(source: Source) -> Iterator[Dropped]:
    """Assignments to a name that nothing reads before it is bound anew, and results of operations that are not even bound."""
    for loop in ast.walk(source.tree or ast.Module([], [])):
        if not isinstance(loop, ast.For):
            continue
        bound = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        around = function_around(source, loop) or source.tree
        for node in ast.walk(loop):
            if isinstance(node, ast.Expr) and _is_out_of_place(node.value):
                yield Dropped(source, loop, node, node.value, None)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                name = targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None
                if name is not None and not (read_later(source, loop, node, name) if name in bound else _is_read(around, name)):
                    yield Dropped(source, loop, node, node.value, name)


def _is_out_of_place(value: ast.expr) -> bool:
    """Whether it is arithmetic, or a method of tensors that leaves its tensor alone and has a twin that does not."""
    method = value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else None
    return isinstance(value, ast.BinOp) or (method is not None and not method.endswith("_") and hasattr(torch.Tensor, f"{method}_"))


def _is_read(scope: ast.AST | None, name: str) -> bool:
    return scope is None or any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) for node in ast.walk(scope)
    )


def _rebinding(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    """`for p in ...: p = ... p.grad ...`, where nothing reads `p` after that; also where the new value is given a name of its own."""
    for source in sources:
        for found in dropped(source):
            if any(_reads_grad(found.value, node.id) for node in ast.walk(found.loop.target) if isinstance(node, ast.Name)):
                yield source, found.statement


def _reads_grad(value: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "grad" and dotted(node.value) == name for node in ast.walk(value))


def read_later(source: Source, loop: ast.For, statement: ast.stmt, name: str) -> bool:
    """Whether the variable is read below the statement, or anywhere in a loop inside this one that holds it."""
    around = function_around(source, loop) or source.tree
    inner = [above for above in source.ancestors(statement) if isinstance(above, (ast.For, ast.While))]
    if inner and inner[0] is not loop:
        return True
    for node in ast.walk(around) if around is not None else ():
        read = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        below = isinstance(node, ast.Name) and node.lineno > (statement.end_lineno or statement.lineno)
        if read and below and not _rebound_by(source, node, name, loop):
            return True
    return False


def _rebound_by(source: Source, use: ast.AST, name: str, loop: ast.For) -> bool:
    """Whether a use stands in another loop or comprehension that binds the name itself."""
    for above in source.ancestors(use):
        if above is loop:
            return False
        targets: list[ast.AST] = []
        if isinstance(above, (ast.For, ast.AsyncFor)):
            targets = [above.target]
        elif isinstance(above, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            targets = [generator.target for generator in above.generators]
        if any(isinstance(node, ast.Name) and node.id == name for t in targets for node in ast.walk(t)):
            return True
    return False


def _changed_by(source: Source, found: Dropped) -> str | None:
    """`p -= lr * p.grad` for `p = p - lr * p.grad`, where grad mode is off."""
    value, bound = found.value, {node.id for node in ast.walk(found.loop.target) if isinstance(node, ast.Name)}
    blocks = [item.context_expr for above in source.ancestors(found.statement) if isinstance(above, ast.With) for item in above.items]
    quiet = any(isinstance(block, ast.Call) and (dotted(block.func) or "").endswith("no_grad") for block in blocks)
    name = dotted(value.left) if isinstance(value, ast.BinOp) else None
    if not quiet or not isinstance(value, ast.BinOp) or name not in bound:
        return None
    sign = "-=" if isinstance(value.op, ast.Sub) else "+=" if isinstance(value.op, ast.Add) else None
    right = source.segment(value.right)
    return None if sign is None or right is None else f"{name} {sign} {right}"
