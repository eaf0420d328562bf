"""# GG408 hook-contract

## What it is
A backward hook (of a tensor, a parameter or a module) returned something of another shape, type or number than the gradient
it was given, takes the wrong arguments, or was registered where it cannot work; or a module with full backward hooks has
its output (or input) changed in place.

## Why it is wrong
What a hook returns replaces the gradient, so it must look like it: a tensor of the same shape and dtype, or None; for a
module's hook a tuple with one entry for each input. A full backward hook passes the module's output through a custom
Function, as a view, and an in-place write to a view of a custom Function's output cannot be differentiated.

## Example
    conv.register_full_backward_hook(log)
    out = conv(x)
    out += x

## Use instead
    out = conv(x)
    out = out + x

## Fix safety
Safe for writing out of place; manual for what a hook should return.

## When it speaks, what silences it
On PyTorch's errors about hooks. The culprit is the hook's `return`, or the line that writes in place.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import def_span
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.call_search import live_modules, module_name
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.expressions import is_constant, last_part
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope, callable_scope, frame_scopes
from gradguard.core.callsite import USER_FILES, CallSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import UNKNOWN, elements, function_code, name_of, peek
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.contract.custom_views import MESSAGE, maker, of_hooks
from gradguard.rules.contract.gg408_hook_contract import hook_arguments, hooked_writes
from gradguard.rules.contract.gg408_hook_contract.unnamed_hooks import UNNAMED, functions_given
from gradguard.rules.contract.hooks import HOOK_CALLS, hooks_of, registrations
from gradguard.rules.contract.wording import backward_called

_CHANGED = re.compile(r"hook '(.+?)' has changed the (size|type) of value(?: \(was (\S+) got (\S+)\))?")
_RETURNED = re.compile(r"expected (Variable|tuple), but hook returned '([\w.]+)'")
_NUMBER = re.compile(r"Backward (pre )?hook returned an invalid number of grad_(input|output), got (\d+), but expected (\d+)")


def recognise(incident: Incident) -> Diagnosis | None:
    if incident.says("backwardhookfunction") or (incident.says(MESSAGE) and of_hooks(maker(incident))):
        return hooked_writes.written_in_place(incident)
    number = _NUMBER.search(incident.message)
    if number is not None:
        return _bare_tensor(incident, number)
    changed = _CHANGED.search(incident.message)
    if changed is not None:
        return _changed(incident, changed)
    returned = _RETURNED.search(incident.message)
    if returned is not None:
        return _wrong_type(incident, returned[1], returned[2])
    if incident.says("cannot register a hook on a tensor that doesn't require"):
        return _registered_badly(incident, "does not require grad, so no gradient will ever reach the hook")
    if incident.says("post accumulate grad hooks cannot be registered"):
        return _registered_badly(incident, "is a computed tensor, and nothing is accumulated in it")
    return _both_kinds(incident) if incident.says("both regular backward hooks and full backward hooks") else None


# -- what hooks return ------------------------------------------------------------------------------------------------


def _bare_tensor(incident: Incident, found: re.Match[str]) -> Diagnosis:
    pre, got, expected = bool(found[1]), int(found[3]), int(found[4])
    hook, module = _failing_module_hook(incident)
    scope = None if hook is None else callable_scope(hook)
    what = "grad_output" if pre else "grad_input"
    name = name_of(hook) or "the hook"
    owner = f" of `{module_name(incident, module)}`" if module is not None else ""
    values = returns_of(scope) if scope is not None else []
    value = values[-1] if values else None
    bare = value is not None and not isinstance(value, (ast.Tuple, ast.List))
    culprit = None
    patch = None
    if scope is not None and value is not None:
        label = (
            "a bare tensor: its first dimension is taken for the number of gradients"
            if bare
            else f"{got} values where {expected} are expected"
        )
        culprit = Spot(scope, value).span(label, "culprit")
        if bare and expected == 1 and isinstance(value, (ast.Name, ast.Call, ast.Subscript, ast.BinOp, ast.Attribute)):
            patch = replaced(scope.source, [(value, f"({scope.source.segment(value)},)")])
    related = [spot.span("registered here", "declared") for spot in registrations(incident, hook=hook)[:1]]
    related += backward_called(incident)
    shape = f" ({got} is the size of its first dimension, mostly the batch)" if bare else ""
    return Diagnosis(
        code="GG408",
        name="hook-contract",
        headline=f"The backward {'pre-' if pre else ''}hook `{name}`{owner} returns "
        f"{'a bare tensor' if bare else f'{got} values'}, but {what} is a tuple of {expected}{shape}.",
        culprit=culprit,
        related=related,
        explanation=f"What a module's backward hook returns replaces `{what}`, which is a tuple with one entry for each "
        f"{'output' if pre else 'input'} of the module.",
        fixes=[
            Fix(title="return a tuple: `(grad,)`", safety="safe" if patch else "manual", patch=patch),
            Fix(title="return None if the gradient is only looked at", safety="manual"),
        ],
        confidence="certain" if scope is not None else "likely",
    )


def _failing_module_hook(incident: Incident) -> tuple[Any, nn.Module | None]:
    """The hook that torch's own code was calling when it raised, and its module."""
    for view in incident.all_frames:
        if not view.frame.f_code.co_filename.endswith("hooks.py"):
            continue
        names = view.locals
        holder = names.get("self")
        module = peek(holder, "module", None)
        hook = names.get("user_hook") or names.get("hook") or names.get("user_pre_hook")
        if hook is None and holder is not None:
            hooks = elements(peek(holder, "user_hooks")) or elements(peek(holder, "user_pre_hooks"))
            hook = hooks[-1] if len(hooks) else None
        if hook is not None or module is not None:
            code = function_code(hook)
            hook = hook if code is not None and USER_FILES[code.co_filename] else None
            if hook is None and isinstance(module, nn.Module):
                known = hooks_of(module)
                hook = known[-1] if known else None
            return hook, module if isinstance(module, nn.Module) else None
    return None, None


def _hook_named(incident: Incident, name: str) -> list[Scope]:
    """The user's functions (or lambdas) by this name that are given to a hook registration, else any function so called."""
    spots = registrations(incident)
    if name == UNNAMED:
        unnamed = {id(scope.tree): scope for spot in spots for scope in functions_given(incident, spot)}
        able = [scope for scope in unnamed.values() if any(not is_constant(value, None) for value in returns_of(scope))]
        return able if len(able) == 1 else []  # of several none is known to be it
    given = [scope for spot in spots for scope in functions_given(incident, spot)]
    named = [
        scope
        for scope in given
        if (isinstance(scope.tree, ast.Lambda) and name == "<lambda>") or (scope.function is not None and scope.function.name == name)
    ]
    if named or name == "<lambda>":
        return named
    found = []
    for source in incident.sources:
        found += [Scope(source, node) for node in source.scopes if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def _story(incident: Incident, scope: Scope) -> list[SourceSpan]:
    related = [
        spot.span("the hook is registered here", "declared")
        for spot in registrations(incident)
        if any(s.tree is scope.tree for s in functions_given(incident, spot))
    ][:1]
    if incident.place is not None and incident.where in ("backward", "grad") and incident.place.function != scope.qualname:
        related.append(incident.place.span("backward was called here", "backward"))
    elif incident.where in ("backward", "grad"):
        outer = next((v for v in incident.user_frames if v.frame.f_code.co_name != getattr(scope.function, "name", "")), None)
        place = None if outer is None else resolve(CallSite(outer.frame.f_code, outer.site.lasti))
        related += [] if place is None else [place.span("backward was called here", "backward")]
    return related


def _changed(incident: Incident, found: re.Match[str]) -> Diagnosis | None:
    name, what = found[1], found[2]
    scopes = _hook_named(incident, name)
    if not scopes and name == "hook":  # torch's own wrapper of a module's hooks
        hooks = [h for m in live_modules(incident) for h in hooks_of(m)]
        known = (callable_scope(hook) for hook in dict.fromkeys(hooks))
        scopes = [scope for scope in known if scope is not None and returns_of(scope)]
    shown = (
        f"`{scopes[0].qualname if name == UNNAMED else name}`"
        if scopes and name != "hook"
        else "A backward hook"
        if not scopes
        else f"`{getattr(scopes[0].function, 'name', 'lambda')}`"
    )
    change = "of another shape" if what == "size" else f"of another type ({found[4]} for {found[3]})" if found[3] else "of another type"
    culprit = None
    related: list[SourceSpan] = []
    target = None
    if scopes:
        values = returns_of(scopes[0])
        culprit = (
            Spot(scopes[0], values[-1]).span(f"a gradient {change}", "culprit")
            if values
            else def_span(scopes[0], "the hook", "culprit")
            if scopes[0].function
            else None
        )
        related = _story(incident, scopes[0])
        target = _hooked(incident, scopes[0])
    first = Fix(
        title="return a gradient of the same shape: `view_as(grad)` after flattening, `keepdim=True` and `expand_as(grad)` after reducing"
        if what == "size"
        else "convert back before returning: `.to(grad.dtype)`"
    )
    sides = hook_arguments.swapped(scopes[0]) if scopes and what == "size" else None
    notes = hook_arguments.holders(incident, scopes[0]) if scopes else []
    if sides is not None and culprit is not None:
        ours, theirs = sides
        label = f"made from `{theirs}`, the gradients of the outputs; it takes the place of `{ours}`"
        culprit = culprit.model_copy(update={"label": label})
        first = hook_arguments.fix(scopes[0], ours, theirs)
    on = f" on `{target}`" if target else ""
    return Diagnosis(
        code="GG408",
        name="hook-contract",
        headline=f"The hook {shown}{on} returns a gradient {change} than the one it was given."
        if scopes
        else f"A backward hook returned a gradient {change} than the one it was given.",
        culprit=culprit,
        related=related,
        explanation="What a hook returns takes the gradient's place and flows on, so it must have its shape, dtype and device. "
        "None leaves the gradient as it is.",
        notes=notes,
        fixes=[first, Fix(title="return None if the gradient is only looked at")],
        confidence="certain" if len(scopes) == 1 else "likely",
    )


def _hooked(incident: Incident, scope: Scope) -> str | None:
    """What the hook was registered on, as written."""
    for spot in registrations(incident):
        if (
            any(s.tree is scope.tree for s in functions_given(incident, spot))
            and isinstance(spot.node, ast.Call)
            and isinstance(spot.node.func, ast.Attribute)
        ):
            return spot.scope.source.flat(spot.node.func.value)
    return None


def _wrong_type(incident: Incident, wanted: str, got: str) -> Diagnosis | None:
    registered = registrations(incident)
    candidates = [scope for spot in registered for scope in functions_given(incident, spot)]
    fitting = [(scope, value) for scope in candidates for value in returns_of(scope) if _looks_like(value, got, scope)]
    if not fitting:
        fitting = [(scope, value) for scope in candidates for value in returns_of(scope)[-1:] if not is_constant(value, None)]
    if not fitting:
        return None
    scope, value = fitting[0]
    name = scope.function.name if scope.function is not None else "lambda"
    kind = "a tuple of gradients" if wanted == "tuple" else "a tensor or None"
    target = _hooked(incident, scope)
    return Diagnosis(
        code="GG408",
        name="hook-contract",
        headline=f"The hook `{name}`{f' on `{target}`' if target else ''} returns a `{got}` where {kind} is expected.",
        culprit=Spot(scope, value).span(f"a `{got}`", "culprit"),
        related=_story(incident, scope),
        explanation="What a hook returns takes the gradient's place. A hook that only looks at the gradient returns nothing.",
        fixes=[Fix(title=f"return {kind}"), Fix(title="drop the return value if the gradient is only looked at")],
        confidence="certain" if len(fitting) == 1 and len(candidates) == 1 else "likely",
    )


def _looks_like(value: ast.expr, kind: str, scope: Scope) -> bool:
    program = program_of(scope.source)
    text = " ".join(ast.unparse(each) for each in (program.values(value) if program is not None else ()) if isinstance(each, ast.expr))
    if "ndarray" in kind:
        return ".numpy()" in text or "np." in text
    if kind in ("float", "int"):
        return ".item()" in text or "float(" in text or "int(" in text or (isinstance(value, ast.Constant) and not is_constant(value, None))
    if kind in ("tuple", "list", "dict"):
        return isinstance(value, {"tuple": ast.Tuple, "list": (ast.List, ast.ListComp), "dict": (ast.Dict, ast.DictComp)}[kind])  # type: ignore[arg-type]
    return kind == "Tensor" and not isinstance(value, (ast.Tuple, ast.List, ast.Constant))


def _registered_badly(incident: Incident, why: str) -> Diagnosis | None:
    place = incident.place
    if place is None or place.call is None:
        return None
    name = place.receiver or "the tensor"
    method = last_part(place.call)
    scopes = frame_scopes(incident.frames)
    related: list[SourceSpan] = []
    node = place._receiver_node
    value = scopes[0].evaluate(node) if scopes and node is not None else UNKNOWN
    fixes = [Fix(title=f"register the hook on a tensor that requires grad; switch it on with `{name}.requires_grad_()` if a leaf is meant")]
    if isinstance(value, torch.Tensor):
        cut = incident.journal.cut_of(value)
        spot = None if cut is None else resolve(cut.roots()[0].site)
        if spot is not None:
            related.append(spot.span(f"`{name}` lost its gradient path here", "cut"))
    if "computed" in why:
        fixes = [Fix(title=f"use `{name}.register_hook(...)`, which works for computed tensors")]
    return Diagnosis(
        code="GG408",
        name="hook-contract",
        headline=f"`{method}` on `{name}`: `{name}` {why}.",
        culprit=place.span(f"`{name}` {why}", "culprit"),
        related=related,
        explanation="A hook is called with the gradient of its tensor in each backward pass, so there must be one.",
        fixes=fixes,
    )


def _both_kinds(incident: Incident) -> Diagnosis | None:
    place = incident.place
    others = [
        spot
        for spot in registrations(incident)
        if isinstance(spot.node, ast.Call) and last_part(spot.node) in HOOK_CALLS and (place is None or spot.line != place.line)
    ]
    if place is None:
        return None
    return Diagnosis(
        code="GG408",
        name="hook-contract",
        headline="One module cannot have both regular (`register_backward_hook`) and full backward hooks.",
        culprit=place.span("the second kind is registered here", "culprit"),
        related=[spot.span("and the other kind here", "declared") for spot in others[:1]],
        explanation="The two put themselves into the graph in different ways. The regular kind is deprecated: it sees the wrong "
        "grad_input for modules of several operations.",
        fixes=[Fix(title="use `register_full_backward_hook` for both")],
    )


RULE = Rule(
    code="GG408",
    name="hook-contract",
    summary="a hook returns what it must not, or meets an in-place write",
    recognise=recognise,
    priority=60,
    messages=(
        "backwardhookfunction",
        MESSAGE,
        "hook returned an invalid number of grad",
        "has changed the size of value",
        "has changed the type of value",
        "but hook returned '",
        "cannot register a hook on a tensor that doesn't require",
        "post accumulate grad hooks cannot be registered",
        "both regular backward hooks and full backward hooks",
    ),
)
