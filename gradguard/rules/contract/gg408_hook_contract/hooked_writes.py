"""In-place writes to what a module with full backward hooks gives out (or takes in)."""

from __future__ import annotations

import ast

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.call_search import module_name
from gradguard.analysis.program.expressions import given, is_constant
from gradguard.analysis.program.index import calls_in, program_of
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope, frame_scopes
from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import peek
from gradguard.fixes.edits import inserted, replaced
from gradguard.rules.contract import custom_views
from gradguard.rules.contract.hooks import has_full_hooks, module_of_output, registration, user_hooks
from gradguard.torch_compat.private_api import grad_fn_of


def written_in_place(incident: Incident) -> Diagnosis | None:
    place = incident.place
    scopes = frame_scopes(incident.frames)
    if place is None or not scopes:
        return None
    inner = _inner_module(incident)
    module, made = (None, None) if inner is not None else _hooked_source(incident, place, scopes)
    written = place.receiver or (place.targets[0] if place.targets else None)
    if inner is not None:
        return _module_writes(incident, place, inner)
    taken_in = _whose_input(incident)
    if taken_in is not None:
        module, made = taken_in[0], None
    role, hookable = ("output", written or "out") if taken_in is None else ("input", taken_in[1])
    name = f"`{module_name(incident, module)}`" if module is not None else "a module with full backward hooks"
    shown = f"`{written}`" if written else "The tensor"
    tensor = custom_views.written(incident)
    whole = tensor is None or custom_views.of_hooks(grad_fn_of(tensor))
    repair = _repair(place, written) if whole else Fix(title="take the view of a copy (`.clone()`), and write into that", safety="safe")
    related: list[SourceSpan] = []
    if made is not None:
        related.append(made.span(f"{shown} is the output of {name}, passed through the hook's own Function", "made"))
    related += registration(incident, module)
    hooks = [name for module_hook in ([module] if module is not None else []) for name in user_hooks(module_hook)]
    return Diagnosis(
        code="GG408",
        name="hook-contract",
        headline=f"{shown} is changed in place, but it is {'' if whole else 'a view of '}the {role} of {name}, which has a full "
        "backward hook (`register_full_backward_hook`).",
        culprit=place.statement_span(f"writes {shown} in place", "culprit"),
        related=related,
        explanation="For a full backward hook PyTorch passes the module's inputs and outputs through a custom Function, which "
        "returns them as views. "
        "An in-place write to such a view would bypass the hook's place in the graph, so it is refused.",
        notes=[f"Hooks on {name}: " + ", ".join(f"`{hook}`" for hook in hooks[:3]) + "."] if hooks else [],
        fixes=[
            repair,
            Fix(
                title=f"hook the {role} tensor instead: `{hookable}.register_hook(...)`, which leaves the graph as it is",
                safety="manual",
            ),
        ],
        avoid=["Wrapping the write in `torch.no_grad()` or `.data`: the gradient would be wrong without a word."],
    )


def _repair(place: ResolvedSite, written: str | None) -> Fix:
    """The same out of place; or the write into a copy, where only a part is written."""
    statement, source, call = place.statement, place.source, place.call
    fix = Fix(title="write out of place", safety="safe")
    if source is None or statement is None or written is None or not written.isidentifier():
        return fix
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**"}.get(type(statement.op))
        value = source.segment(statement.value) or ""
        value = f"({value})" if isinstance(statement.value, (ast.BinOp, ast.IfExp, ast.Lambda)) else value
        patch = None if sign is None else replaced(source, [(statement, f"{written} = {written} {sign} {value}")])
        return fix.model_copy(update={"patch": patch})
    if call is not None and isinstance(call.func, ast.Attribute) and isinstance(statement, ast.Expr) and statement.value is call:
        plain = call.func.attr.rstrip("_")
        if plain != call.func.attr and hasattr(torch.Tensor, plain):
            text = (source.segment(call) or "").replace(call.func.attr, plain, 1)
            return fix.model_copy(update={"patch": replaced(source, [(call, f"{written} = {text}")])})
    elif not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript)):
        return fix
    copied = f"{written} = {written}.clone()"
    patch = inserted(source, statement.lineno, copied)
    return Fix(title=f"write into a copy: `{copied}` before it", safety="safe", patch=patch)


def _whose_input(incident: Incident) -> tuple[nn.Module, str] | None:
    """The hooked module in whose forward an argument of that very forward is written, itself or through a view; and the argument."""
    node = custom_views.maker(incident)
    for view in incident.user_frames if node is not None else ():
        code, owner = view.frame.f_code, view.locals.get("self")
        if view.code_name != "forward" or not isinstance(owner, nn.Module) or not has_full_hooks(owner):
            continue
        for name in code.co_varnames[1 : code.co_argcount]:
            given = view.locals.get(name)
            if isinstance(given, torch.Tensor) and custom_views.maker_of(given) is node:
                return owner, name
    return None


def _inner_module(incident: Incident) -> nn.Module | None:
    """The torch module whose own forward did the write, such as `nn.ReLU(inplace=True)`."""
    for view in incident.all_frames:
        if USER_FILES[view.frame.f_code.co_filename]:
            return None
        owner = view.locals.get("self") if view.code_name == "forward" else None
        if isinstance(owner, nn.Module) and peek(owner, "inplace", False) is True:
            return owner
    return None


def _module_writes(incident: Incident, place: ResolvedSite, module: nn.Module) -> Diagnosis:
    kind = type(module).__name__
    name = module_name(incident, module)
    declared = [(source, call) for source, call in calls_in(incident.sources, kind) if any(is_constant(each, True) for each in given(call))]
    culprit, related, patch = place.span(f"`{name}` writes in place here", "culprit"), list[SourceSpan](), None
    if len(declared) == 1:
        source, call = declared[0]
        culprit = source.span_of(call, f"`{kind}` writes its input in place", "culprit")
        related = [place.span(f"`{name}` runs here", "changed")]
        patch = replaced(source, [(next(each for each in given(call) if is_constant(each, True)), "False")])
    else:
        related = [source.span_of(call, f"an in-place `{kind}`", "declared") for source, call in declared[:3]]
    related += registration(incident, None)
    return Diagnosis(
        code="GG408",
        name="hook-contract",
        headline=f"`{name}` (`{kind}` with `inplace=True`) writes in place to a tensor that a full backward hook "
        "(`register_full_backward_hook`) made a view.",
        culprit=culprit,
        related=related,
        explanation="For a full backward hook PyTorch passes a module's inputs and outputs through a custom Function, which "
        "returns them as views; these must not be written in place.",
        fixes=[
            Fix(title=f"`{kind}(inplace=False)`", safety="safe", patch=patch),
            Fix(title="do not hook this module and the one before it"),
        ],
        confidence="certain" if len(declared) == 1 else "likely",
    )


def _hooked_source(incident: Incident, place: ResolvedSite, scopes: list[Scope]) -> tuple[nn.Module | None, Spot | None]:
    """The module with hooks whose output is written, and the call that ran it."""
    node = place._receiver_node if place.receiver else None
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    program, name = program_of(scopes[0].source), node.id if isinstance(node, ast.Name) else None
    made = [each for each in program.values(node) if isinstance(each, ast.Call)] if program is not None and node is not None else []
    modules = [(module, Spot(scopes[0], call, name)) for call in made if (module := module_of_output(scopes[0], call)) is not None]
    return modules[0] if modules else (None, Spot(scopes[0], made[0], name) if made and name is not None else None)
