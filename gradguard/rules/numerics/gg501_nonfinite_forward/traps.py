"""What went wrong in the op where values stopped being finite, in words: known traps get their own explanation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradguard.analysis.graph.node_values import GraphValues
from gradguard.analysis.graph.recompute import node_kind, signed
from gradguard.analysis.graph.walk import op_name
from gradguard.rules.numerics.first_nonfinite import Origin
from gradguard.rules.numerics.gg501_nonfinite_forward.divisors import zero_divisor
from gradguard.rules.numerics.gg501_nonfinite_forward.roots import inverse_root
from gradguard.rules.numerics.gg501_nonfinite_forward.trap_cases import Case, Trap, fix_of, limit_of
from gradguard.rules.numerics.ranges import span, value_range


def _log(case: Case) -> Trap:
    bad = case.offending(case.operand())
    source = case.from_kind()
    fixes = []
    masked = source == "Softmax" and _is_masked(case)
    if source == "Softmax" and not masked:
        fixes.append(fix_of("use `log_softmax` of the logits in place of `log` of `softmax`"))
    elif source == "Sigmoid":
        fixes.append(fix_of("use `F.logsigmoid` of the logits in place of `log` of `sigmoid`"))
    elif source == "Sum" or source == "Exp":
        fixes.append(fix_of("use `torch.logsumexp`, which takes the largest exponent out before it sums"))
    if bad is not None and bad.numel() and bool((bad < 0).any()):
        fixes.append(fix_of("keep the argument positive: learn its logarithm instead, or put it through `softplus` or `exp`"))
        return Trap(f"takes the log of a negative number ({span(bad)}) in {case.share}", "The log of a negative number is NaN.", fixes)
    fixes.append(
        fix_of(
            "clamp the argument inside the log: `x.clamp(min=1e-8).log()`",
            "What is multiplied by 0 afterwards still counts: 0 times -inf is NaN, so a mask after the log does not help.",
        )
    )
    avoid = [
        "`log_softmax` here: the probability of what is masked with -inf stays 0, and 0 times -inf is NaN",
        "`torch.special.entr` or `xlogy`: the value is finite, but the slope at 0 is infinite, and the softmax makes NaN of it in backward",
    ]
    return Trap(
        f"takes the log of 0.0 in {case.share}" if bad is None or bad.numel() else f"gives {case.result} in {case.share}",
        "log(0) is -inf; with a factor of 0, as in 0·log 0, or in a difference of two such values it becomes NaN.",
        fixes,
        avoid if masked else [],
    )


def _is_masked(case: Case) -> bool:
    """Whether the softmax behind the log was given -inf, as masks do: its zeros are no matter of rounding then."""
    inputs = case.values.inputs.get(case.node, [])
    softmax = inputs[0].node if inputs else None
    scores = None if softmax is None else case.values.input(softmax, 0)
    if scores is not None:
        return bool(torch.isneginf(scores).any())
    made = case.values.inputs.get(softmax, [])
    return bool(made) and made[0].node is not None and node_kind(made[0].node) in ("MaskedFill", "Where")


def _exp(case: Case) -> Trap:
    bad = case.offending(case.operand())
    limit = {torch.float16: 11.09, torch.float64: 709.8}.get(case.dtype, 88.7)
    of = f" of {span(bad)}" if bad is not None and bad.numel() else ""
    return Trap(
        f"overflows: exp{of} in {case.share}",
        f"exp of more than {limit} is inf in {str(case.dtype).removeprefix('torch.')}; a later factor of 0 turns it into NaN (0·inf).",
        [
            fix_of("bound the argument before exp: clamp it, mask it with 0 where it does not count, or subtract the maximum"),
            fix_of("stay in logarithms (`logsumexp`, `log_softmax`) as long as possible"),
        ],
        ["multiplying by a mask after the exp: 0·inf is NaN"],
    )


def _div(case: Case) -> Trap:
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
            [fix_of("keep the divisor away from 0 with `clamp(min=eps)`")],
        )
    return Trap(
        f"gives {case.result} in {case.share} (divisor {value_range(divisor) or 'not known'})",
        "The quotient leaves what the dtype can hold.",
        [fix_of("keep the divisor away from 0 with `clamp(min=eps)`")],
    )


def _negative(name: str) -> Callable[[Case], Trap]:
    def explain(case: Case) -> Trap:
        bad = case.offending(case.operand())
        of = f" ({span(bad)})" if bad is not None and bad.numel() else ""
        return Trap(
            f"takes the {name} of a negative number{of} in {case.share}",
            f"The {name} of a negative number is NaN; rounding alone can push a value that should be 0 below it.",
            [fix_of("clamp the argument at 0 or above before it: `x.clamp(min=0)`, or `min=1e-12` where it is differentiated")],
        )

    return explain


def _domain(name: str) -> Callable[[Case], Trap]:
    def explain(case: Case) -> Trap:
        bad = case.offending(case.operand())
        of = f" {span(bad)}" if bad is not None and bad.numel() else " a value outside [-1, 1]"
        return Trap(
            f"takes {name} of{of} in {case.share}",
            f"{name} is defined between -1 and 1; a cosine computed in floating point can leave that by rounding.",
            [
                fix_of("clamp the argument: `x.clamp(-1 + 1e-7, 1 - 1e-7)` (at exactly ±1 the gradient is infinite)"),
                fix_of("use `torch.atan2` of sine and cosine, which has no such edge"),
            ],
        )

    return explain


def _pow(case: Case) -> Trap:
    base = case.operand(0, "self")
    exponent = getattr(case.node, "_saved_exponent", None)
    bad = case.offending(base)
    if bad is not None and bad.numel() and bool((bad < 0).any()) and case.origin.health.nan:
        return Trap(
            f"raises a negative number ({span(bad)}) to a fractional power in {case.share}",
            "Such a power has no real value: NaN.",
            [fix_of("clamp the base at a small positive number, or use `x.abs()` with the sign put back")],
        )
    if bad is not None and bad.numel() and bool((bad == 0).all()):
        return Trap(
            f"raises 0.0 to a negative power in {case.share}",
            "That is a division by 0.",
            [fix_of("keep the base away from 0: `x.clamp(min=eps)`")],
        )
    power = "" if isinstance(exponent, torch.Tensor) or exponent is None else f" to the power {exponent}"
    of = f" of {span(bad)}" if bad is not None and bad.numel() else ""
    return Trap(
        f"overflows{of}{power} in {case.share}",
        f"The result is larger than {case.dtype} can hold ({limit_of(case.dtype)}).",
        [fix_of("scale or bound the base before the power")],
    )


def _softmax(case: Case) -> Trap:
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
                        fix_of("leave masked entries out of the sum: `torch.where(mask, weights * log_probs, 0.0)`"),
                        fix_of("give the weight of masked entries to the others (label smoothing over the legal ones)"),
                    ],
                )
            count = f"{int(bad.sum())} of {bad.numel()} rows"
            if operand is not None and operand.shape == rows.shape:
                overflow = bool((operand == float("inf")).any())
                if overflow:
                    return Trap(
                        f"gets +inf and gives NaN in {count}",
                        "softmax subtracts the maximum, and inf - inf is NaN.",
                        [fix_of("keep the scores finite before the softmax")],
                    )
    if case.origin.injected is None and operand is not None:
        return Trap(
            f"gives NaN in {count or what}",
            "softmax gives NaN where a whole row is -inf or a value is +inf or NaN.",
            [fix_of("keep at least one finite score a row")],
        )
    return Trap(
        f"has {count or 'rows'} in which every entry is masked with -inf",
        "softmax over nothing but -inf is 0/0: NaN.",
        [
            fix_of(
                "mask with a large finite negative number (`torch.finfo(scores.dtype).min`) in place of -inf",
                "The row then becomes uniform; set its result to 0 afterwards if it must not count.",
            ),
            fix_of("keep at least one entry of every row unmasked, or leave fully masked rows out"),
            fix_of("use `F.scaled_dot_product_attention`, which gives zeros for such rows"),
        ],
        # the backward of `masked_fill` and `where` puts zeros in the place of NaN, that of an added mask does not
        []
        if case.origin.injected is not None and node_kind(case.origin.injected) in ("MaskedFill", "Where")
        else ["`nan_to_num` after the softmax: the gradient through it is still NaN"],
        masked=case.origin.injected is not None,
    )


def _deviation(case: Case) -> Trap:
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
            [
                fix_of("pass `correction=0` (or `unbiased=False`) if a single value must give 0"),
                fix_of("leave batches or groups of one out"),
            ],
        )
    return _general(case)


def _mean(case: Case) -> Trap:
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
            [fix_of("skip the term when nothing is selected, or use a masked sum divided by `mask.sum().clamp(min=1)`")],
        )
    return _general(case)


def _product(case: Case) -> Trap:
    left, right = case.operand(0, "self"), case.operand(1, "mat2" if node_kind(case.node) in ("Mm", "Bmm") else "other")
    if node_kind(case.node) == "Addmm":
        left, right = case.operand(1, "mat1"), case.operand(2, "mat2")
    if (left is None or right is None) and not case.origin.sure and not case.origin.health.nan:
        return Trap(
            f"gives {case.result} in {case.share}, of an operand whose value is not known",
            "Either the product overflows or this operand was infinite already.",
            [fix_of("print the operands of this product; bound or normalise the one that is not finite where it is made")],
        )
    sizes = [f"operands {text}" if i == 0 else text for i, text in enumerate(filter(None, (value_range(left), value_range(right))))]
    where = f" ({' and '.join(sizes)})" if sizes else ""
    half = case.dtype == torch.float16
    if case.origin.health.nan and case.origin.injected is not None:
        return Trap(
            f"multiplies 0 by an infinity in {case.share}",
            "0·inf is NaN.",
            [fix_of("mask before the infinity arises, not by multiplying afterwards")],
        )
    return Trap(
        f"overflows {str(case.dtype).removeprefix('torch.')} in {case.share}{where}",
        f"{limit_of(case.dtype)[0].upper()}{limit_of(case.dtype)[1:]}.",
        [
            (
                fix_of("scale the operands before the product, not its result")
                if half
                else fix_of("bound or normalise the operands before the product")
            ),
            *([fix_of("compute this in float32 or bfloat16: `with torch.autocast(..., enabled=False):`")] if half else []),
        ],
    )


def _sum(case: Case) -> Trap:
    text = value_range(case.operand())
    if case.origin.health.nan or text is None:
        return _general(case)
    half = case.dtype == torch.float16
    return Trap(
        f"overflows {str(case.dtype).removeprefix('torch.')} in {case.share}: it adds up {text}",
        f"{limit_of(case.dtype)[0].upper()}{limit_of(case.dtype)[1:]}.",
        [
            *([fix_of("compute this in float32: `.float()` before the sum, or before what is summed")] if half else []),
            fix_of("take the mean in place of the sum, or scale what is summed"),
        ],
    )


def _determinant(case: Case) -> Trap:
    return Trap(
        f"takes the log of a determinant that is {'0' if not case.origin.health.nan else 'negative'} in {case.share}",
        "The determinant of a singular matrix (rows that agree, or more rows than dimensions) is 0, and rounding can make it negative: "
        "the log is -inf or NaN, and the gradient, which is the inverse, infinite.",
        [fix_of("add a small multiple of the identity to the matrix before: `matrix + eps * torch.eye(n)`")],
    )


def _where(case: Case) -> Trap:
    """`torch.logdet` puts NaN in where the determinant is negative."""
    return _determinant(case) if "LinalgSlogdet" in (case.from_kind(0), case.from_kind(1)) else _general(case)


def _nll(case: Case) -> Trap:
    target = getattr(case.node, "_saved_target", None)
    ignore = signed(getattr(case.node, "_saved_ignore_index", -100))
    if isinstance(target, torch.Tensor) and (target.numel() == 0 or bool((target == ignore).all())):
        what = "gets an empty batch" if target.numel() == 0 else f"gets a batch whose targets are all `ignore_index` ({ignore})"
        return Trap(
            what,
            "The mean over no targets is 0/0: NaN.",
            [fix_of("skip such batches, or use `reduction='sum'` divided by the number of targets, at least 1")],
        )
    return Trap(
        "picks the log-probability of a class that is masked with -inf",
        "The loss of a class with probability 0 is infinite.",
        [fix_of("do not mask classes that occur as targets")],
    )


def _ctc(case: Case) -> Trap:
    return Trap(
        f"cannot align a target with its input in {case.share}: the loss is inf",
        "A target needs at least as many input steps as labels, one more for each repeated label.",
        [fix_of("pass `zero_infinity=True`"), fix_of("leave out samples whose target is longer than their input")],
    )


def _general(case: Case) -> Trap:
    ranges = [text for _, tensor in case.values.input_values(case.node) if (text := value_range(tensor)) is not None]
    of = f" of operands {' and '.join(ranges[:3])}" if ranges else ""
    if case.origin.health.nan and case.origin.injected is not None:
        return Trap(
            f"makes NaN in {case.share} of values that were set to an infinity on purpose",
            "inf - inf, 0·inf and inf/inf are NaN.",
            [fix_of("use a large finite number in place of the infinity")],
        )
    return Trap(
        f"makes {case.result} in {case.share}{of}",
        "Its operands are finite and its result is not.",
        [fix_of("bound the operands before this op")],
    )


_TRAPS: dict[str, Callable[[Case], Trap]] = {
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
    "Rsqrt": inverse_root,
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
    "Sum": _sum,
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
    "LinalgSlogdet": _determinant,
    "Where": _where,
}


def explain(values: GraphValues, origin: Origin) -> Trap:
    """The words for an op that made the first non-finite value."""
    case = Case(values, origin)
    return _TRAPS.get(node_kind(origin.node), _general)(case)
