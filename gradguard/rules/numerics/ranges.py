"""Numbers in words: which elements, of how many, how large."""

from __future__ import annotations

import torch

from gradguard.analysis.graph.node_values import Health, plain


def number(value: float) -> str:
    """A value as a person would write it: `0.0`, `-0.0123`, `1.2e+04`."""
    if value == 0:
        return "0.0"
    return f"{value:.4g}"


def elements(count: int, total: int) -> str:
    """`3 of 512 elements`; `its only element`."""
    if total == 1:
        return "its only element"
    return f"all {total} elements" if count == total else f"{count} of {total} elements"


def span(values: torch.Tensor) -> str:
    """`0.0`, or `-3.2 to 812.4`."""
    if not values.numel():
        return "nothing"
    low, high = float(values.min()), float(values.max())
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def value_range(tensor: torch.Tensor | None) -> str | None:
    """The range of a tensor's finite elements, with what is not finite counted beside it."""
    value = None if tensor is None else plain(tensor)
    if value is None or not value.is_floating_point() or not value.numel():
        return None
    with torch.no_grad():
        finite = value[torch.isfinite(value)]
        text = span(finite.float() if finite.dtype in (torch.float16, torch.bfloat16) else finite) if finite.numel() else "no finite value"
        bad = value.numel() - finite.numel()
    return text if not bad else f"{text}, and {elements(bad, value.numel())} not finite"


def kinds(found: Health) -> str:
    """`NaN`, `inf`, `-inf`, or several of them."""
    parts = [word for word, count in (("NaN", found.nan), ("inf", found.inf), ("-inf", found.neginf)) if count]
    return " and ".join(parts) if len(parts) < 3 else "NaN and infinities"
