"""# GG412 vmap-randomness

## What it is
A random operation (dropout, `torch.rand`, noise) runs under `torch.func.vmap`, which was not told what the examples are to share.

## Why it is wrong
`vmap` runs its function once for all examples. Whether each of them gets a random draw of its own, or all of them the same one, is not
to be guessed, so that the default `randomness="error"` refuses.

## Example
    per_sample = vmap(grad(loss_of_one), in_dims=(None, 0, 0))     # the model has dropout
    grads = per_sample(params, x, y)

## Use instead
    per_sample = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")

## Fix safety
Unsafe: each example has a draw of its own, as in a loop over examples.

## When it speaks, what silences it
When PyTorch refuses the operation. The culprit is the call of `vmap` (or `jacfwd`).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.sites import short, site_at
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.analysis.program.bindings import targets_of
from gradguard.analysis.program.call_search import module_name
from gradguard.analysis.program.expressions import argument, is_constant, last_part
from gradguard.analysis.program.index import Program, program_of, programs_of
from gradguard.analysis.program.syntax import Source
from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.edits import replaced, with_argument
from gradguard.rules.base import Rule
from gradguard.rules.spans import in_tiers

_MAPPING = ("vmap", "jacfwd")
_ENTRY = "vmap_impl"


def recognise(incident: Incident) -> Diagnosis | None:
    """The vmap that refuses, where it was made, and what draws inside it."""
    frames = incident.all_frames
    depth = next((i for i, view in enumerate(frames) if view.code_name == _ENTRY and view.locals.get("randomness") == "error"), None)
    if depth is None:
        return None
    inside, outside = frames[:depth], frames[depth:]
    drawing = next((resolve(view.site) for view in inside if view.is_user), None)
    called = next((resolve(view.site) for view in outside if view.is_user), None)
    made = None if called is None else _made(incident, called)
    name = None if called is None or called.call is None else dotted(called.call.func)
    what = _layer(incident, inside) or (f"`{short(drawing.text, 40)}`" if drawing is not None and drawing.exact else "a random operation")
    under = f"`{made[1]}`" if made is not None else "`vmap`"
    culprit: SourceSpan | None = None
    sure = made is not None and made[2]
    if made is not None:
        culprit = made[0].span('`randomness="error"`, the default, refuses every random operation inside', "culprit")
    elif called is not None:
        culprit = called.span("is mapped without `randomness=`", "culprit")
    related = [] if called is None or made is None or made[0].line == called.line else [called.span("runs under it here", "context")]
    if drawing is not None:
        related.append(drawing.span(f"{what} draws random numbers", "context"))
    where = f" where `{name}` is made" if name and made is not None and name != made[1] else ""
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        headline=f"{what} draws random numbers under {under}, which was not told whether each example gets its own",
        culprit=culprit,
        related=related,
        explanation=f"{under} runs its function once for all examples. It cannot know whether they are to share a draw, and refuses.",
        fixes=[
            Fix(
                title=f'Pass `randomness="different"` to {under}{where}: each example gets a draw of its own, as in a loop',
                safety="unsafe",
                patch=None if made is None else _patch(made[0]),
            ),
            Fix(title='Pass `randomness="same"`, for one draw that all examples share', safety="manual"),
        ],
        confidence="certain" if sure else "likely",
    )


def _layer(incident: Incident, inside: Sequence[FrameView]) -> str | None:
    """The layer of torch's in whose forward the numbers are drawn."""
    for view in inside:
        if view.is_user:
            return None
        module = view.locals.get("self") if view.code_name == "forward" else None
        if isinstance(module, nn.Module):
            path, kind = module_name(incident, module), type(module).__name__
            return f"`{path}` ({kind})" if path != kind else f"a `{kind}`"
    return None


def _made(incident: Incident, called: ResolvedSite) -> tuple[ResolvedSite, str, bool] | None:
    """The call (or decorator) that mapped the function which is called here, its name, and whether it is bound to what is called."""
    program, call = program_of(called.source), called.call
    if program is None or call is None:
        return None
    if call.func in _mappings(program):
        return *_named(program.source, call.func), True
    name = last_part(call.func)
    for sources in in_tiers(incident):
        every = [(each.source, node) for each in programs_of(sources) for node in _mappings(each)]
        bound = [(source, node) for source, node in every if name and name in _bound_to(source, node)]
        found = bound or every
        if found:
            return (*_named(*found[0]), bool(bound)) if len(found) == 1 else None
    return None


def _named(source: Source, node: ast.expr) -> tuple[ResolvedSite, str]:
    mapping = node.args[0] if isinstance(node, ast.Call) and last_part(node) == "partial" else node
    return site_at(source, node), short(dotted(mapping.func if isinstance(mapping, ast.Call) else mapping), 32)


def _bound_to(source: Source, node: ast.expr) -> list[str]:
    """The names of what a mapping makes: the variables or attributes that its statement binds, or the function that it decorates."""
    statement = source.statement(node)
    names = [last_part(target) for target in targets_of(statement)] if statement is not None else []
    return [statement.name] if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) else names


def _mappings(program: Program) -> list[ast.expr]:
    """What maps a function and does not say what to do with random operations: calls of vmap, of `partial` with it, bare decorators."""
    if not any(map(program.mentions, _MAPPING)):
        return []
    calls = [*program.calls(*_MAPPING), *(each for each in program.calls("partial") if each.args and last_part(each.args[0]) in _MAPPING)]
    asking = [each for each in calls if is_constant(argument(each, "randomness") or ast.Constant("error"), "error")]
    marks = [mark for each in program.source.scopes for mark in getattr(each, "decorator_list", ()) if not isinstance(mark, ast.Call)]
    return [*asking, *(mark for mark in marks if last_part(mark) in _MAPPING)]


def _patch(made: ResolvedSite) -> str | None:
    node, source = made.node, made.source
    if source is None or not USER_FILES[source.filename]:
        return None
    if not isinstance(node, ast.Call):  # a bare decorator
        return None if not isinstance(node, (ast.Name, ast.Attribute)) else _as_partial(source, node)
    given = argument(node, "randomness")
    if given is not None:
        return replaced(source, [(given, '"different"')])
    return with_argument(source, node, 'randomness="different"')


def _as_partial(source: Source, node: ast.Name | ast.Attribute) -> str | None:
    """The diff that gives a bare decorator its argument, where `partial` is at hand."""
    name = next((local for local, full in source.imports.items() if full == "functools.partial"), None)
    name = name or next((f"{local}.partial" for local, full in source.imports.items() if full == "functools"), None)
    return None if name is None else replaced(source, [(node, f'{name}({source.flat(node)}, randomness="different")')])


RULE = Rule(
    code="GG412",
    name="vmap-randomness",
    summary="a random operation under vmap, which was not told whether examples share it",
    recognise=recognise,
    priority=50,
    messages=("called random operation while in randomness error mode",),
)
