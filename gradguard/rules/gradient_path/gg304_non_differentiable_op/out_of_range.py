"""A parameter all of whose elements lie outside the range it is clamped to: no gradient comes back. Part of GG304."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gradguard.analysis.graph.walk import is_accumulate
from gradguard.core.diagnosis import Fix

# nodes, and the names under which they have saved the bounds
_BOUNDS = {
    "ClampBackward1": ("_saved_min", "_saved_max"),
    "ClampMinBackward0": ("_saved_min", None),
    "ClampMaxBackward0": (None, "_saved_max"),
    "HardtanhBackward0": ("_saved_min_val", "_saved_max_val"),
}


class Outside(NamedTuple):
    """What the parameter's values and the bounds are."""

    lowest: float
    highest: float
    low: float | None
    high: float | None

    def told(self) -> str:
        """Why it can never come back by itself, in a sentence or two."""
        values = f"{self.lowest:.4g}" if self.lowest == self.highest else f"{self.lowest:.4g} to {self.highest:.4g}"
        if self.low is not None and self.highest < self.low:
            bounds = f"below {self.low:.4g}"
        elif self.high is not None and self.lowest > self.high:
            bounds = f"above {self.high:.4g}"
        else:
            bounds = f"outside {self.low:.4g} to {self.high:.4g}"
        return (
            f"All of its values ({values}) lie {bounds}, where the clamp is flat: it passes no gradient, so nothing of the loss "
            "reaches the parameter, step after step, without an error."
        )

    def fix(self) -> Fix:
        """Where it should start, or how it is bounded softly."""
        return Fix(
            title="Start the parameter inside the range, or bound it smoothly: `low + (high - low) * torch.sigmoid(x)`",
            safety="manual",
        )


def outside(node: Any) -> Outside | None:
    """Whether a node clamps a leaf of which no element passes."""
    names = _BOUNDS.get(node.name())
    if names is None:
        return None
    source = next((source for source, _ in node.next_functions if source is not None), None)
    leaf = getattr(source, "variable", None) if source is not None and is_accumulate(source) else None
    if not isinstance(leaf, torch.nn.Parameter) or not leaf.numel():
        return None
    low, high = (None if name is None else _number(getattr(node, name, None)) for name in names)
    if low is None and high is None:
        return None
    values = leaf.detach()
    inside = torch.ones_like(values, dtype=torch.bool)
    if low is not None:
        inside &= values >= low
    if high is not None:
        inside &= values <= high
    if bool(inside.any()) or not bool(torch.isfinite(values).all()):
        return None
    return Outside(float(values.min()), float(values.max()), low, high)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
