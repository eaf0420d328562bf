"""Ops whose derivative can be infinite or undefined where their value is fine, and how a saved value shows it.

Each entry says which saved value to look at and at which elements the derivative blows up. Ops whose derivative PyTorch
takes care of at such points (norm, atan2, angle, std of constant data, cdist) are not here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import has_memory, held_by_hook

Saved = dict[str, torch.Tensor]
Where = Callable[[Saved, dict[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class Risk:
    """One kind of node.

    Attributes:
        slots: the saved values that matter.
        where: the elements at which the derivative is not finite.
        says: what the derivative does there, in words; `{n}` of `{total}` elements comes after it.
        attributes: plain numbers of the node that `where` needs.
    """

    slots: tuple[str, ...]
    where: Where
    says: str
    attributes: tuple[str, ...] = ()


def _power(saved: Saved, plain: dict[str, Any]) -> torch.Tensor:
    base, exponent = saved["self"], plain.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent == 0:
        return torch.zeros((), dtype=torch.bool)
    if float(exponent).is_integer():
        return (base == 0) & (exponent < 1)
    return (base < 0) | ((base == 0) & (exponent < 1))


def _power_tensor(saved: Saved, plain: dict[str, Any]) -> torch.Tensor:
    base, exponent = saved["self"], saved["exponent"]
    return (base < 0) & (exponent != exponent.round()) | (base == 0) & (exponent < 1) & (exponent != 0)


def _equal_neighbours(values: torch.Tensor) -> torch.Tensor:
    """Neighbours in a sorted list that are the same up to rounding."""
    if values.shape[-1] < 2:
        return torch.zeros((), dtype=torch.bool)
    gap = (values[..., 1:] - values[..., :-1]).abs()
    scale = values.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    return gap <= scale * torch.finfo(values.dtype).eps


def _at(slot: str, *points: float) -> Where:
    def where(saved: Saved, plain: dict[str, Any]) -> torch.Tensor:
        value = saved[slot]
        found = value == points[0]
        for point in points[1:]:
            found = found | (value == point)
        return found

    return where


def _not_finite(slot: str) -> Where:
    return lambda saved, plain: ~torch.isfinite(saved[slot])


def _inverse_overflows(slot: str) -> Where:
    """Where 1/x is more than the type holds: at 0, and at the smallest numbers beside it."""
    return lambda saved, plain: torch.isinf(saved[slot].reciprocal())


RISKS: dict[str, Risk] = {
    "Sqrt": Risk(("result",), _at("result", 0.0), "the square root has an infinite slope at 0"),
    "Rsqrt": Risk(("result",), _not_finite("result"), "1/sqrt(x) is infinite at 0"),
    "Reciprocal": Risk(("result",), _not_finite("result"), "1/x is infinite at 0"),
    "Pow": Risk(("self", "exponent"), _power, "a power below 1 has an infinite slope at 0", ("exponent",)),
    "Log": Risk(("self",), _inverse_overflows("self"), "the slope of log, 1/x, is infinite at 0 and overflows right beside it"),
    "Log2": Risk(("self",), _inverse_overflows("self"), "the slope of log2 is infinite at 0 and overflows right beside it"),
    "Log10": Risk(("self",), _inverse_overflows("self"), "the slope of log10 is infinite at 0 and overflows right beside it"),
    "Log1P": Risk(("self",), _at("self", -1.0), "the slope of log1p is infinite at -1"),
    "Acos": Risk(("self",), lambda saved, plain: saved["self"].abs() >= 1, "acos has an infinite slope at -1 and 1"),
    "Asin": Risk(("self",), lambda saved, plain: saved["self"].abs() >= 1, "asin has an infinite slope at -1 and 1"),
    "Acosh": Risk(("self",), _at("self", 1.0), "acosh has an infinite slope at 1"),
    "Atanh": Risk(("self",), _at("self", 1.0, -1.0), "atanh is infinite at -1 and 1"),
    "Erfinv": Risk(("self",), _at("self", 1.0, -1.0), "erfinv is infinite at -1 and 1"),
    "Logit": Risk(("self",), _at("self", 1.0, 0.0), "logit is infinite at 0 and 1"),
    "Xlogy": Risk(("other",), _at("other", 0.0), "the slope of x*log(y) is infinite at y = 0"),
    "Div": Risk(("other",), _at("other", 0.0), "the quotient's slope is infinite where the divisor is 0"),
    "Exp": Risk(("result",), _not_finite("result"), "exp overflows there, and 0 times infinity is NaN"),
    "Expm1": Risk(("result",), _not_finite("result"), "expm1 overflows there, and 0 times infinity is NaN"),
    "Cosh": Risk(
        ("self",), lambda saved, plain: ~torch.isfinite(saved["self"].sinh()), "cosh overflows there, and 0 times infinity is NaN"
    ),
    "Sinh": Risk(
        ("self",), lambda saved, plain: ~torch.isfinite(saved["self"].cosh()), "sinh overflows there, and 0 times infinity is NaN"
    ),
    "Softmax": Risk(("result",), lambda saved, plain: torch.isnan(saved["result"]), "softmax of nothing but -inf is NaN"),
    "LogSoftmax": Risk(("result",), lambda saved, plain: torch.isnan(saved["result"]), "log_softmax of nothing but -inf is NaN"),
    "Logsumexp": Risk(("result",), _not_finite("result"), "logsumexp of nothing but -inf has no slope"),
    "Hypot": Risk(("result",), _at("result", 0.0), "hypot has no slope at (0, 0)"),
    "Lgamma": Risk(
        ("self",), lambda saved, plain: (saved["self"] <= 0) & (saved["self"] == saved["self"].round()), "lgamma is infinite at 0 and below"
    ),
    "Digamma": Risk(
        ("self",),
        lambda saved, plain: (saved["self"] <= 0) & (saved["self"] == saved["self"].round()),
        "digamma is infinite at 0 and below",
    ),
    "Std": Risk(("result",), lambda saved, plain: torch.isnan(saved["result"]), "the deviation of a single value is 0/0"),
    "Var": Risk(("self",), lambda saved, plain: ~torch.isfinite(saved["self"]), "the values are not finite"),
    "LinalgSvd": Risk(
        ("S",),
        lambda saved, plain: _equal_neighbours(saved["S"]),
        "the derivative of singular vectors divides by differences of singular values, and some of these are equal",
    ),
    "LinalgEigh": Risk(
        ("eigenvalues",),
        lambda saved, plain: _equal_neighbours(saved["eigenvalues"]),
        "the derivative of eigenvectors divides by differences of eigenvalues, and some of these are equal",
    ),
    "Cumprod": Risk(("result",), _not_finite("result"), "the product overflows there"),
    "Prod": Risk(("result",), _not_finite("result"), "the product overflows there"),
    "CtcLoss": Risk(("result0",), _not_finite("result0"), "the target cannot be aligned with the input, its loss is infinite"),
}


@dataclass
class Held:
    """The saved values of one risky node, kept until its backward has run."""

    node: Any
    kind: str
    saved: Saved
    plain: dict[str, Any]

    def count(self) -> tuple[int, int]:
        """At how many elements, of how many, the derivative is not finite."""
        try:
            with torch.no_grad():
                found = RISKS[self.kind].where(self.saved, self.plain)
                return int(found.sum()), max(1, found.numel())
        except internal_error():
            return 0, 1

    def only_beside(self) -> bool:
        """Whether it is a logarithm of numbers next to 0, none of which is 0."""
        return self.kind in ("Log", "Log2", "Log10") and not bool((self.saved["self"] == 0).any())


def hold(node: Any, kind: str) -> Held | None:
    """Takes hold of what tells whether the derivative of a node (of this kind) is finite; None for nodes that cannot be trouble."""
    risk = RISKS.get(kind)
    if risk is None:
        return None
    plain: dict[str, Any] = {}
    saved: Saved = {}
    for name in risk.slots:
        if held_by_hook(node, name):  # unpacking would run the hook: a checkpoint would compute its block again
            return None
        try:
            value = getattr(node, f"_saved_{name}")
        except internal_error():
            return None
        if isinstance(value, torch.Tensor):
            if not has_memory(value):
                return None
            saved[name] = value.detach()
        elif value is not None:
            plain[name] = value
    if kind == "Pow" and "exponent" in saved:
        if "self" not in saved:
            return None
        return Held(node, "PowTensor", saved, plain)
    exponent = plain.get("exponent")
    if kind == "Pow" and (not isinstance(exponent, (int, float)) or (float(exponent).is_integer() and exponent >= 1)):
        return None
    if not saved:
        return None
    if (
        kind == "Div"
        and saved["other"].dim() == 0
        and not saved["other"].requires_grad
        and saved["other"].device.type == "cpu"
        and float(saved["other"]) != 0
    ):
        return None
    return Held(node, kind, saved, plain)


RISKS["PowTensor"] = Risk(("self", "exponent"), _power_tensor, "a power below 1 has an infinite slope at 0")
