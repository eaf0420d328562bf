"""What rules ask of a search: the expression that backward was called on, and where its path was lost."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradguard.evidence.bindings import dotted
from gradguard.evidence.source import ResolvedSite
from gradguard.rules.gradient_path import origins as _origins
from gradguard.rules.gradient_path.flows import Flow
from gradguard.rules.gradient_path.follow import Follower
from gradguard.rules.gradient_path.origins import Origin
from gradguard.rules.gradient_path.places import site_at
from gradguard.rules.incident import Incident


def is_method(call: ast.Call) -> bool:
    """`loss.backward(...)`, not `torch.autograd.backward(loss)` or `accelerator.backward(loss)`."""
    name = dotted(call.func)
    return isinstance(call.func, ast.Attribute) and (
        name is None or name.rpartition(".")[0] not in ("torch.autograd", "autograd", "accelerator", "fabric", "self")
    )


def root_expression(place: ResolvedSite) -> ast.expr | None:
    """What backward is called on, as an expression of the call's line."""
    call = place.call
    if call is None:
        return None
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


def flow_of_root(incident: Incident) -> tuple[Follower, Flow] | None:
    """Follows what backward was called on."""
    follower = Follower(incident)
    place = incident.place
    scope = follower.live(0)
    if place is None or scope is None:
        return None
    expression = root_expression(place)
    if expression is None:
        return None
    flow = follower.flow(expression, scope)
    return follower, follower.under_blocks(flow, expression, scope)


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
