"""An inverse square root that is not finite: of zero it is infinite, of a negative number NaN."""

from __future__ import annotations

import torch

from gradguard.rules.numerics.gg501_nonfinite_forward.trap_cases import Case, Trap, fix_of
from gradguard.rules.numerics.ranges import span

_SMALL = 1e-7  # below the smallest float16 above 0, which is 6e-8, or near it


def inverse_root(case: Case) -> Trap:
    """Told apart by the result, where the operand is not known."""
    bad = case.offending(case.operand())
    known = bad is not None and bad.numel() > 0
    if case.origin.health.nan == 0 or (known and bad is not None and bool((bad == 0).all())):
        half = case.dtype == torch.float16
        why = "1/sqrt(0) is infinite, and infinity times 0 is NaN. "
        why += f"Below {_SMALL:g} float16 has only 0: an eps of 1e-8 added in float16 is not there." if half else ""
        title = "add an eps under the root that the dtype can hold (`1e-5`), or compute the norm in float32 (`x.float()`)"
        return Trap(f"takes the inverse square root of 0 in {case.share}", why.rstrip(), [fix_of(title)])
    of = f" ({span(bad)})" if known and bad is not None else ""
    return Trap(
        f"takes the inverse square root of a negative number{of} in {case.share}",
        "The inverse square root of a negative number is NaN; rounding alone can push a value that should be 0 below it.",
        [fix_of("clamp the argument above 0 before it: `x.clamp(min=1e-12)`")],
    )
