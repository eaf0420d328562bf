"""A custom Function's methods that are not what autograd calls: wrong return types, no static methods, wrongly saved or marked values."""

from __future__ import annotations

import ast
import re

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, classes_in_graph, def_span, user_functions, view_of
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.analysis.program.index import Program, program_of
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import frame_scopes
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.contract.wording import backward_called


def wrong_type(incident: Incident, kind: str) -> Diagnosis | None:
    """backward returned an array, a number, a list: which Function, by what its returns look like."""
    candidates = [view_of(cls) for cls in classes_in_graph(incident)]
    if not candidates:
        candidates = [view_of(cls) for cls in user_functions()]
    best: tuple[FunctionView, ast.expr | None] | None = None
    for view in candidates:
        value = _value_of_type(view, kind)
        if value is not None:
            best = (view, value)
            break
    if best is None:
        if len(candidates) != 1:
            return None
        best = (candidates[0], candidates[0].returned())
    view, value = best
    culprit = None
    if value is not None and view.backward is not None:
        culprit = Spot(view.backward, value).span(f"a `{kind}`, where a tensor or None is expected", "culprit")
    header = view.header("backward", f"backward of `{view.name}`")
    related = [*([header] if header is not None else []), *backward_called(incident)]
    cure = "torch.from_numpy(...)" if "ndarray" in kind else "a tuple" if kind == "list" else "a tensor"
    return Diagnosis(
        code="GG407",
        name="function-contract",
        headline=f"The `backward` of `{view.name}` returns a `{kind}` where PyTorch wants a tensor or None.",
        culprit=culprit,
        related=related,
        explanation="Backward returns a tensor (or None) for each input of forward: a single one or a tuple of them, nothing else.",
        fixes=[
            Fix(
                title=f"return {cure} instead",
                detail="With `torch.from_numpy` or `torch.as_tensor`, mind the dtype and the device of the incoming gradient.",
            )
        ],
        confidence="certain" if len(candidates) == 1 else "likely",
    )


def _value_of_type(view: FunctionView, kind: str) -> ast.expr | None:
    scope = view.backward
    program = None if scope is None else program_of(scope.source)
    if scope is None or program is None:
        return None
    for value in returns_of(scope):
        for element in value.elts if isinstance(value, ast.Tuple) else [value]:
            made = [each for each in program.values(element) if isinstance(each, ast.expr)]
            if any(_is_of_type(program, each, kind) for each in made):
                return element
    return None


def _is_of_type(program: Program, made: ast.expr, kind: str) -> bool:
    """Whether an expression evidently makes a value of a type."""
    text = ast.unparse(made)
    if kind == "list":
        return isinstance(made, (ast.List, ast.ListComp))
    if "ndarray" in kind:
        read = [value for name in inside(made, ast.Name) for value in program.values(name)]
        return "from_numpy" not in text and any(map(_is_numpy, [made, *read]))
    return kind in ("float", "int", "bool") and (isinstance(made, ast.Constant) or ".item()" in text or text.startswith(("float(", "int(")))


def _is_numpy(made: object) -> bool:
    text = ast.unparse(made) if isinstance(made, ast.expr) else ""
    return "from_numpy" not in text and (".numpy()" in text or re.search(r"\b(np|numpy)\.", text) is not None)


def not_static(incident: Incident) -> Diagnosis | None:
    place = incident.place
    scopes = frame_scopes(incident.frames)
    if place is None or place.call is None or not scopes:
        return None
    owner = place.call.func
    cls = scopes[0].evaluate(owner.func) if isinstance(owner, ast.Call) else scopes[0].evaluate(owner)
    kind = cls if isinstance(cls, type) else type(cls)
    if not (isinstance(kind, type) and issubclass(kind, torch.autograd.Function)):
        return None
    view = view_of(kind)
    static = isinstance(vars(kind).get("forward"), staticmethod)
    if static:
        return Diagnosis(
            code="GG407",
            name="function-contract",
            headline=f"`{view.name}` is called like an object; a custom Function is used through `{view.name}.apply(...)`.",
            culprit=place.span("an instance is made and called", "culprit"),
            related=[],
            explanation="Functions have no instances: `apply` runs forward with a ctx and puts backward into the graph.",
            fixes=[Fix(title=f"call `{view.name}.apply({', '.join(place.arguments)})`", safety="safe")],
        )
    culprit = (
        None
        if view.forward is None or view.forward.function is None
        else def_span(view.forward, "an instance method: the old style of Functions", "culprit")
    )
    return Diagnosis(
        code="GG407",
        name="function-contract",
        headline=f"`{view.name}` is written in the old style: its forward is not a static method.",
        culprit=culprit,
        related=[place.span("called here", "context")],
        explanation="Forward and backward are static methods with ctx as their first parameter; `apply` runs them.",
        fixes=[Fix(title=f"make both methods `@staticmethod` with `ctx` in place of `self`, and call `{view.name}.apply(...)`")],
    )


def _applied(incident: Incident) -> FunctionView | None:
    """The Function whose `apply` the user's innermost line is."""
    place = incident.place
    scopes = frame_scopes(incident.frames)
    if place is None or place.call is None or not scopes or not isinstance(place.call.func, ast.Attribute):
        return None
    cls = scopes[0].evaluate(place.call.func.value)
    return view_of(cls) if isinstance(cls, type) and issubclass(cls, torch.autograd.Function) else None


def saved_no_tensor(incident: Incident) -> Diagnosis | None:
    view = _applied(incident)
    found = re.search(r"argument (\d+) is of type ([\w.]+)", incident.message)
    if view is None or found is None or incident.place is None:
        return None
    index, kind = int(found[1]), found[2]
    related = [incident.place.span(f"`{view.name}` is used here", "context")]
    culprit = None
    text = f"argument {index}"
    for scope in filter(None, (view.setup, view.forward)):
        given = next((call.args[index] for call in calls_inside(scope.tree, "save_for_backward") if index < len(call.args)), None)
        if given is not None:
            text = scope.source.flat(given)
            culprit = Spot(scope, given).span(f"a `{kind}`: only tensors can be saved", "culprit")
            break
    return Diagnosis(
        code="GG407",
        name="function-contract",
        culprit=culprit,
        related=related,
        headline=f"`save_for_backward` is given `{text}`, a `{kind}`, in `{view.name}`: it takes tensors only.",
        explanation="`save_for_backward` lets autograd check versions and free memory, which only tensors need. Numbers, shapes "
        "and flags are "
        "plain attributes of ctx.",
        fixes=[Fix(title=f"keep it as an attribute: `ctx.{text if text.isidentifier() else 'value'} = {text}`", safety="safe")],
    )


def dirty(incident: Incident) -> Diagnosis | None:
    view = _applied(incident)
    place = incident.place
    marked = None if view is None or view.forward is None else next(calls_inside(view.forward.tree, "mark_dirty"), None)
    if view is None or view.forward is None or place is None or marked is None:
        return None
    names = ", ".join(f"`{view.forward.source.flat(each)}`" for each in marked.args)
    return Diagnosis(
        code="GG407",
        name="function-contract",
        headline=f"`{view.name}` marks {names} as changed in place, but its forward does not return it.",
        culprit=Spot(view.forward, marked).span("marked as changed in place", "culprit"),
        related=[
            *(Spot(view.forward, value).span("not among the outputs", "context") for value in returns_of(view.forward)[:1]),
            place.span("called here", "context"),
        ],
        explanation="An input that is changed in place becomes an output of the Function: its new value has the Function as its history.",
        fixes=[Fix(title=f"return {names} from forward as well"), Fix(title="work on a copy and drop mark_dirty", safety="safe")],
    )
