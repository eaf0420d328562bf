"""What rules ask of a search: the expression that backward was called on, and where its path was lost."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradguard.analysis.history import cut_origins as _origins
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.history.flows import Flow
from gradguard.analysis.history.follower import Follower
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, assignments_to
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.search_scopes import Scope


def is_method(call: ast.Call) -> bool:
    """`loss.backward(...)`, not `torch.autograd.backward(loss)` or `accelerator.backward(loss)`."""
    name = dotted(call.func)
    return isinstance(call.func, ast.Attribute) and (
        name is None or name.rpartition(".")[0] not in ("torch.autograd", "autograd", "accelerator", "fabric", "self")
    )


def root_expression(place: ResolvedSite) -> ast.expr | None:
    """What backward is called on, as an expression of the function that the call stands in."""
    call = place.call
    if call is None:
        return None
    aliased = _behind_name(place, call)
    if aliased is not None:
        return aliased
    full = place.callee_full_name or ""
    if full.startswith("torch.autograd") or full in ("grad", "backward"):
        given = [keyword.value for keyword in call.keywords if keyword.arg in ("outputs", "tensors")]
        return call.args[0] if call.args else given[0] if given else None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and not call.args:
        base = call.func.value
        # scaler.scale(loss).backward()
        if isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and base.func.attr in ("scale", "scale_loss") and base.args:
            return base.args[0]
        return base
    if isinstance(call.func, ast.Attribute) and call.args and call.func.attr in ("backward", "manual_backward", "scale", "step", "grad"):
        name = dotted(call.func.value)
        return call.func.value if name and "loss" in name else call.args[0]
    # a framework's entry point (`trainer.fit(model)`) leads to backward too, and its first argument is no loss
    return call.args[0] if call.args and "backward" in (dotted(call.func) or "") else None


def _behind_name(place: ResolvedSite, call: ast.Call) -> ast.expr | None:
    """The root of `run()` where one assignment says what `run` is: `loss.backward`, or a `partial` of a backward function."""
    function = place.enclosing_function or (None if place.source is None else place.source.tree)
    if not isinstance(call.func, ast.Name) or function is None:
        return None
    values = [item.value for item in assignments_to(function, call.func.id) if isinstance(item, (ast.Assign, ast.AnnAssign))]
    named, given = (values[0] if len(values) == 1 else None), list(call.args)
    if isinstance(named, ast.Call) and (dotted(named.func) or "").rpartition(".")[2] == "partial" and named.args:
        given = [*named.args[1:], *given]
        named = named.args[0]
    if not isinstance(named, ast.Attribute) or named.attr not in ("backward", "grad"):
        return None
    unbound = (dotted(named.value) or "").rpartition(".")[2] in ("autograd", "Tensor")
    return given[0] if unbound and given else None if unbound else named.value


def written_root(incident: Incident, follower: Follower) -> tuple[ast.expr, Scope] | None:
    """What backward was called on, and the scope of the live frame that it is an expression of.

    As the call has it; else the last read of a name that stands for the very tensor, in the frames from there outwards: the bound
    method, or a function around it, was called under another name.
    """
    scope = follower.live(0)
    expression = None if incident.place is None or scope is None else root_expression(incident.place)
    if expression is not None and scope is not None and not (isinstance(expression, ast.Name) and isinstance(scope.function, ast.Lambda)):
        return expression, scope
    root = incident.roots[0] if incident.roots else None
    for level, view in enumerate(incident.user_frames if root is not None else ()):
        names = {name for name, value in view.locals.items() if value is root}
        outer = follower.live(level) if names else None
        if outer is not None and isinstance(outer.function, ast.Lambda):
            continue  # which only closes over it
        reads = [
            node
            for node in (() if outer is None else ast.walk(outer.function))
            if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load) and node.lineno <= view.site.line
        ]
        if reads and outer is not None:
            return max(reads, key=lambda node: (node.lineno, node.col_offset)), outer
    return None


def flow_of_root(incident: Incident) -> tuple[Follower, Flow] | None:
    """Follows what backward was called on."""
    follower = Follower(incident)
    root = written_root(incident, follower)
    return None if root is None else (follower, follower.under_blocks(follower.flow(*root), *root))


def origins_of_root(incident: Incident, leaf: bool = False) -> list[Origin]:
    """The places where the source cuts the root's path, likeliest first."""
    followed = flow_of_root(incident)
    if followed is None:
        return []
    found = _origins.merged(followed[1].found)
    sure = [origin for origin in found if origin.sure]
    chosen = sure or ([] if leaf else found)
    return _origins.ranked(incident, chosen)


def refined(incident: Incident, recorded: Sequence[Origin]) -> list[Origin]:
    """Several recorded origins: those that the source leads to with trainable parameters behind them come first."""
    if len(recorded) < 2:
        return list(recorded)
    followed = flow_of_root(incident)
    if followed is None:
        return list(recorded)
    trained = _origins.trained_ids(incident)
    known = {origin.key: origin for origin in followed[1].found}
    for origin in recorded:
        match = known.get(origin.key)
        if match is not None and not origin.leaves:
            origin.leaves += match.leaves
    return sorted(
        recorded, key=lambda origin: bool(origin.leaves) and bool(trained) and not any(id(leaf) in trained for leaf in origin.leaves)
    )


def toggle_in_source(incident: Incident) -> ResolvedSite | None:
    """`loss.requires_grad_(True)`, `loss.requires_grad = True` or `requires_grad=True` in the function that calls backward."""
    follower = Follower(incident)
    scope = follower.live(0)
    place = incident.place
    expression = root_expression(place) if place is not None else None
    name = dotted(expression) if expression is not None else None
    if scope is None or name is None:
        return None
    for node in ast.walk(scope.function):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "requires_grad_"
            and dotted(node.func.value) == name
        ):
            return site_at(scope.source, node)
        if isinstance(node, ast.Assign) and any(dotted(target) == f"{name}.requires_grad" for target in node.targets):
            return site_at(scope.source, node)
    return None
