"""A freeze by parameters' names that no name satisfies: `if name.startswith("backbone")`, where it is `net.backbone`. Part of GG613."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.interpreter import UnknownError
from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import named_parameters
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.protocol.gg613_unintended_training.known_values import KnownValues
from gradguard.rules.spans import function_around, statement_span, written_in

_MOST_NAMES = 4_000
_NOBODYS = "\x00"  # a name that has no word of any condition in it


def freezes_nothing(incident: Incident, book: Book, moved: set[int], code: str, name: str) -> Diagnosis | None:
    """A loop over named parameters whose condition freezes none of them, while those whose names have its words are trained."""
    sources = written_in(incident, lambda text: ".named_parameters(" in text and "requires_grad" in text)
    loops = [(source, loop) for source in sources for loop in _loops(source)]
    if not loops:
        return None
    known = KnownValues(incident, sources)
    for source, loop in loops:
        try:
            found = _meant(known, source, loop, moved)
        except UnknownError:
            continue
        if found:
            return _told(incident, book, source, loop, found, code, name)
    return None


def _loops(source: Source) -> Iterator[ast.For]:
    """`for name, parameter in <module>.named_parameters():` with a freeze under a condition, and no other."""
    for loop in ast.walk(source.tree or ast.Module([], [])):
        if (
            isinstance(loop, ast.For)
            and isinstance(loop.iter, ast.Call)
            and isinstance(loop.iter.func, ast.Attribute)
            and loop.iter.func.attr == "named_parameters"
            and not loop.iter.args
            and isinstance(loop.target, ast.Tuple)
            and len(loop.target.elts) == 2
            and all(isinstance(each, ast.Name) for each in loop.target.elts)
            and _condition(source, loop) is not None
        ):
            yield loop


def _freezes(statement: ast.stmt, parameter: ast.expr) -> bool:
    """`<parameter>.requires_grad = False` or `<parameter>.requires_grad_(False)`."""
    name = dotted(parameter)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant) and statement.value.value is False:
        return any(dotted(target) == f"{name}.requires_grad" for target in statement.targets)
    call = statement.value if isinstance(statement, ast.Expr) else None
    off = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return isinstance(call, ast.Call) and dotted(call.func) == f"{name}.requires_grad_" and getattr(off, "value", None) is False


def _test(source: Source, statement: ast.stmt, loop: ast.For) -> ast.If | None:
    """The one condition between the loop and the freeze."""
    between = []
    for above in source.ancestors(statement):
        if above is loop:
            break
        between.append(above)
    one = between[0] if len(between) == 1 else None
    return one if isinstance(one, ast.If) and statement in one.body else None


def _flag(statement: ast.stmt, parameter: ast.expr) -> ast.expr | None:
    """What `<parameter>.requires_grad = ...` or `<parameter>.requires_grad_(...)` sets, where that is not a constant."""
    name = dotted(parameter)
    value: ast.expr | None = None
    if isinstance(statement, ast.Assign) and any(dotted(target) == f"{name}.requires_grad" for target in statement.targets):
        value = statement.value
    elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        given = [*call.args, *(word.value for word in call.keywords)]
        value = given[0] if dotted(call.func) == f"{name}.requires_grad_" and len(given) == 1 else None
    return None if isinstance(value, ast.Constant) else value


def _condition(source: Source, loop: ast.For) -> tuple[ast.expr, bool] | None:
    """What decides whether the loop freezes a parameter, and the truth with which it does; None where that is not one expression."""
    assert isinstance(loop.target, ast.Tuple)
    parameter = loop.target.elts[1]
    freezing = [node for node in ast.walk(loop) if isinstance(node, ast.stmt) and _freezes(node, parameter)]
    setting = [(node, value) for node in ast.walk(loop) if isinstance(node, ast.stmt) and (value := _flag(node, parameter)) is not None]
    if len(freezing) == 1 and not setting:
        gate = _test(source, freezing[0], loop)
        return None if gate is None else (gate.test, True)
    if len(setting) == 1 and not freezing and setting[0][0] in loop.body:
        return setting[0][1], False
    return None


def _meant(known: KnownValues, source: Source, loop: ast.For, moved: set[int]) -> list[tuple[torch.Tensor, str, str]]:
    """The trained parameters that the loop was to freeze, with their names and those for which its condition would hold.

    That is a name from some module inside on: `backbone.0.weight` where it is `net.backbone.0.weight`.

    Raises:
        UnknownError: what it compares with, whose parameters they are, or whether it has run at all, is not known.
    """
    decided = _condition(source, loop)
    assert decided is not None
    test, sense = decided
    assert isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Attribute)
    name, parameter_name = (each.id for each in loop.target.elts if isinstance(each, ast.Name))
    if any(isinstance(n, ast.Name) and n.id == parameter_name for n in ast.walk(test)):
        return []
    _has_run(known, source, loop)
    scope = known.scope(source, test, {name, parameter_name})
    module = known.value(source, loop.iter.func.value)
    named = list(named_parameters(module))[:_MOST_NAMES] if isinstance(module, nn.Module) else []
    if any(known.truth(source, test, {**scope, name: full}) is sense for full, _ in named):
        return []
    if known.truth(source, test, {**scope, name: _NOBODYS}) is sense:
        return []  # the words are those of what is to be trained, and that is all of them
    meant: list[tuple[torch.Tensor, str, str]] = []
    for full, parameter in named:
        shorter = [full.split(".", i)[-1] for i in range(1, full.count("."))]
        found = next((each for each in shorter if known.truth(source, test, {**scope, name: each}) is sense), None)
        if found is not None:
            meant.append((parameter, full, found))
    return meant if all(id(p) in moved and p.requires_grad for p, _, _ in meant) else []


def _has_run(known: KnownValues, source: Source, loop: ast.For) -> None:
    """Whether nothing stands in its way: conditions around it and around the calls that lead to it, ways out before them.

    Raises:
        UnknownError: something does, or may.
    """
    where: Source = source
    place: ast.stmt | ast.expr = loop
    for _ in range(4):
        child: ast.AST = place
        for above in where.ancestors(place):
            if isinstance(above, ast.If) and child is not above.test and not _taken(known, where, above, child):
                raise UnknownError
            if isinstance(above, (ast.ExceptHandler, ast.While, ast.Lambda)):
                raise UnknownError
            if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
                break
            child = above
        function = function_around(where, place)
        if function is None:
            return
        for out in ast.walk(function):
            gate = (
                next((above for above in where.ancestors(out) if isinstance(above, ast.If)), None) if isinstance(out, ast.Return) else None
            )
            if isinstance(out, ast.Return) and out.lineno < place.lineno and (gate is None or _taken(known, where, gate, out)):
                raise UnknownError
        calls = known.calls(where, function)
        if len(calls) != 1:
            raise UnknownError
        where, place = calls[0]
    raise UnknownError


def _taken(known: KnownValues, source: Source, gate: ast.If, inside: ast.AST) -> bool:
    """Whether a condition leads to the branch that something stands in."""
    chosen = gate.body if known.truth(source, gate.test) else gate.orelse
    return any(inside is each or any(inside is node for node in ast.walk(each)) for each in chosen)


def _told(
    incident: Incident, book: Book, source: Source, loop: ast.For, meant: list[tuple[torch.Tensor, str, str]], code: str, name: str
) -> Diagnosis:
    decided = _condition(source, loop)
    assert decided is not None
    condition, sense = decided
    found = [parameter for parameter, _, _ in meant]
    _, is_called, expected = meant[0]
    function = getattr(function_around(source, loop), "name", None)
    shown = wording.listed(wording.parameter_names(found, incident.names), len(found))
    are, them = ("are", "them") if len(found) > 1 else ("is", "it")
    optimizer = wording.optimizer_name(book, incident)
    test, over = wording.short(source.segment(condition)), wording.short(source.segment(loop.iter))
    where = f"`{function}()`" if function is not None else "the loop over names"
    beginning = is_called.removesuffix(expected)
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"{shown} {are} trained: {where} was to freeze {them}, and "
        + (f"no name satisfies `{test}`" if sense else f"`{test}` is true for every name"),
        culprit=statement_span(source, condition, f"is {str(sense).lower()} for none of the parameters' names"),
        related=wording.spans(wording.span(book.step_site, f"`{optimizer}` changes {them} here", "context")),
        tensors=wording.facts(found, incident.names),
        explanation=f"It would be {str(sense).lower()} for `{expected}`, and `{over}` gives `{is_called}`. All of them still require "
        f"grad, and each of the {book.steps} steps of `{optimizer}` changed {them}.",
        fixes=[
            Fix(
                title=f"Compare with names as `{over}` gives them: here they begin with `{beginning}`",
                safety="unsafe",
                detail="Or freeze the module itself: `module.requires_grad_(False)`, which needs no names and fails where there is none.",
            )
        ],
    )
