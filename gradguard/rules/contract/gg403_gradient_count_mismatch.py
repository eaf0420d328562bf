"""# GG403 gradient-count-mismatch

## What it is
A custom Function's backward returned another number of gradients than forward has inputs, or takes another number of
gradients than forward has outputs.

## Why it is wrong
PyTorch hands the returned values to forward's inputs by position, tensors or not. An input that needs no gradient (a flag, a
size) still needs a `None` in its place.

## Example
    @staticmethod
    def forward(ctx, x, training): ...

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out

## Use instead
        return grad_out, None

## Fix safety
Manual; adding `None` for an argument that is not a tensor cannot change a result.

## When it speaks, what silences it
When PyTorch counts the gradients, or when backward cannot be called with as many gradients as there are outputs.
"""

from __future__ import annotations

import ast
import re

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, classes_in_graph, def_span, find_function, needs_none
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.contract.wording import backward_called, count_word

_COUNT = re.compile(r"function (\w+?)(?:Backward)? returned an incorrect number of gradients \(expected (\d+), got (\d+)\)")
_WHY_SHORT = (
    "Here a gradient is added only where `needs_input_grad` says that it is wanted: an input that needs none (a frozen parameter, "
    "data) then leaves no place, and the values behind it move up."
)
_ARITY = re.compile(
    r"(?:[\w.<>]*\.)?(\w+)\.backward\(\) (?:takes (\d+) positional arguments? but (\d+) were given"
    r"|missing (\d+) required positional arguments?: (.+))"
)


def recognise(incident: Incident) -> Diagnosis | None:
    count = _COUNT.search(incident.message)
    if count is not None:
        view = find_function(incident, count[1])
        return None if view is None else _returned(incident, view, int(count[2]), int(count[3]))
    arity = _ARITY.search(incident.message)
    if arity is not None and isinstance(incident.error, TypeError) and incident.where in ("backward", "grad", "escape"):
        view = find_function(incident, arity[1])
        if view is not None and (view.cls in classes_in_graph(incident) or incident.where == "escape"):
            return _taken(incident, view, arity)
    return None


def _returned(incident: Incident, view: FunctionView, expected: int, got: int) -> Diagnosis:
    inputs = view.inputs
    value = view.returned(got)
    culprit = None
    patch = None
    written = isinstance(value, (ast.Tuple, ast.List))
    conditions = [] if written or view.backward is None else _conditional(view.backward)
    positions = value is not None and not conditions and _by_position(value, got)
    missing = inputs[got:expected] if got < expected and positions else []
    surplus = got - expected
    if value is not None and view.backward is not None:
        label = f"{count_word(got, 'gradient')} for {count_word(expected, 'input')}" + (
            f" ({', '.join(inputs)})" if len(inputs) == expected else ""
        )
        culprit = Spot(view.backward, value).span(label, "culprit")
        if missing and all(needs_none(view, name) for name in missing):
            patch = _padded(view, value, len(missing))
    related = [span for span in (view.header("forward", f"forward has {count_word(expected, 'input')} beside ctx"),) if span is not None]
    related += [Spot(view.backward, node).span("only where this holds", "context") for node in conditions if view.backward is not None]
    related += backward_called(incident)
    names = ", ".join(f"`{name}`" for name in missing)
    if conditions:
        title = "put a value for each input at its place, `None` where the condition does not hold: " + (
            f"start from `[None] * {expected}` and fill in by index"
        )
    elif got < expected and not positions:
        title = f"return {expected} values, one for each input of forward, in order; `None` for those that need no gradient"
    elif got < expected:
        none = all(needs_none(view, name) for name in missing) and bool(missing)
        title = f"return a value for {names or count_word(expected - got, 'more input')} too" + (
            ": `None`, as it needs no gradient" if none else "; `None` where no gradient is needed"
        )
    else:
        title = f"return {expected} instead of {count_word(got, 'value')}: one for each input of forward, in order"
    return Diagnosis(
        code="GG403",
        name="gradient-count-mismatch",
        headline=f"The `backward` of `{view.name}` returns {count_word(got, 'gradient')}, but its forward has "
        f"{count_word(expected, 'input')}" + (f": nothing is returned for {names}." if names else "."),
        culprit=culprit,
        related=related,
        explanation=f"Backward returns one value for each input of `{view.signature()}` (ctx not counted), in the same order, "
        "with `None` for those that need no gradient." + (f" {_WHY_SHORT}" if conditions and got < expected else ""),
        notes=[f"{count_word(surplus, 'surplus value')} would be accepted if it were `None`."] if surplus == 1 else [],
        fixes=[Fix(title=title, safety="safe" if patch else "manual", patch=patch)],
    )


def _by_position(value: ast.expr, got: int) -> bool:
    """Whether the source shows which value stands for which input: a written tuple, or one value alone."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return not any(isinstance(element, ast.Starred) for element in value.elts)
    collected = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("tuple", "list")
    return got == 1 and not collected


def _conditional(backward: Scope) -> list[ast.expr]:
    """The conditions on `ctx.needs_input_grad` under which backward adds to the list that it returns."""
    program = program_of(backward.source)
    returned = [] if program is None else [name for value in returns_of(backward) for name in inside(value, ast.Name)]
    grown = [growth.node for name in returned for growth in (program.grows(name.id, backward.tree) if program is not None else ())]
    tests = [condition.test for node in grown if program is not None for condition in program.conditions(node) if condition.holds]
    tests += [test for part in inside(backward.tree, ast.comprehension) for test in part.ifs]
    found = [test for test in tests if any(node.attr == "needs_input_grad" for node in inside(test, ast.Attribute))]
    return sorted(dict.fromkeys(found), key=lambda test: (test.lineno, test.col_offset))


def _padded(view: FunctionView, value: ast.expr, missing: int) -> str | None:
    if view.backward is None:
        return None
    source = view.backward.source
    text = source.segment(value)
    if text is None or (isinstance(value, ast.Tuple) and text.startswith("(")):
        if not isinstance(value, ast.Tuple) or not value.elts:
            return None
        last = value.elts[-1]
        return replaced(source, [(last, f"{source.segment(last)}{', None' * missing}")])
    return replaced(source, [(value, f"{text}{', None' * missing}")])


def _taken(incident: Incident, view: FunctionView, found: re.Match[str]) -> Diagnosis:
    """Backward's own parameters do not fit the number of forward's outputs."""
    scope = view.backward
    culprit = (
        None
        if scope is None or scope.function is None
        else def_span(scope, "takes another number of gradients than forward has outputs", "culprit")
    )
    parameters = [] if scope is None else scope.parameters()
    given = int(found[3]) - 1 if found[3] else len(parameters) - 1 - int(found[4] or 0)
    static = len(parameters) > 1 and parameters[0] == "self"
    title = f"give it a parameter for each output of forward: ctx and {count_word(given, 'gradient')}"
    if static:
        title = "make it a `@staticmethod` with `ctx` as its first parameter, without `self`"
    related = backward_called(incident)
    header = view.header("forward", "its outputs decide how many gradients backward gets")
    if header is not None:
        related.insert(0, header)
    return Diagnosis(
        code="GG403",
        name="gradient-count-mismatch",
        headline=f"The `backward` of `{view.name}` is called with {count_word(given, 'gradient')}, one for each output of "
        f"forward, but is written as `{view.signature('backward')}`.",
        culprit=culprit,
        related=related,
        explanation="PyTorch calls backward with ctx and one gradient for each tensor that forward returned, also for those that "
        "were not used further.",
        fixes=[Fix(title=title, safety="manual")],
    )


RULE = Rule(
    code="GG403",
    name="gradient-count-mismatch",
    summary="a custom backward's gradients do not match forward's inputs or outputs in number",
    recognise=recognise,
    priority=50,
    messages=("returned an incorrect number of gradients", "backward() takes", "backward() missing"),
)
