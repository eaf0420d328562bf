"""In-place writes to what a module with full backward hooks gives out (or takes in)."""

from __future__ import annotations

import ast

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.call_search import called_name, module_name
from gradguard.analysis.program.definitions import bound_value, definition
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
    declared: list[Spot] = []
    for source in incident.sources:
        for node in ast.walk(source.tree) if source.tree is not None else ():
            if isinstance(node, ast.Call) and called_name(node) == kind and _is_inplace(node):
                declared.append(Spot(Scope(source, source.tree or ast.Module([], [])), node))
    culprit = (
        declared[0].span(f"`{kind}` writes its input in place", "culprit")
        if len(declared) == 1
        else place.span(f"`{name}` writes in place here", "culprit")
    )
    related = (
        [place.span(f"`{name}` runs here", "changed")]
        if len(declared) == 1
        else [spot.span(f"an in-place `{kind}`", "declared") for spot in declared[:3]]
    )
    related += registration(incident, None)
    patch = None
    if len(declared) == 1 and isinstance(declared[0].node, ast.Call):
        flag = next((k.value for k in declared[0].node.keywords if k.arg == "inplace"), None) or (
            declared[0].node.args[-1] if declared[0].node.args else None
        )
        patch = None if flag is None else replaced(declared[0].scope.source, [(flag, "False")])
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


def _is_inplace(call: ast.Call) -> bool:
    return any(k.arg == "inplace" and getattr(k.value, "value", None) is True for k in call.keywords) or any(
        getattr(a, "value", None) is True for a in call.args
    )


def _hooked_source(incident: Incident, place: ResolvedSite, scopes: list[Scope]) -> tuple[nn.Module | None, Spot | None]:
    """The module with hooks whose output is written, and the call that ran it."""
    written = place._receiver_node if place.receiver else None
    node: ast.AST | None = written
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    if isinstance(node, ast.Call):
        found = module_of_output(scopes[0], node)
        return found, Spot(scopes[0], node) if found is not None else None
    if not isinstance(node, ast.Name):
        return None, None
    at: ast.AST = place.node or place.statement or node
    for _ in range(8):
        statement = definition(scopes[0], node.id, at)
        bound = None if statement is None else bound_value(statement, node.id)
        if statement is None or bound is None:
            return None, None
        value: ast.expr = bound[0]
        if isinstance(value, ast.Name):
            node, at = value, statement
            continue
        found = module_of_output(scopes[0], value)
        return found, Spot(scopes[0], value, node.id) if found is not None or isinstance(value, ast.Call) else None
    return None, None
