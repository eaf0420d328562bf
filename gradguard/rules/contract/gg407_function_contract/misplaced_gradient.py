"""A custom backward that returns a gradient for an input that is no tensor: at the wrong position, or one too many. Part of GG407."""

from __future__ import annotations

import ast
import re

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, classes_in_graph, find_function, needs_none, view_of
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.expressions import is_constant
from gradguard.analysis.program.provenance import Spot
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import replaced
from gradguard.rules.contract.wording import backward_called

MESSAGE = re.compile(
    r"function (\w+?)(?:Backward)? returned a gradient different than None at position (\d+), "
    r"but the corresponding forward input was not a Variable"
)


def diagnose(incident: Incident, name: str, position: int) -> Diagnosis | None:
    """Which value of the return it is, and where it belongs.

    Args:
        position: of the value, counted from 0.
    """
    named = [cls for cls in classes_in_graph(incident) if cls.__name__ == name]
    view = view_of(named[0]) if len(named) == 1 else find_function(incident, name)
    if view is None or view.backward is None:
        return None
    source = view.backward.source
    values = [value for value in returns_of(view.backward) if _filled(value, position)]
    value = values[0] if len(values) == 1 else None
    inputs = view.inputs
    shown = f"`{inputs[position]}`" if position < len(inputs) else f"input {position + 1}"
    home = _home(view, value, position)
    related: list[SourceSpan] = []
    header = view.header("forward", f"{shown} was given no tensor")
    if header is not None:
        related.append(header)
    related += backward_called(incident)
    culprit, fix, text = None, Fix(title=f"return `None` at the place of {shown}", safety="manual"), "a gradient"
    if isinstance(value, ast.Tuple):
        element = value.elts[position]
        text = f"`{source.flat(element)}`"
        culprit = Spot(view.backward, value).span(f"{text} stands at the place of {shown}", "culprit")
        if home is not None:
            changes: list[tuple[ast.AST, str]] = [(value.elts[home], source.segment(element) or ""), (element, "None")]
            title = f"return it at the place of `{inputs[home]}`, and `None` for {shown}"
            fix = Fix(title=title, safety="safe", patch=replaced(source, changes))
        else:
            title = f"return `None` for {shown}: it takes no gradient"
            fix = Fix(title=title, safety="manual", patch=replaced(source, [(element, "None")]))
    elif value is not None:
        culprit = Spot(view.backward, value).span(f"gives a gradient for {shown}", "culprit")
    return Diagnosis(
        code="GG407",
        name="function-contract",
        headline=f"The `backward` of `{view.name}` returns {text} at the place of {shown}, which was no tensor"
        + (f", and `None` at the place of `{inputs[home]}`." if home is not None else "."),
        culprit=culprit,
        related=related,
        explanation=f"Backward returns one value for each input of `{view.signature()}` (ctx not counted), in the same order, "
        "with `None` for those that are no tensors.",
        fixes=[fix],
        confidence="certain" if culprit is not None else "likely",
    )


def _filled(value: ast.expr, position: int) -> bool:
    """Whether a return may give something other than None at this position."""
    if isinstance(value, ast.Tuple) and not any(isinstance(element, ast.Starred) for element in value.elts):
        return position < len(value.elts) and not is_constant(value.elts[position], None)
    return isinstance(value, (ast.Name, ast.Call)) or position == 0


def _home(view: FunctionView, value: ast.expr | None, position: int) -> int | None:
    """Where the only gradient belongs: to the one other input that may be a tensor."""
    if not isinstance(value, ast.Tuple) or len(value.elts) != len(view.inputs):
        return None
    others = [i for i in range(len(value.elts)) if i != position]
    if not all(is_constant(value.elts[i], None) for i in others):
        return None
    able = [i for i in others if not needs_none(view, view.inputs[i])]
    return able[0] if len(able) == 1 else None
