"""Mechanical repairs as unified diffs: one expression replaced in place."""

from __future__ import annotations

import ast

from gradguard.diagnosis import Fix
from gradguard.evidence.source import ResolvedSite
from gradguard.evidence.syntax import Source, range_of
from gradguard.fixes.diff import unified
from gradguard.rules.gradient_path import words
from gradguard.rules.gradient_path.origins import Origin, callee_name


def replaced(source: Source, node: ast.AST, text: str) -> str | None:
    """The diff that writes `text` in a node's place; None when its place is not known."""
    place = range_of(node)
    if place is None or not 0 < place[0] <= place[2] <= len(source.lines):
        return None
    first, start, last, end = place
    start, end = source.characters(first, start), source.characters(last, end)
    new = list(source.lines)
    new[first - 1 : last] = [source.lines[first - 1][:start] + text + source.lines[last - 1][end:]]
    return unified(source, new)


def with_patch(fix: Fix, origin: Origin) -> Fix:
    """The fix with a patch where the change is mechanical and the place is certain."""
    place = origin.place
    if place is None or place.source is None or not origin.certain:
        return fix
    patch = _patch(place, place.source, origin)
    return fix if patch is None else fix.model_copy(update={"patch": patch})


def _patch(place: ResolvedSite, source: Source, origin: Origin) -> str | None:
    node = place.node
    if words.rule_of(origin) == "GG302" and origin.kind in ("detach", "data"):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach" and not node.args:
            return _unless_wrapped(source, node, node.func.value)
        if isinstance(node, ast.Attribute) and node.attr == "data":
            return _unless_wrapped(source, node, node.value)
    if origin.kind == "sample" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and callee_name(place) == "sample":
        text = source.flat(node)
        receiver = source.flat(node.func.value)
        return replaced(source, node, receiver + ".r" + text[len(receiver) + 1 :]) if text.startswith(receiver + ".sample") else None
    if (
        origin.kind == "rewrap"
        and isinstance(node, ast.Call)
        and len(node.args) == 1
        and not node.keywords
        and place.callee_full_name == "torch.tensor"
    ) and isinstance(node.args[0], (ast.List, ast.ListComp)):
        return replaced(
            source, node.func, source.flat(node.func).rpartition(".")[0] + ".stack" if "." in source.flat(node.func) else "torch.stack"
        )
    return None


def _unless_wrapped(source: Source, node: ast.expr, inner: ast.expr) -> str | None:
    """Dropping `.detach()` from `x.detach().numpy()` or from `Variable(x.data)` would not repair anything."""
    above = source.parents.get(node)
    if isinstance(above, ast.Attribute) and above.attr in ("numpy", "tolist", "item", "cpu", "data", "requires_grad_"):
        return None
    if isinstance(above, ast.Call) and node in above.args:
        full = source.flat(above.func).rpartition(".")[2]
        if full in ("Variable", "tensor", "as_tensor", "Parameter", "float", "int", "array", "asarray", "deepcopy"):
            return None
    return replaced(source, node, source.flat(inner))
