"""What a program hands to an optimizer: the expression, the variable's one definition, and the modules that it names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch import nn

from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import Definition, Program
from gradguard.core.safe_read import peek


class Given:
    """The parameters of an optimizer's call, as written.

    Args:
        program: the file of the call.
        view: the frame that makes the call.
        argument: what is given.

    Attributes:
        name: the variable that is given, None for any other expression.
        definition: the only one that reaches the call.
        expression: what it is made of: the variable's value, else the argument.
    """

    def __init__(self, program: Program, view: FrameView, argument: ast.expr) -> None:
        self.program = program
        self.view = view
        self.argument = argument
        self.name = argument.id if isinstance(argument, ast.Name) else None
        found = program.reaching(argument) if self.name is not None else ()
        self.definition: Definition | None = next(iter(found)) if len(found) == 1 else None
        self.expression = argument if self.definition is None or self.definition.value is None else self.definition.value

    @property
    def value(self) -> Any:
        """The variable's."""
        return None if self.name is None else self.view.locals.get(self.name)

    @property
    def is_filtered(self) -> bool:
        """Whether some are picked out: by a comprehension, or a function given to `filter`."""
        return next(inside(self.expression, ast.comprehension, ast.Lambda), None) is not None

    def read_before(self) -> ast.expr | None:
        """The first other place that reads the variable."""
        uses = [] if self.definition is None else self.program.uses(self.definition)
        before = [use for use in uses if use is not self.argument and use.lineno <= self.argument.lineno]
        return min(before, key=lambda use: (use.lineno, use.col_offset), default=None)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that the expression names, with how it names them."""
        for node in inside(self.expression, ast.Attribute, ast.Name):
            parts: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if not isinstance(inner, ast.Name):
                continue
            value: Any = self.view.locals.get(inner.id, self.view.globals.get(inner.id))
            for part in reversed(parts):
                value = peek(value, part, None)
            if isinstance(value, nn.Module):
                yield ".".join([inner.id, *reversed(parts)]), value


def given_to(place: ResolvedSite, view: FrameView, program: Program) -> Given | None:
    """What a call gives an optimizer as parameters."""
    if place.call is None:
        return None
    named = next((word.value for word in place.call.keywords if word.arg in ("params", "param_group")), None)
    argument = named or next((arg for arg in place.call.args if not isinstance(arg, ast.Starred)), None)
    return None if argument is None else Given(program, view, argument)
