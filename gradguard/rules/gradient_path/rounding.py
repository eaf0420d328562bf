"""Values that are rounded before their path is cut: the repair has to begin in front of the rounding, whose derivative is zero."""

from __future__ import annotations

import ast

from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.places.source import assignments_to, dotted
from gradguard.analysis.program.expressions import last_part
from gradguard.analysis.program.syntax import Source

_ROUNDING = frozenset({"round", "floor", "ceil", "trunc", "fix", "sign", "heaviside", "round_", "floor_", "ceil_", "trunc_"})
_AROUND = frozenset({
    "clamp", "clip", "clamp_min", "clamp_max", "squeeze", "unsqueeze", "view", "reshape", "flatten", "float", "to", "contiguous", "relu",
    "abs",
})  # fmt: skip
_DEEP = 12


def before_rounding(origin: Origin) -> tuple[str, str] | None:
    """What went into the rounding that the cut value comes from, and what rounds it; None where nothing is seen to."""
    place = origin.place
    node = None if place is None else place.node
    if place is None or place.source is None or not isinstance(node, ast.Call):
        return None
    value = _operand(place.source, node)
    rounding: str | None = None
    kept: ast.expr | None = None
    for _ in range(_DEEP):
        if isinstance(value, ast.Name) and place.enclosing_function is not None:
            made = assignments_to(place.enclosing_function, value.id)
            first = made[0] if len(made) == 1 else None
            if not isinstance(first, ast.Assign) or len(first.targets) != 1 or not isinstance(first.targets[0], ast.Name):
                break
            if (first.lineno, first.col_offset) >= (node.lineno, node.col_offset):
                break
            value = first.value
            continue
        if not isinstance(value, ast.Call):
            break
        name = last_part(value)
        if name in _ROUNDING:
            rounding = name
            kept = _operand(place.source, value)
        elif name not in _AROUND:
            break
        value = _operand(place.source, value)
    return None if rounding is None or kept is None else (place.source.flat(kept), rounding)


def _operand(source: Source, call: ast.Call) -> ast.expr | None:
    """The tensor that a call works on: the receiver of a method, the first argument of a function."""
    base = (dotted(call.func) or "").partition(".")[0]
    if isinstance(call.func, ast.Attribute) and base not in source.imports:
        return call.func.value
    return call.args[0] if call.args else None
