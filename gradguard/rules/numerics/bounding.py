"""Patches that keep the argument of exp, log, sqrt, acos and their like inside what the function can take."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import ResolvedSite
from gradguard.core.diagnosis import Fix
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


def bounded(kind: str, place: ResolvedSite | None, fixes: list[Fix]) -> list[Fix]:
    """The fixes, with a patch for the first one where the call of the function and its argument are written at the place."""
    bound, node = _BOUNDS.get(kind), None if place is None else place.node
    if bound is None or not fixes or fixes[0].patch is not None or place is None or place.source is None:
        return fixes
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr.rstrip("_") != kind.lower():
        return fixes
    library = isinstance(node.func.value, ast.Name) and node.func.value.id in place.source.imports
    argument = node.args[0] if library and len(node.args) == 1 else node.func.value if not library and not node.args else None
    if argument is None or isinstance(argument, ast.Starred):
        return fixes
    text = place.source.flat(argument)
    text = text if isinstance(argument, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) or text.startswith("(") else f"({text})"
    patch = replaced(place.source, [(argument, f"{text}{bound}")])
    detail = " ".join(part for part in (fixes[0].detail, f"The patch bounds it: `{text}{bound}`.") if part)
    return [fixes[0].model_copy(update={"patch": patch, "safety": "unsafe", "detail": detail}), *fixes[1:]]
