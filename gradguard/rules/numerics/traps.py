"""What went wrong in the op where values stopped being finite, in words: known traps get their own explanation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.diagnosis import Fix
from gradguard.evidence.graph import op_name
from gradguard.evidence.recompute import node_kind, signed
from gradguard.evidence.values import GraphValues
from gradguard.rules.numerics.divisors import zero_divisor
from gradguard.rules.numerics.origin import Origin
from gradguard.rules.numerics.ranges import elements, kinds, span, value_range


@dataclass
class Trap:
    """The explanation of one origin.

    Attributes:
        what: continues "`expression` ...": what it did with which numbers.
        why: why that is so, in a sentence or two.
        fixes: the recommended one first.
        underflowed: the node of an exponential that has become 0, and with it what was divided by.
    """

    what: str
    why: str
    fixes: list[Fix] = field(default_factory=list)
    avoid: list[str] = field(default_factory=list)
    underflowed: Any = None


@dataclass
class _Case:
    values: GraphValues
    origin: Origin

    @property
    def node(self) -> Any:
        return self.origin.node

    def operand(self, position: int = 0, slot: str = "self") -> torch.Tensor | None:
        found = self.values.input(self.node, position)
        if found is None:
            found = self.values.constants.get(self.node, {}).get(slot)
        return found

    def offending(self, operand: torch.Tensor | None) -> torch.Tensor | None:
        """The operand's finite elements that gave a non-finite result, for ops that work element by element."""
        out = self.origin.output
        if operand is None or out is None:
            return None
        with torch.no_grad():
            try:
                operand = operand.expand_as(out)
            except RuntimeError:
                return None
            found = operand[~torch.isfinite(out)]
            return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found

    @property
    def dtype(self) -> torch.dtype:
        return self.origin.output.dtype if self.origin.output is not None else torch.float32

    @property
    def share(self) -> str:
        return elements(self.origin.health.bad, self.origin.health.total)

    @property
    def result(self) -> str:
        return kinds(self.origin.health)

    def from_kind(self, position: int = 0) -> str:
        """The kind of the op that made an operand."""
        inputs = self.values.inputs.get(self.node, [])
        return node_kind(inputs[position].node) if position < len(inputs) and inputs[position].node is not None else ""


def _fix(title: str, detail: str | None = None) -> Fix:
    return Fix(title=title, safety="manual", detail=detail)


def _limit(dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.3g}"


def _log(case: _Case) -> Trap:
    bad = case.offending(case.operand())
    source = case.from_kind()
    fixes = []
    if source == "Softmax":
        fixes.append(_fix("use `log_softmax` of the logits in place of `log` of `softmax`"))
    elif source == "Sigmoid":
        fixes.append(_fix("use `F.logsigmoid` of the logits in place of `log` of `sigmoid`"))
    elif source == "Sum" or source == "Exp":
        fixes.append(_fix("use `torch.logsumexp`, which takes the largest exponent out before it sums"))
    if bad is not None and bad.numel() and bool((bad < 0).any()):
        fixes.append(_fix("keep the argument positive: learn its logarithm instead, or put it through `softplus` or `exp`"))
        return Trap(f"takes the log of a negative number ({span(bad)}) in {case.share}", "The log of a negative number is NaN.", fixes)
    fixes.append(
        _fix(
            "clamp the argument inside the log: `x.clamp(min=1e-8).log()`",
            "What is multiplied by 0 afterwards still counts: 0 times -inf is NaN, so a mask after the log does not help.",
        )
    )
    return Trap(
        f"takes the log of 0.0 in {case.share}" if bad is None or bad.numel() else f"gives {case.result} in {case.share}",
        "log(0) is -inf; with a factor of 0, as in 0·log 0, or in a difference of two such values it becomes NaN.",
        fixes,
    )


def _exp(case: _Case) -> Trap:
    bad = case.offending(case.operand())
    limit = {torch.float16: 11.09, torch.float64: 709.8}.get(case.dtype, 88.7)
    of = f" of {span(bad)}" if bad is not None and bad.numel() else ""
    return Trap(
        f"overflows: exp{of} in {case.share}",
        f"exp of more than {limit} is inf in {str(case.dtype).removeprefix('torch.')}; a later factor of 0 turns it into NaN (0·inf).",
        [
            _fix("bound the argument before exp: clamp it, mask it with 0 where it does not count, or subtract the maximum"),
            _fix("stay in logarithms (`logsumexp`, `log_softmax`) as long as possible"),
        ],
        ["multiplying by a mask after the exp: 0·inf is NaN"],
    )


def _div(case: _Case) -> Trap:
    divisor, dividend = case.operand(1, "other"), case.operand(0, "self")
    bad = case.offending(divisor)
    if bad is not None and bad.numel() and bool((bad == 0).all()):
        both = case.offending(dividend)
        zero = both is not None and bool((both == 0).all())
        fixes, underflowed = zero_divisor(case.values, case.node)
        return Trap(
            f"divides {'0.0 by 0.0' if zero else 'by 0.0'} in {case.share}",
            "0/0 is NaN and anything else divided by 0 is infinite.",
            fixes,
            underflowed=underflowed,
        )
    if bad is None and not case.origin.health.nan:
        return Trap(
            f"gives {case.result} in {case.share}",
            "A quotient is infinite where the divisor is 0 or far smaller than the dividend.",
            [_fix("keep the divisor away from 0 with `clamp(min=eps)`")],
        )
    return Trap(
        f"gives {case.result} in {case.share} (divisor {value_range(divisor) or 'not known'})",
        "The quotient leaves what the dtype can hold.",
        [_fix("keep the divisor away from 0 with `clamp(min=eps)`")],
    )


def _negative(name: str) -> Callable[[_Case], Trap]:
    def explain(case: _Case) -> Trap:
        bad = case.offending(case.operand())
        of = f" ({span(bad)})" if bad is not None and bad.numel() else ""
        return Trap(
            f"takes the {name} of a negative number{of} in {case.share}",
            f"The {name} of a negative number is NaN; rounding alone can push a value that should be 0 below it.",
            [_fix("clamp the argument at 0 or above before it: `x.clamp(min=0)`, or `min=1e-12` where it is differentiated")],
        )

    return explain


def _domain(name: str) -> Callable[[_Case], Trap]:
    def explain(case: _Case) -> Trap:
        bad = case.offending(case.operand())
        of = f" {span(bad)}" if bad is not None and bad.numel() else " a value outside [-1, 1]"
        return Trap(
            f"takes {name} of{of} in {case.share}",
            f"{name} is defined between -1 and 1; a cosine computed in floating point can leave that by rounding.",
            [
                _fix("clamp the argument: `x.clamp(-1 + 1e-7, 1 - 1e-7)` (at exactly ±1 the gradient is infinite)"),
                _fix("use `torch.atan2` of sine and cosine, which has no such edge"),
            ],
        )

    return explain


def _pow(case: _Case) -> Trap:
    base = case.operand(0, "self")
    exponent = getattr(case.node, "_saved_exponent", None)
    bad = case.offending(base)
    if bad is not None and bad.numel() and bool((bad < 0).any()) and case.origin.health.nan:
        return Trap(
            f"raises a negative number ({span(bad)}) to a fractional power in {case.share}",
            "Such a power has no real value: NaN.",
            [_fix("clamp the base at a small positive number, or use `x.abs()` with the sign put back")],
        )
    if bad is not None and bad.numel() and bool((bad == 0).all()):
        return Trap(
            f"raises 0.0 to a negative power in {case.share}",
            "That is a division by 0.",
            [_fix("keep the base away from 0: `x.clamp(min=eps)`")],
        )
    power = "" if isinstance(exponent, torch.Tensor) or exponent is None else f" to the power {exponent}"
    of = f" of {span(bad)}" if bad is not None and bad.numel() else ""
    return Trap(
        f"overflows{of}{power} in {case.share}",
        f"The result is larger than {case.dtype} can hold ({_limit(case.dtype)}).",
        [_fix("scale or bound the base before the power")],
    )


def _softmax(case: _Case) -> Trap:
    rows = case.origin.output
    dim = signed(getattr(case.node, "_saved_dim", -1))
    operand = case.operand()
    what = "its rows"
    count = ""
    if rows is not None:
        with torch.no_grad():
            bad = torch.isnan(rows).any(dim)
            if not bool(bad.any()) and bool((rows == -float("inf")).any()):
                return Trap(
                    "gives -inf for what is masked, and that reaches the loss",
                    "The logarithm of a probability of 0 is -inf. Whatever weighs it must leave it out: any weight above 0 makes it "
                    "infinite, and 0 times -inf is NaN.",
                    [
                        _fix("leave masked entries out of the sum: `torch.where(mask, weights * log_probs, 0.0)`"),
                        _fix("give the weight of masked entries to the others (label smoothing over the legal ones)"),
                    ],
                )
            count = f"{int(bad.sum())} of {bad.numel()} rows"
            if operand is not None and operand.shape == rows.shape:
                overflow = bool((operand == float("inf")).any())
                if overflow:
                    return Trap(
                        f"gets +inf and gives NaN in {count}",
                        "softmax subtracts the maximum, and inf - inf is NaN.",
                        [_fix("keep the scores finite before the softmax")],
                    )
    if case.origin.injected is None and operand is not None:
        return Trap(
            f"gives NaN in {count or what}",
            "softmax gives NaN where a whole row is -inf or a value is +inf or NaN.",
            [_fix("keep at least one finite score a row")],
        )
    return Trap(
        f"has {count or 'rows'} in which every entry is masked with -inf",
        "softmax over nothing but -inf is 0/0: NaN.",
        [
            _fix(
                "mask with a large finite negative number (`torch.finfo(scores.dtype).min`) in place of -inf",
                "The row then becomes uniform; set its result to 0 afterwards if it must not count.",
            ),
            _fix("keep at least one entry of every row unmasked, or leave fully masked rows out"),
            _fix("use `F.scaled_dot_product_attention`, which gives zeros for such rows"),
        ],
        ["`nan_to_num` after the softmax: the gradient through it is still NaN"],
    )


def _deviation(case: _Case) -> Trap:
    operand = case.operand()
    dim = getattr(case.node, "_saved_dim", None)
    count = None
    if operand is not None:
        dims = range(operand.dim()) if dim is None else signed(dim)
        count = 1
        for d in dims:
            count *= operand.shape[d]
    if count is not None and count <= 1:
        return Trap(
            f"takes the {op_name(case.node)} of {'one element' if count else 'no elements'}",
            "The unbiased estimate divides by n - 1: 0/0 for a single value.",
            [_fix("pass `correction=0` (or `unbiased=False`) if a single value must give 0"), _fix("leave batches or groups of one out")],
        )
    return _general(case)


def _mean(case: _Case) -> Trap:
    sizes = getattr(case.node, "_saved_self_sym_numel", None)
    operand = case.operand()
    if (
        (isinstance(sizes, int) and sizes == 0)
        or (operand is not None and operand.numel() == 0)
        or (operand is None and not case.origin.sure)
    ):
        return Trap(
            "averages an empty selection",
            "The mean of no elements is 0/0: NaN.",
            [_fix("skip the term when nothing is selected, or use a masked sum divided by `mask.sum().clamp(min=1)`")],
        )
    return _general(case)


def _product(case: _Case) -> Trap:
    left, right = case.operand(0, "self"), case.operand(1, "mat2" if node_kind(case.node) in ("Mm", "Bmm") else "other")
    if node_kind(case.node) == "Addmm":
        left, right = case.operand(1, "mat1"), case.operand(2, "mat2")
    sizes = [f"operands {text}" if i == 0 else text for i, text in enumerate(filter(None, (value_range(left), value_range(right))))]
    where = f" ({' and '.join(sizes)})" if sizes else ""
    half = case.dtype == torch.float16
    if case.origin.health.nan and case.origin.injected is not None:
        return Trap(
            f"multiplies 0 by an infinity in {case.share}",
            "0·inf is NaN.",
            [_fix("mask before the infinity arises, not by multiplying afterwards")],
        )
    return Trap(
        f"overflows {str(case.dtype).removeprefix('torch.')} in {case.share}{where}",
        f"{_limit(case.dtype)[0].upper()}{_limit(case.dtype)[1:]}.",
        [
            (
                _fix("scale the operands before the product, not its result")
                if half
                else _fix("bound or normalise the operands before the product")
            ),
            *([_fix("compute this in float32 or bfloat16: `with torch.autocast(..., enabled=False):`")] if half else []),
        ],
    )


def _nll(case: _Case) -> Trap:
    target = getattr(case.node, "_saved_target", None)
    ignore = signed(getattr(case.node, "_saved_ignore_index", -100))
    if isinstance(target, torch.Tensor) and (target.numel() == 0 or bool((target == ignore).all())):
        what = "gets an empty batch" if target.numel() == 0 else f"gets a batch whose targets are all `ignore_index` ({ignore})"
        return Trap(
            what,
            "The mean over no targets is 0/0: NaN.",
            [_fix("skip such batches, or use `reduction='sum'` divided by the number of targets, at least 1")],
        )
    return Trap(
        "picks the log-probability of a class that is masked with -inf",
        "The loss of a class with probability 0 is infinite.",
        [_fix("do not mask classes that occur as targets")],
    )


def _ctc(case: _Case) -> Trap:
    return Trap(
        f"cannot align a target with its input in {case.share}: the loss is inf",
        "A target needs at least as many input steps as labels, one more for each repeated label.",
        [_fix("pass `zero_infinity=True`"), _fix("leave out samples whose target is longer than their input")],
    )


def _general(case: _Case) -> Trap:
    ranges = [text for _, tensor in case.values.input_values(case.node) if (text := value_range(tensor)) is not None]
    of = f" of operands {' and '.join(ranges[:3])}" if ranges else ""
    if case.origin.health.nan and case.origin.injected is not None:
        return Trap(
            f"makes NaN in {case.share} of values that were set to an infinity on purpose",
            "inf - inf, 0·inf and inf/inf are NaN.",
            [_fix("use a large finite number in place of the infinity")],
        )
    return Trap(
        f"makes {case.result} in {case.share}{of}",
        "Its operands are finite and its result is not.",
        [_fix("bound the operands before this op")],
    )


_TRAPS: dict[str, Callable[[_Case], Trap]] = {
    "Log": _log,
    "Log2": _log,
    "Log10": _log,
    "Log1P": _log,
    "Xlogy": _log,
    "Exp": _exp,
    "Expm1": _exp,
    "Exp2": _exp,
    "Cosh": _exp,
    "Sinh": _exp,
    "Div": _div,
    "Reciprocal": _div,
    "Sqrt": _negative("square root"),
    "Rsqrt": _negative("inverse square root"),
    "Acos": _domain("acos"),
    "Asin": _domain("asin"),
    "Atanh": _domain("atanh"),
    "Erfinv": _domain("erfinv"),
    "Pow": _pow,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Std": _deviation,
    "Var": _deviation,
    "Mean": _mean,
    "Mm": _product,
    "Bmm": _product,
    "Addmm": _product,
    "Mv": _product,
    "Dot": _product,
    "Mul": _product,
    "Convolution": _product,
    "NllLoss": _nll,
    "NllLoss2D": _nll,
    "CtcLoss": _ctc,
}


def explain(values: GraphValues, origin: Origin) -> Trap:
    """The words for an op that made the first non-finite value."""
    case = _Case(values, origin)
    return _TRAPS.get(node_kind(origin.node), _general)(case)
