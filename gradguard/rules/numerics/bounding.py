"""Patches that keep the argument of exp, log, sqrt, acos and their like inside what the function can take."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Fix
from gradguard.fixes.at_places import applied_to, spelt
from gradguard.fixes.edits import replaced

# by kind of node: what is put on the argument, far inside the range in which float32 is finite
_BOUNDS = {
    "Exp": ".clamp(max=20.0)",
    "Expm1": ".clamp(max=20.0)",
    "Log": ".clamp(min=1e-8)",
    "Log2": ".clamp(min=1e-8)",
    "Log10": ".clamp(min=1e-8)",
    "Sqrt": ".clamp(min=1e-12)",
    "Rsqrt": ".clamp(min=1e-12)",
    "Acos": ".clamp(-1 + 1e-6, 1 - 1e-6)",
    "Asin": ".clamp(-1 + 1e-6, 1 - 1e-6)",
}


def finitely_masked(place: ResolvedSite | None, fixes: list[Fix]) -> list[Fix]:
    """The fixes, with a patch for the first one where `x.masked_fill(mask, -inf)` is written at the place: the dtype's lowest number."""
    call = None if place is None else place.call
    if place is None or place.source is None or call is None or not fixes or not isinstance(call.func, ast.Attribute):
        return fixes
    values = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "value")]
    lowest = spelt(place.source, "torch.finfo")
    holder = call.func.value
    if call.func.attr not in ("masked_fill", "masked_fill_") or len(values) != 1 or lowest is None:
        return fixes
    if not isinstance(holder, (ast.Name, ast.Attribute)):  # it would be computed twice
        return fixes
    patch = replaced(place.source, [(values[0], f"{lowest}({place.source.flat(holder)}.dtype).min")])
    return [fixes[0].model_copy(update={"patch": patch, "safety": "unsafe"}), *fixes[1:]]


def safe_inside(place: ResolvedSite | None, choice: ResolvedSite | None, fix: Fix) -> Fix:
    """The fix with a patch, where a function and the `torch.where` that picks among its results stand in one expression.

    The argument becomes 1 where its result is not taken: `torch.where(ok, torch.where(ok, x, 1.0).sqrt(), 0.0)`.
    """
    node, call = (None, None) if place is None or choice is None else (place.node, choice.call)
    if place is None or choice is None or place.source is None or place.source is not choice.source or node is None or call is None:
        return fix
    source, where = place.source, place.source.flat(call.func)
    if len(call.args) != 3 or call.keywords or where.rpartition(".")[2] != "where" or not _is_torchs(source, where):
        return fix
    above = {id(node), *(id(each) for each in source.ancestors(node))}
    branch = next((i for i in (1, 2) if id(call.args[i]) in above), 0)
    argument = node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) else _argument(place, node)
    if not branch or not isinstance(argument, (ast.Name, ast.Attribute)):
        return fix
    condition, text = source.flat(call.args[0]), source.flat(argument)
    safe = f"{where}({condition}, {text}, 1.0)" if branch == 1 else f"{where}({condition}, 1.0, {text})"
    return fix.model_copy(update={"patch": replaced(source, [(argument, safe)]), "safety": "unsafe"})


def _is_torchs(source: Source, name: str) -> bool:
    first, _, rest = name.partition(".")
    return f"{source.imports.get(first, '')}.{rest}".rstrip(".") == "torch.where"


def _argument(place: ResolvedSite, node: ast.AST) -> ast.expr | None:
    """What a function of one tensor is called on: `x` of `x.sqrt()` and of `torch.sqrt(x)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or place.source is None or node.keywords:
        return None
    library = isinstance(node.func.value, ast.Name) and node.func.value.id in place.source.imports
    argument = node.args[0] if library and len(node.args) == 1 else node.func.value if not library and not node.args else None
    return None if isinstance(argument, ast.Starred) else argument


def bounded(kind: str, place: ResolvedSite | None, fixes: list[Fix]) -> list[Fix]:
    """The fixes, with a patch for the first one where the call of the function and its argument are written at the place."""
    bound, node = _BOUNDS.get(kind), None if place is None else place.node
    if bound is None or not fixes or fixes[0].patch is not None or place is None or place.source is None:
        return fixes
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr.rstrip("_") != kind.lower():
        return fixes
    argument = _argument(place, node)
    if argument is None:
        return fixes
    text = applied_to(place.source, argument, "{}" + bound)
    patch = None if text is None else replaced(place.source, [(argument, text)])
    if text is None or patch is None:
        return fixes
    detail = " ".join(part for part in (fixes[0].detail, f"The patch bounds it: `{' '.join(text.split())}`.") if part)
    return [fixes[0].model_copy(update={"patch": patch, "safety": "unsafe", "detail": detail}), *fixes[1:]]
