"""Mechanical repairs as unified diffs: one expression replaced in place."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gradguard.diagnosis import Fix
from gradguard.evidence.bindings import dotted
from gradguard.evidence.source import ResolvedSite
from gradguard.evidence.syntax import Source
from gradguard.fixes.edits import replaced
from gradguard.rules.gradient_path import words
from gradguard.rules.gradient_path.origins import Origin, callee_name


def with_patch(fix: Fix, origin: Origin, others: Sequence[Origin] = ()) -> Fix:
    """The fix with a patch where the change is mechanical and the place is certain.

    Args:
        others: further origins of the same lost path; those cut by the same statement are repaired together.
    """
    place = origin.place
    if place is None or place.source is None:
        return fix
    stacked = _stacked(place, place.source, origin)
    if stacked is not None:
        title = f"{fix.title.partition(', and keep')[0]}, and put the list together with `torch.stack`"
        return fix.model_copy(update={"patch": replaced(place.source, stacked), "title": title, "safety": "unsafe"})
    if not origin.certain:
        return fix
    beside = [other for other in others if other is not origin and other.place is not None and other.place.statement is place.statement]
    edits = [_edit(place, place.source, origin), *(_edit(other.place, place.source, other) for other in beside if other.place)]
    certain = [edit for edit in edits if edit is not None]
    if edits[0] is None or len(certain) != len(edits):
        return fix
    patch = replaced(place.source, list(dict(certain).items()))
    if patch is None:
        return fix
    names = list(dict.fromkeys(f"`{item.inner}`" for item in (origin, *beside) if item.inner))
    title = f"Drop `{words.operation(origin)}` from {' and '.join(names)}" if beside and len(names) > 1 else fix.title
    return fix.model_copy(update={"patch": patch, "title": title})


def _stacked(place: ResolvedSite, source: Source, origin: Origin) -> list[tuple[ast.AST, str]] | None:
    """`losses.append(x.item())`, where the only use of the list is `torch.tensor(losses)`: both have to change."""
    node = place.node
    append = source.parents.get(node) if node is not None else None
    taken = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args
    if origin.kind != "escape" or not taken or not isinstance(append, ast.Call) or not isinstance(append.func, ast.Attribute):
        return None
    kept = append.func.value
    if append.func.attr != "append" or not isinstance(kept, ast.Name):
        return None
    scope = place.enclosing_function or source.tree
    reads = [part for part in ast.walk(scope or kept) if isinstance(part, ast.Name) and part.id == kept.id and part is not kept]
    reads = [part for part in reads if isinstance(part.ctx, ast.Load)]
    made = source.parents.get(reads[0]) if len(reads) == 1 else None
    if not isinstance(made, ast.Call) or dotted(made.func) != "torch.tensor" or len(made.args) != 1 or made.keywords:
        return None
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return [(node, source.segment(node.func.value) or ""), (made.func, "torch.stack")]


def _edit(place: ResolvedSite, source: Source, origin: Origin) -> tuple[ast.AST, str] | None:
    """The node to change, and its new text."""
    node = place.node
    if words.rule_of(origin) == "GG302" and origin.kind in ("detach", "data"):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach" and not node.args:
            return _unless_wrapped(source, node, node.func.value)
        if isinstance(node, ast.Attribute) and node.attr == "data":
            return _unless_wrapped(source, node, node.value)
    if origin.kind == "sample" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and callee_name(place) == "sample":
        text = source.flat(node)
        receiver = source.flat(node.func.value)
        return (node, receiver + ".r" + text[len(receiver) + 1 :]) if text.startswith(receiver + ".sample") else None
    if (
        origin.kind == "rewrap"
        and isinstance(node, ast.Call)
        and len(node.args) == 1
        and not node.keywords
        and place.callee_full_name == "torch.tensor"
    ) and _is_flat(node.args[0]):
        library = source.flat(node.func).rpartition(".")[0] or "torch"
        return node.func, f"{library}.stack"
    return None


def _is_flat(node: ast.expr) -> bool:
    """A list of tensors, not of lists: `torch.stack` takes no other."""
    if isinstance(node, ast.ListComp):
        return not isinstance(node.elt, (ast.List, ast.Tuple, ast.ListComp))
    return isinstance(node, ast.List) and not any(isinstance(item, (ast.List, ast.Tuple, ast.ListComp)) for item in node.elts)


def _unless_wrapped(source: Source, node: ast.expr, inner: ast.expr) -> tuple[ast.AST, str] | None:
    """Dropping `.detach()` from `x.detach().numpy()` or from `Variable(x.data)` would not repair anything."""
    above = source.parents.get(node)
    if isinstance(above, ast.Attribute) and above.attr in ("numpy", "tolist", "item", "cpu", "data", "requires_grad_"):
        return None
    if isinstance(above, ast.Call) and node in above.args:
        full = source.flat(above.func).rpartition(".")[2]
        if full in ("Variable", "tensor", "as_tensor", "Parameter", "float", "int", "array", "asarray", "deepcopy"):
            return None
    return node, source.flat(inner)
