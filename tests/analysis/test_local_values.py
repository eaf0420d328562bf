"""What variables of a function are where they are read, as far as what the function was given tells."""

from __future__ import annotations

import ast

import pytest
import torch

from gradguard.analysis.live.local_values import LocalValues
from gradguard.analysis.live.tensor_expressions import UNKNOWN
from tests.analysis.program.programs import function, program

X = torch.arange(6.0).view(2, 3)
GIVEN = {"x": X, "c.on": True, "c.off": False, "n": 2}
VALUES: dict[str, tuple[str, object]] = {
    "a parameter": ("return x", X),
    "through variables": ("y = x * n\n    z = y + 1\n    return z", X * 2 + 1),
    "the branch that ran": ("y = x\n    if c.on:\n        y = x.sum()\n    return y", X.sum()),
    "the branch that did not": ("y = x\n    if c.off:\n        y = x.sum()\n    return y", X),
    "either branch": ("y = x\n    if c.other:\n        y = x.sum()\n    return y", UNKNOWN),
    "left before": ("y = x\n    if c.on:\n        return y\n    return x.sum()", X),
    "an operator in place": ("y = x\n    y -= 1\n    return y", X - 1),
    "unpacked": ("a, b = x, n\n    return b", 2),
    "part of a tuple": ("a, b = x.max(1)\n    return c.other", UNKNOWN),
    "if no exception came": ("y = n\n    try:\n        y = 3\n    except E:\n        pass\n    return y", UNKNOWN),
    "in a loop": ("y = n\n    for i in range(3):\n        y = y + 1\n    return y", UNKNOWN),
    "a loop that asks for what it changes": ("y = n\n    while y > 0:\n        y = y - 1\n    return y", UNKNOWN),
    "what the module has": ("return k + n", 7),
}


def _asked(body: str, given: dict[str, object]) -> tuple[LocalValues, list[ast.expr]]:
    asked = program("def f(c, x, n):\n    " + body)
    values = LocalValues(asked, function(asked, "f"), given, {"k": 5})
    return values, [each for each in asked.returns(function(asked, "f")) if values.can_run(each)]


@pytest.mark.parametrize(("body", "wanted"), VALUES.values(), ids=VALUES)
def test_what_is_returned(body: str, wanted: object) -> None:
    values, returned = _asked(body, GIVEN)
    found = values.of(returned[0])
    assert torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found is wanted or found == wanted


def test_of_what_is_written_into_only_the_shape_is_known() -> None:
    values, (returned,) = _asked("y = x.clone()\n    y[0] = 1\n    return y", GIVEN)
    found = values.of(returned)
    assert (found.shape, found.device.type) == (X.shape, "meta")


def test_returns_under_a_condition_that_is_not_known_can_both_have_run() -> None:
    values, returned = _asked("if c.other:\n        return x\n    return n", GIVEN)
    assert [values.of(each) is not UNKNOWN for each in returned] == [True, True]
