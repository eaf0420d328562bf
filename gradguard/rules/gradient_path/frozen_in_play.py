"""An optimizer is about to step, and everything it holds is frozen: switched off for another's turn, and never switched on again."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gradguard.analysis.history.follower import Follower
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.sites import bare, in_words, short, site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.blocks import class_around, function_around
from gradguard.analysis.program.expressions import calls_inside, inside, is_constant
from gradguard.analysis.program.index import programs_of
from gradguard.analysis.program.reaching import arguments_of
from gradguard.analysis.program.search_scopes import Scope, evaluate
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import UNKNOWN, pairs, parameters_in, peek
from gradguard.rules import lightning_manual
from gradguard.rules.gradient_path import freezing_places, lost_path
from gradguard.rules.gradient_path.in_play import AllFrozen

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Off(NamedTuple):
    """Where the parameters were switched off, and the statement that switches them on again (None: not known how that is written)."""

    place: ResolvedSite
    again: str | None
    both_ways: bool = False  # the place is a helper's, which switches on and off as its caller says: the caller's line is not known


def diagnosis(incident: Incident, lost: lost_path.LostPath, play: AllFrozen) -> Diagnosis:
    """The diagnosis; the culprit is the line that froze them, where one line is known to be it."""
    root = lost.root_name
    names = [incident.names.module_path(module) or type(module).__name__ for module in play.modules]
    listed, count = short_list(names, 3), len(play.parameters)
    off, certain = switched_off(incident, play)
    what = f"all {count} parameters" if count > 1 else "the only parameter"
    headline = (
        f"{in_words(root)} has no gradient path: {what} of `{play.optimizer}`, which trains {listed}, {'are' if count > 1 else 'is'} frozen"
    )
    again = (off.again if off is not None else None) or f"{names[0]}.requires_grad_(True)"
    thaws = [] if off is None else _thaws(off.place)
    fixes = [Fix(title=f"Switch it on again before {in_words(root)} is computed: `{again}`", safety="unsafe")]
    if len(thaws) == 1:
        where = f" in `{thaws[0].function}`" if thaws[0].function != "<module>" else ""
        reach = f"Let `{short(thaws[0].text, 40)}`{where} reach what is to be trained before {in_words(root)} is computed"
        fixes.insert(0, Fix(title=reach, safety="manual", detail="Nothing that the optimizer holds is switched on at this moment."))
    states = [(incident.names.state(parameter), parameter) for parameter in play.parameters[:4]]
    notes = lost_path.second_problem(lost.root, root, incident)
    blamed = None if off is None or off.both_ways else off.place
    switch = off.place if off is not None and off.both_ways else None
    if off is None:
        notes.append("The line that froze them was not seen.")
    return Diagnosis(
        code="GG303",
        name="all-frozen",
        headline=headline,
        culprit=None
        if blamed is None
        else blamed.span(f"freezes {listed}, which is still frozen when {in_words(root)} is computed", "culprit"),
        related=[
            *([] if switch is None else [switch.span(f"freezes {listed}, or not, as it is told: which call did was not seen", "context")]),
            *(each.span("is to switch it on, and has not for any of these", "context") for each in thaws[:2]),
            *([] if incident.place is None else [incident.place.span(f"{in_words(root)} has no graph to follow", "backward")]),
        ],
        tensors=[
            lost_path.facts(state.full if state is not None else incident.names.of(parameter), parameter).model_copy(
                update={"kind": "parameter"}
            )
            for state, parameter in states
        ],
        explanation=f"PyTorch records a graph only where an input requires grad. {listed} takes part in {in_words(root)}, but none of its "
        "parameters requires grad at this moment."
        + (" What else is cut off on the way is not to blame: these parameters come in behind it." if play.detached else ""),
        fixes=fixes,
        avoid=[
            f"`{bare(root)}.requires_grad_(True)` is no cure. It silences the error: {in_words(root)} becomes a leaf of its own and no "
            "parameter learns anything."
        ],
        notes=notes,
        confidence="certain" if certain and incident.traced else "likely",
    )


def switched_off(incident: Incident, play: AllFrozen) -> tuple[Off | None, bool]:
    """The one place, and whether it was seen happening: Lightning's toggle, the recorded switch, or the only one in the source."""
    toggle = lightning_manual.toggled_off(incident, play.parameters)
    if toggle is not None:
        return Off(toggle, _untoggled(toggle.call)), True
    scopes = [scope for level in range(8) if (scope := Follower(incident).live(level)) is not None]
    recorded = freezing_places.recorded(incident, play.parameters)
    if recorded:
        if len(recorded) > 1 or recorded[0].reached < len(play.parameters):
            return None, False
        place = recorded[0].place
        sources = [place.source] if place.source is not None else []
        own = [off for off in _candidates(sources + incident.sources, scopes, play) if off.inner is place.statement]
        places = {(off.place.file, off.place.line, off.place.column): off for off in own}
        if len(places) == 1:
            return Off(own[0].place, own[0].again), True
        return Off(place, None, _told_which(place)), True
    candidates = [*_candidates(incident.sources, scopes, play), *(each for scope in scopes for each in _toggles(scope, play))]
    found = {(off.place.file, off.place.line, off.place.column): off for off in candidates}
    return next((Off(off.place, off.again) for off in found.values() if len(found) == 1), None), False


def _told_which(place: ResolvedSite) -> bool:
    """Whether the switch goes the way that its function's argument says."""
    around = place.enclosing_function
    if place.source is None or not isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    given = [each.arg for each in arguments_of(around)]
    return any(
        isinstance(flag, ast.Name) and flag.id in given
        for node, _, flag in freezing_places.switches(place.source)
        if place.source.statement(node) is place.statement
    )


def _thaws(off: ResolvedSite) -> list[ResolvedSite]:
    """The statements of the class that froze the parameters which switch requires_grad on."""
    source = off.source
    if source is None or off.node is None:
        return []
    cls = class_around(source, off.node)
    thawing = [node for node, _, flag in freezing_places.switches(source) if is_constant(flag, True)]
    return [site_at(source, node) for node in thawing if cls is not None and class_around(source, node) is cls]


class _Candidate(NamedTuple):
    place: ResolvedSite
    again: str | None
    inner: ast.stmt | None  # the statement that does it


def _candidates(sources: Sequence[Source], scopes: Sequence[Scope], play: AllFrozen) -> Iterator[_Candidate]:
    """Every place of the source that switches requires_grad off for a module of the optimizer's: the statement, or a helper's call."""
    for source in {source.filename: source for source in sources}.values():
        for node, subject, flag in freezing_places.switches(source):
            around = function_around(source, node)
            given = [each.arg for each in arguments_of(around)] if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
            inner = source.statement(node)
            subject = _looped_over(source, node, subject, given)
            if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)) and subject in given:
                flag_name = flag.id if isinstance(flag, ast.Name) and flag.id in given else None
                if flag_name is None and not is_constant(flag, False):
                    continue
                for caller in programs_of({each.filename: each for each in sources}.values()):
                    for call in caller.calls(around.name):
                        bound = caller.bind(call, around)
                        owner, value = bound.get(subject), bound.get(flag_name) if flag_name is not None else None
                        told = flag_name is None or (isinstance(value, ast.expr) and is_constant(value, False))
                        if told and isinstance(owner, ast.expr) and _is_trained(owner, scopes, play):
                            again = _turned(caller.source, call, value) if isinstance(value, ast.expr) else None
                            yield _Candidate(site_at(caller.source, call), again, inner)
            elif is_constant(flag, False) and subject is not None and _is_trained(ast.parse(subject, mode="eval").body, scopes, play):
                yield _Candidate(site_at(source, node), f"{subject}.requires_grad_(True)", inner)


def _toggles(scope: Scope, play: AllFrozen) -> Iterator[_Candidate]:
    """Lightning's toggles of other optimizers in a function, while one is on."""
    for node in calls_inside(scope.function, "toggle_optimizer"):
        if isinstance(node.func, ast.Attribute) and node.args:
            module, other = evaluate(node.func.value, scope), evaluate(node.args[0], scope)
            held = [] if other is UNKNOWN else parameters_of(other)
            toggled = lightning_manual.is_module(module) and bool(pairs(peek(module, "_param_requires_grad_state")))
            if toggled and held and not any(_same(parameter, play.parameters) for parameter in held):
                yield _Candidate(site_at(scope.source, node), _untoggled(node), scope.source.statement(node))


def _untoggled(toggle: ast.Call | None) -> str | None:
    """The call that takes a toggle back."""
    if toggle is None or not isinstance(toggle.func, ast.Attribute):
        return None
    other = dotted(toggle.args[0]) if toggle.args else None
    return f"{dotted(toggle.func.value) or 'self'}.untoggle_optimizer({other or '...'})"


def _looped_over(source: Source, node: ast.AST, subject: str | None, given: list[str]) -> str | None:
    """Of `for net in nets: for p in net.parameters(): ...`, the function's argument `nets`; also of `nets if ... else [nets]`."""
    for above in source.ancestors(node):
        if subject in given or isinstance(above, FUNCTIONS):
            break
        if isinstance(above, ast.For) and dotted(above.target) == subject:
            named = {item.id for item in inside(above.iter, ast.Name)} & set(given)
            if len(named) == 1:
                return named.pop()
    return subject


def _turned(source: Source, call: ast.Call, flag: ast.expr) -> str | None:
    """The call with the flag the other way round."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not any(item is flag for item in given):
        return None
    texts = ["True" if item is flag else source.flat(item) for item in call.args]
    texts += [f"{word.arg}={'True' if word.value is flag else source.flat(word.value)}" for word in call.keywords]
    return f"{short(source.flat(call.func), 40)}({', '.join(texts)})"


def _is_trained(owner: ast.expr, scopes: Sequence[Scope], play: AllFrozen) -> bool:
    """Whether this expression is a module of the optimizer's, or one around it, or its parameters, in the frames around the failure."""
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "parameters":
        owner = owner.func.value
    if isinstance(owner, (ast.List, ast.Tuple)):
        return any(_is_trained(element, scopes, play) for element in owner.elts)
    for scope in scopes:
        value: Any = evaluate(owner, scope)
        if value is not UNKNOWN:
            held = list(parameters_in(value)) if isinstance(value, nn.Module) else parameters_of(value)
            return any(_same(parameter, play.parameters) for parameter in held)
    return False


def _same(parameter: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(parameter is other for other in others)
