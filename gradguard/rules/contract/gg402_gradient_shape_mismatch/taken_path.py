"""Which of the returns of a custom backward gave the gradients that PyTorch rejects, told by what the failing node still holds.

The node's saved values are alive when its gradients are looked at, so conditions that depend on them can be decided again, and the
shape of what a return gives be compared with the shape in the error. Of the incoming gradient only the shape is known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, count_of
from gradguard.analysis.live.local_values import LocalValues
from gradguard.analysis.live.tensor_expressions import UNKNOWN, known, of_shape
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import Definition, only, program_of
from gradguard.analysis.program.scopes import Scope
from gradguard.analysis.program.syntax import Function
from gradguard.torch_compat.private_api import held_by_hook, output_metadata, saved_data, saved_slots


@dataclass
class Returned:
    """A return that may have run.

    Attributes:
        value: the expression.
        shapes: of the gradients it gives, each None where not known.
        run: what is known of the variables; None without a graph.
    """

    value: ast.expr
    shapes: list[tuple[int, ...] | None]
    run: LocalValues | None

    def _definitions(self, name: str) -> list[Definition]:
        read = next((each for each in inside(self.value, ast.Name) if each.id == name), None)
        if self.run is None or read is not None:
            return [] if self.run is None or read is None else self.run.definitions(read)
        return [each for each in self.run.program.definitions(name, self.run.function) if self.run.can_run(each.node)]

    def made(self, name: str) -> ast.expr | ast.stmt | None:
        """The expression (or the augmented assignment) that gave a variable its value, where one did whichever way was taken."""
        definition = only(self._definitions(name))
        if definition is None or self.run is None or definition.kind not in ("assign", "augmented"):
            return None
        return definition.value if definition.kind == "assign" else self.run.program.source.statement(definition.node)

    def variable(self, name: str) -> torch.Tensor | None:
        """The tensor that a variable was, as far as known."""
        definition = only(self._definitions(name))
        found = None if definition is None or self.run is None else self.run.given_by(definition)
        return found if isinstance(found, torch.Tensor) else None

    def shape(self, index: int) -> tuple[int, ...] | None:
        return self.shapes[index] if index < len(self.shapes) else None


def returns_taken(incident: Incident, view: FunctionView, index: int, got: list[int] | None, wanted: list[int] | None) -> list[Returned]:
    """The returns that can have given a gradient of this shape at this index; one where it is known which."""
    if view.backward is None or view.backward.function is None:
        return []
    count = len(view.inputs) or None
    nodes = [node for node, _ in walk(list(incident.root_nodes), limit=20_000) if getattr(node, "_forward_cls", None) is view.cls]
    fitting: list[Returned] = []
    for node in nodes:
        if not _is_of(node, index, wanted):
            continue
        for item in _returned(view.backward, view.backward.function, node):
            if count_of(item.value) not in (count, None):
                continue
            if got is None or item.shape(index) in (None, tuple(got)):
                fitting.append(item)
    if not nodes:
        values = returns_of(view.backward)
        fitting = [Returned(value, [], None) for value in values if count_of(value) in (count, None)]
    exact = [item for item in fitting if got is not None and item.shape(index) == tuple(got)]
    best: dict[int, Returned] = {}
    for item in exact or fitting:
        best.setdefault(id(item.value), item)
    return list(best.values())


def _is_of(node: Any, index: int, wanted: list[int] | None) -> bool:
    """Whether the node can be the one that failed: its input at the index has the shape that PyTorch expects."""
    if wanted is None or index >= len(node.next_functions):
        return True
    source, number = node.next_functions[index]
    shape = output_metadata(source) if source is not None and number == 0 else None
    return shape is None or list(shape) == wanted


def _returned(scope: Scope, function: Function, node: Any) -> Iterator[Returned]:
    """The returns that can have run, with what is known of the gradients they give."""
    program = program_of(scope.source)
    names = scope.parameters()
    context = names[0] if names else "ctx"
    values = {f"{context}.{name}": value for name, value in node.__dict__.items()}
    values[f"{context}.saved_tensors"] = _saved(node)
    values[f"{context}.needs_input_grad"] = tuple(source is not None for source, _ in node.next_functions)
    shape = output_metadata(node)
    if len(names) == 2 and shape is not None:
        values[names[1]] = of_shape(shape)
    run = None if program is None else LocalValues(program, function, values, scope.globals)
    for value in program.returns(function) if program is not None and run is not None else ():
        if run is not None and run.can_run(value):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value]
            found = [run.of(part) for part in parts]
            if len(found) == 1 and isinstance(found[0], tuple):
                found = list(found[0])
            known = [] if found == [UNKNOWN] and count_of(value) is None else found
            yield Returned(value, [tuple(each.shape) if isinstance(each, torch.Tensor) else None for each in known], run)


def _saved(node: Any) -> Any:
    """What `ctx.saved_tensors` is, without running a hook that holds it."""
    if held_by_hook(node, "saved_tensors"):
        return UNKNOWN
    found = []
    for _, slot in saved_slots(node):
        data = saved_data(slot)
        found.append(UNKNOWN if data is None else known(data))
    return tuple(found) if found else UNKNOWN
