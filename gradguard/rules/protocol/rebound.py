"""An update by hand that only rebinds the loop's variable: `for p in params: p = p - lr * p.grad`. Part of GG611."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gradguard.diagnosis import Diagnosis, Fix
from gradguard.evidence.source import dotted
from gradguard.evidence.syntax import Source
from gradguard.fixes.edits import replaced
from gradguard.rules.incident import Incident
from gradguard.rules.protocol import tell
from gradguard.rules.protocol.places import function_around, the_one
from gradguard.rules.protocol.suspicion import Suspicion, few_values, version_of
from gradguard.tensor_refs import TensorRef

if TYPE_CHECKING:
    from gradguard.rules.protocol.ledger import Ledger

_BACKWARDS = 12  # without any optimizer, after which nothing has changed
_MOST = 256


class Unheld:
    """Parameters that get gradients in a run without any optimizer, and whether they ever change."""

    def __init__(self) -> None:
        self.first: list[tuple[weakref.ref[Any], int, list[float]]] = []
        self.began = 0
        self.over = False

    def look(self, ledger: Ledger, leaves: list[torch.Tensor]) -> None:
        """At a survey of a run in which no optimizer was made so far."""
        if self.over or not leaves:
            return
        parameters = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)][:_MOST]
        if not self.first:
            self.first = [(TensorRef(p), version_of(p), few_values(p)) for p in parameters]
            self.began = ledger.backwards
            return
        if any((p := ref()) is None or version_of(p) != version or few_values(p) != values for ref, version, values in self.first):
            self.over = True
        elif parameters and (now := ledger.backwards - self.began) >= _BACKWARDS:
            self.over = True
            ledger.found.append(Suspicion("GG611", None, {"kind": "rebound", "of": [ref for ref, *_ in self.first], "backwards": now}))


def told(incident: Incident, code: str, name: str) -> Diagnosis | None:
    """The one statement of the user's files that computes an update and binds it to the loop's variable."""
    data = incident.suspicion.data
    parameters = [p for ref in data["of"] if (p := ref()) is not None]
    place = the_one(incident, lambda sources: _rebinding(sources))
    statement, source = (None, None) if place is None else (place.statement, place.source)
    if place is None or source is None or not isinstance(statement, ast.Assign) or not parameters:
        return None
    variable = dotted(statement.targets[0])
    names = tell.parameter_names(parameters, incident.names)
    change = _changed_by(source, statement)
    how = f": `{tell.short(change, 50)}`" if change else f" `{variable}` in place, under `torch.no_grad()`"
    have = "have" if len(parameters) > 1 else "has"
    fix = Fix(
        title=f"Write into the parameter{how}",
        safety="unsafe",
        patch=replaced(source, [(statement, change)]) if change else None,
        detail="Or let `torch.optim.SGD` do it.",
    )
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{tell.short(place.text or source.flat(statement), 60)}` updates nothing: it binds `{variable}` to a new tensor, "
        "and the parameters stay as they are",
        culprit=place.statement_span(f"the new tensor is dropped: `{variable}` is bound anew in the next turn of the loop", "culprit"),
        tensors=tell.facts(parameters, incident.names),
        explanation=f"No optimizer has stepped in this run, and {tell.listed(names, len(parameters))} {have} "
        f"not been written in {data['backwards']} backward calls. An assignment to a name does not change the tensor that the "
        "name stood for.",
        fixes=[fix],
    )


def _rebinding(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    """`for p in ...: p = ... p.grad ...`, where nothing reads `p` after that."""
    for source in sources:
        for loop in ast.walk(source.tree or ast.Module([], [])):
            if not isinstance(loop, ast.For):
                continue
            bound = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
            for node in ast.walk(loop):
                if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                    name = node.targets[0].id
                    if name in bound and _reads_grad(node.value, name) and not read_later(source, loop, node, name):
                        yield source, node


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


def _changed_by(source: Source, statement: ast.Assign) -> str | None:
    """`p -= lr * p.grad` for `p = p - lr * p.grad`, where grad mode is off."""
    value, target = statement.value, statement.targets[0]
    name = dotted(target)
    blocks = [item.context_expr for above in source.ancestors(statement) if isinstance(above, ast.With) for item in above.items]
    quiet = any(isinstance(block, ast.Call) and (dotted(block.func) or "").endswith("no_grad") for block in blocks)
    if not quiet or name is None or not isinstance(value, ast.BinOp) or dotted(value.left) != name:
        return None
    sign = "-=" if isinstance(value.op, ast.Sub) else "+=" if isinstance(value.op, ast.Add) else None
    right = source.segment(value.right)
    return None if sign is None or right is None else f"{name} {sign} {right}"
