"""What the variables of one function are where they are read, computed again from what the function was given."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch

from gradguard.analysis.live.tensor_expressions import UNKNOWN, Evaluator, shape_only
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.index import Definition, Program
from gradguard.analysis.program.memory import memory_writes, peel, statements_of
from gradguard.analysis.program.syntax import Function


class LocalValues(Evaluator):
    """Computes expressions of a function as they stand in it.

    A variable is what the definitions give it that can have run: those whose conditions do not come out the other way. Where they give
    different values, or one stands in a loop, it is not known; of what is written into in place, only the shape is.

    Args:
        values: what the parameters are; attributes that are known by their dotted names, too.
        outer: what names mean that are no variables of the function.
    """

    def __init__(self, program: Program, function: Function, values: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        super().__init__(values, outer)
        self.program = program
        self.function = function
        self._found: dict[Definition, Any] = {}
        self._runs: dict[ast.AST, bool | None] = {}
        writes = [write for each in statements_of(function) for write in memory_writes(program.source, each)]
        self._written = {dotted(peel(each.written)[0]) for each in writes if not isinstance(each.written, ast.Name)} | {
            dotted(each.written) for each in writes if isinstance(each.node, ast.Call)
        }

    def can_run(self, node: ast.AST) -> bool:
        """Whether a node can have run: no condition that it stands under is known to have come out the other way."""
        return self._has_run(node) is not False

    def _has_run(self, node: ast.AST) -> bool | None:
        if node not in self._runs:
            self._runs[node] = None  # while its conditions are looked at, which may depend on it
            tests = [(each.holds, _truth(self.of(each.test))) for each in self.program.conditions(node)]
            ran = all(came is wanted for wanted, came in tests)
            self._runs[node] = True if ran else None if all(came in (None, wanted) for wanted, came in tests) else False
        return self._runs[node]

    def definitions(self, read: ast.expr) -> list[Definition]:
        """The definitions that can have given a variable of the function its value: none before one that has run for certain."""
        found = [each for each in self.program.reaching(read) if each.kind == "parameter" or self.can_run(each.node)]
        found.sort(key=lambda each: (each.line, getattr(each.node, "col_offset", 0)))
        ran = [i for i, each in enumerate(found) if self._has_run(each.node) and not self._is_skippable(each.node)]
        return found[ran[-1] :] if ran else found

    def _is_skippable(self, node: ast.AST) -> bool:
        """Whether a node may be passed over in spite of its conditions: a loop has no turn, an exception comes before it."""
        above = self.program.source.ancestors(node)
        return bool(self.program.loops(node)) or any(isinstance(each, ast.Try) for each in above)

    def given_by(self, definition: Definition) -> Any:
        """The value that a definition gives."""
        if definition not in self._found:
            self._found[definition] = UNKNOWN  # while it is computed, which may need what the definition gave before
            self._found[definition] = self._given(definition)
        return self._found[definition]

    def _given(self, definition: Definition) -> Any:
        node, value = definition.node, definition.value
        if definition.kind == "parameter":
            return self.values.get(definition.name, UNKNOWN)
        if definition.kind not in ("assign", "augmented") or value is None or self.program.loops(node):
            return UNKNOWN
        statement = self.program.source.statement(node)
        if isinstance(statement, ast.AugAssign) and isinstance(node, ast.Name):
            return self.of(ast.BinOp(node, statement.op, value))
        found = tuple(map(self.of, value.elts)) if isinstance(value, (ast.Tuple, ast.List)) else self.of(value)
        for place in definition.path:
            inside = isinstance(found, (tuple, list)) and place is not None and place < len(found)
            found = found[place] if inside and place is not None else UNKNOWN
        return found

    def _computed(self, node: ast.expr) -> Any:
        reached = self.definitions(node) if isinstance(node, ast.Name) else []
        if not reached or any(each.scope is not self.function for each in reached):
            return super()._computed(node)
        found = [self.given_by(each) for each in reached]
        value = found[0] if all(each is found[0] for each in found) else UNKNOWN
        return shape_only(value) if isinstance(value, torch.Tensor) and dotted(node) in self._written else value


def _truth(value: Any) -> bool | None:
    if value is UNKNOWN:
        return None
    if isinstance(value, torch.Tensor):
        return bool(value) if value.device.type != "meta" and value.numel() == 1 else None
    return bool(value) if value is None or isinstance(value, (bool, int, float, str, tuple, list)) else None
