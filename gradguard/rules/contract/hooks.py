"""Where hooks were registered, and which modules have some."""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope, callee_scope, code_of
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import elements, name_of, pairs, peek

HOOK_CALLS = {
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "register_module_full_backward_hook",
    "register_module_backward_hook",
    "register_multi_grad_hook",
    "register_prehook",
}


def registrations(incident: Incident, full: bool = False, hook: Any = None) -> list[Spot]:
    """The calls that register backward hooks in the user's files that take part.

    With `full` only those of a module's full hooks; with `hook` those that name it come first.
    """
    files = incident.sources
    if hook is not None:
        code, _, _ = code_of(hook)
        files = sorted(files, key=lambda source: code is None or source.filename != code.co_filename)
    names = [name for name in HOOK_CALLS if not full or "full_backward" in name]
    found = [Spot(Scope(source, source.tree or ast.Module([], [])), call) for source, call in calls_in(files, *names)]
    if hook is not None:
        name = name_of(hook)
        found.sort(key=lambda spot: not (isinstance(spot.node, ast.Call) and spot.node.args and name in ast.unparse(spot.node.args[0])))
    return found


def registration(incident: Incident, module: nn.Module | None) -> list[SourceSpan]:
    """The call that registered a module's full backward hook; nothing where several calls could be it."""
    spots = registrations(incident, full=True)
    names = [] if module is None else user_hooks(module)
    first = [(spot, ast.unparse(spot.node.args[0])) for spot in spots if isinstance(spot.node, ast.Call) and spot.node.args]
    chosen = [spot for spot, text in first if text.rpartition(".")[2] in names] or spots
    return [chosen[0].span("the full backward hook is registered here", "declared")] if len(chosen) == 1 else []


def has_full_hooks(module: nn.Module) -> bool:
    """Whether a module passes its tensors through the Function of full backward hooks."""
    full = peek(module, "_is_full_backward_hook", None)
    return bool(pairs(peek(module, "_backward_pre_hooks"))) or (bool(pairs(peek(module, "_backward_hooks"))) and full is not False)


def user_hooks(module: nn.Module) -> list[str]:
    """The names of a module's backward hooks."""
    return list(dict.fromkeys(name_of(hook) or type(hook).__name__ for hook in hooks_of(module)))


def hooks_of(module: nn.Module) -> list[Any]:
    """A module's backward hooks, those before its backward last."""
    return [*elements(peek(module, "_backward_hooks")), *elements(peek(module, "_backward_pre_hooks"))]


def module_of_output(scope: Scope, value: ast.expr) -> nn.Module | None:
    """The module with full hooks whose output an expression is: the called one, or the last child of a Sequential."""
    while isinstance(value, (ast.Subscript, ast.Attribute)):
        value = value.value
    if not isinstance(value, ast.Call):
        return None
    module = scope.evaluate(value.func)
    for _ in range(8):
        if not isinstance(module, nn.Module):
            break
        if has_full_hooks(module):
            return module
        if not isinstance(module, nn.Sequential) or not len(module):
            return None
        module = module[-1]
    inner = callee_scope(scope, value)
    if inner is not None:
        for returned in returns_of(inner)[::-1]:
            found = module_of_output(inner, returned)
            if found is not None:
                return found
    # a view of a hooked module's output, such as conv(x).flatten(1)
    return (
        module_of_output(scope, value.func.value)
        if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call)
        else None
    )
