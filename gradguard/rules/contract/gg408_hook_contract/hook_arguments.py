"""A module's backward hook that returns what belongs to the other side: gradients of the outputs for those of the inputs. Part of GG408."""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.program.call_search import live_modules, module_name
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.scopes import Scope, callable_scope
from gradguard.core.diagnosis import Fix
from gradguard.fixes.edits import replaced
from gradguard.rules.contract.hooks import hooks_of


def swapped(scope: Scope) -> tuple[str, str] | None:
    """The hook's names for the gradients of the inputs and of the outputs, where it reads the latter only and returns something."""
    function = scope.function
    if function is None:
        return None
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if names[:1] == ["self"] else names
    if len(names) != 3 or not returns_of(scope):
        return None
    _, ours, theirs = names
    read = {node.id for node in inside(function, ast.Name)}
    return (ours, theirs) if theirs in read and ours not in read else None


def fix(scope: Scope, ours: str, theirs: str) -> Fix:
    """The same hook with the other argument."""
    uses = [node for node in inside(scope.tree, ast.Name) if node.id == theirs]
    stored = any(isinstance(node.ctx, ast.Store) for node in uses)
    return Fix(
        title=f"compute with `{ours}` instead of `{theirs}`",
        safety="unsafe",
        patch=None if stored else replaced(scope.source, [(node, ours) for node in uses]),
        detail=f"What the hook returns replaces `{ours}`: one entry for each input of the module, None where that needs no gradient.",
    )


def holders(incident: Incident, scope: Scope) -> list[str]:
    """A note on the modules that have this hook."""
    found = []
    for module in live_modules(incident):
        for hook in hooks_of(module):
            inner = callable_scope(hook)
            if inner is not None and inner.tree is scope.tree:
                found.append(module_name(incident, module))
                break
    named = list(dict.fromkeys(found))
    return [f"It is registered on {short_list(named)}."] if len(named) > 1 else []
