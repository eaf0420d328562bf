"""Which of the returns of a custom backward gave the gradients that PyTorch rejects, told by what the failing node still holds.

The node's saved values are alive when its gradients are looked at, so conditions that depend on them can be decided again, and the
shape of what a return gives be compared with the shape in the error. Of the incoming gradient only the shape is known.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, count_of
from gradguard.analysis.live.tensor_expressions import UNKNOWN, Evaluator, known, of_shape, shape_only
from gradguard.analysis.program.bindings import flatten
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.scopes import Scope
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.torch_compat.private_api import held_by_hook, output_metadata, saved_data, saved_slots


@dataclass
class Returned:
    """A return that may have run.

    Attributes:
        value: the expression.
        shapes: of the gradients it gives, each None where not known.
        values: what the variables were there, as far as known.
    """

    value: ast.expr
    shapes: list[tuple[int, ...] | None]
    values: dict[Any, Any]

    def made(self, name: str) -> ast.expr | ast.stmt | None:
        """The expression (or the augmented assignment) that gave a variable its value, where one did whichever way was taken."""
        found = self.values.get(_made(name), UNKNOWN)
        return found if isinstance(found, (ast.expr, ast.stmt)) else None

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
        for item in _Run(view.backward, node).returned:
            if count_of(item.value) not in (count, None):
                continue
            if got is None or item.shape(index) in (None, tuple(got)):
                fitting.append(item)
    if not nodes:
        values = returns_of(view.backward)
        fitting = [Returned(value, [], {}) for value in values if count_of(value) in (count, None)]
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


class _Run:
    """One way through a backward's statements, as far as conditions can be decided; both ways where they cannot."""

    def __init__(self, scope: Scope, node: Any) -> None:
        self.scope = scope
        self.returned: list[Returned] = []
        function = scope.function
        assert function is not None
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        context = names[0] if names else "ctx"
        self.kept = {f"{context}.{name}": value for name, value in node.__dict__.items()}
        self.kept[f"{context}.saved_tensors"] = _saved(node)
        self.kept[f"{context}.needs_input_grad"] = tuple(source is not None for source, _ in node.next_functions)
        values: dict[Any, Any] = dict.fromkeys(names, UNKNOWN)
        shape = output_metadata(node)
        if len(names) == 2 and shape is not None:
            values[names[1]] = of_shape(shape)
        self._block(function.body, values)

    def _block(self, body: list[ast.stmt], values: dict[Any, Any]) -> bool:
        """Whether the end of the block can be reached."""
        return all(self._statement(statement, values) for statement in body)

    def _statement(self, statement: ast.stmt, values: dict[Any, Any]) -> bool:
        if isinstance(statement, ast.Return):
            self._returns(statement, values)
            return False
        if isinstance(statement, ast.Raise):
            return False
        if isinstance(statement, ast.If):
            return self._branches(statement, values)
        if isinstance(statement, ast.With):
            for item in statement.items:
                if item.optional_vars is not None:
                    self._forget(item.optional_vars, values)
            return self._block(statement.body, values)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._bind(statement.targets[0], self._value(statement.value, values), values)
            self._note(statement.targets[0], statement.value, values)
            return True
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._bind(statement.target, self._value(statement.value, values), values)
            self._note(statement.target, statement.value, values)
            return True
        self._touched(statement, values)
        if isinstance(statement, ast.AugAssign):
            self._note(statement.target, statement, values)
        for inner in ast.walk(statement):  # in a loop or a `try`: it may have run
            if isinstance(inner, ast.Return):
                self._returns(inner, values)
        return True

    def _branches(self, statement: ast.If, values: dict[Any, Any]) -> bool:
        test = self._value(statement.test, values)
        decided = _truth(test)
        if decided is not None:
            return self._block(statement.body if decided else statement.orelse, values)
        one, other = dict(values), dict(values)
        ends = [(self._block(statement.body, one), one), (self._block(statement.orelse, other), other)]
        left = [after for reached, after in ends if reached]
        values.clear()
        values.update(left[0] if left else {})
        for after in left[1:]:
            for name in {*values, *after}:
                if values.get(name, UNKNOWN) is not after.get(name, UNKNOWN):
                    values[name] = UNKNOWN
        return bool(left)

    def _value(self, node: ast.expr, values: dict[Any, Any]) -> Any:
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self._value(element, values) for element in node.elts)
        return Evaluator({**self.kept, **values}, self.scope.globals).of(node)

    def _bind(self, target: ast.expr, value: Any, values: dict[Any, Any]) -> None:
        if isinstance(target, ast.Name):
            values[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = value if isinstance(value, (tuple, list)) and len(value) == len(target.elts) else [UNKNOWN] * len(target.elts)
            for element, item in zip(target.elts, items, strict=True):
                self._bind(element, UNKNOWN if isinstance(element, ast.Starred) else item, values)
        else:  # an item: the values change, the shape stays
            self._forget(target, values)

    def _note(self, target: ast.expr, made: ast.AST, values: dict[Any, Any]) -> None:
        if isinstance(target, ast.Name):
            values[_made(target.id)] = made
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = (
                made.elts if isinstance(made, (ast.Tuple, ast.List)) and len(made.elts) == len(target.elts) else [made] * len(target.elts)
            )
            for element, part in zip(target.elts, parts, strict=True):
                self._note(element, part, values)

    def _forget(self, target: ast.expr, values: dict[Any, Any]) -> None:
        for single in flatten(target):
            name, whole = single, True
            while isinstance(name, (ast.Subscript, ast.Attribute)):
                name, whole = name.value, False
            if isinstance(name, ast.Name):
                before = values.get(name.id, UNKNOWN)
                values[name.id] = shape_only(before) if isinstance(before, torch.Tensor) and not whole else UNKNOWN
                if whole:
                    values[_made(name.id)] = UNKNOWN

    def _touched(self, statement: ast.stmt, values: dict[Any, Any]) -> None:
        """Forgets what a statement may have changed that was not followed."""
        for part in ast.walk(statement):
            if isinstance(part, (ast.Name, ast.Subscript, ast.Attribute)) and isinstance(part.ctx, ast.Store):
                self._forget(part, values)
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr.endswith("_"):
                if isinstance(part.func.value, ast.Name):
                    self._forget(ast.Subscript(part.func.value, ast.Constant(0), ast.Store()), values)
            elif isinstance(part, FUNCTIONS):
                break

    def _returns(self, statement: ast.Return, values: dict[Any, Any]) -> None:
        if statement.value is None:
            return
        found = self._value(statement.value, values)
        if not isinstance(found, tuple):
            found = () if found is UNKNOWN and count_of(statement.value) is None else (found,)
        shapes = [tuple(item.shape) if isinstance(item, torch.Tensor) else None for item in found]
        self.returned.append(Returned(statement.value, shapes, dict(values)))


def _made(name: str) -> tuple[str]:
    """Among the values: the key of what gave a variable its value."""
    return (name,)


def _truth(value: Any) -> bool | None:
    if value is UNKNOWN:
        return None
    if isinstance(value, torch.Tensor):
        return bool(value) if value.device.type != "meta" and value.numel() == 1 else None
    return bool(value) if value is None or isinstance(value, (bool, int, float, str, tuple, list)) else None


def _saved(node: Any) -> Any:
    """What `ctx.saved_tensors` is, without running a hook that holds it."""
    if held_by_hook(node, "saved_tensors"):
        return UNKNOWN
    found = []
    for _, slot in saved_slots(node):
        data = saved_data(slot)
        found.append(UNKNOWN if data is None else known(data))
    return tuple(found) if found else UNKNOWN
