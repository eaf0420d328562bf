"""Data that a division by zero has spoilt: the line that divides, whatever it is called and where it stands; no draw is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest
from numerics_programs_broken import HEAD
from test_numerics import check, run

from gradguard.analysis.live.tensor_expressions import UNKNOWN, Evaluator, of_shape

_TAIL = """
net = nn.Linear(4, 1)
loss = net(x).pow(2).mean()
loss.backward()
"""
_SCALED = {
    "bound_to_the_same_name": """
x = torch.randn(16, 4)
x[:, 2] = 3.0
low, high = x.min(0).values, x.max(0).values
x = (x - low) / (high - low)  # CULPRIT
""",
    "in_a_function_with_a_default": """
def share(counts, total, offset=0.0):
    return counts / (total + offset)  # CULPRIT
counts = torch.zeros(4)
x = share(counts, counts.sum()).expand(8, 4)
""",
    "in_a_function_by_keyword": """
def ratio(up, *, down):
    return 1.0 + up / down.clamp(min=0)  # CULPRIT
ups = torch.zeros(8, 4)
x = ratio(ups, down=ups.abs())
""",
}


@pytest.mark.parametrize("slug", _SCALED)
def test_the_division_is_named(slug: str, tmp_path: Path) -> None:
    program = HEAD + _SCALED[slug] + _TAIL
    said, _ = run(program, tmp_path / f"{slug}.py")
    check(said, "nonfinite-forward", program)


def test_no_line_is_named_where_several_statements_bind_the_name(tmp_path: Path) -> None:
    program = HEAD + "\nx = torch.randn(8, 4)\nx[0] = float('inf')\nx = x * 0.0\n" + _TAIL
    said, _ = run(program, tmp_path / "program.py")
    line = 1 + program.splitlines().index("x = torch.randn(8, 4)")
    assert [d["name"] for d in said] == ["nonfinite-forward"]
    assert (said[0]["culprit"] or {}).get("line") != line


@pytest.mark.parametrize(
    ("mask", "advised"),
    [("scores", "log_softmax"), ("scores.masked_fill(mask, float('-inf'))", "clamp the argument inside the log")],
)
def test_what_is_masked_stays_zero_under_log_softmax(mask: str, advised: str, tmp_path: Path) -> None:
    program = HEAD + (
        "\nscores = nn.Linear(4, 3)(torch.randn(8, 4)) * torch.tensor([0.0, 1e4, 0.0])\nmask = torch.tensor([[True, False, False]])\n"
        f"p = torch.softmax({mask}, -1)\nloss = -(p * torch.log(p)).sum()\nloss.backward()\n"
    )
    said, _ = run(program, tmp_path / "program.py")
    assert advised in said[0]["fixes"][0]["title"]


def test_the_evaluator_runs_nothing_of_the_programs() -> None:
    class Trap:
        def __getattr__(self, name: str) -> None:
            raise AssertionError(name)

        def __bool__(self) -> bool:
            raise AssertionError

        __eq__ = __add__ = __getitem__ = __call__ = __getattr__  # type: ignore[assignment]

    import ast

    import torch

    x = torch.arange(6.0).reshape(3, 2)
    known = Evaluator({"x": x, "g": of_shape((3, 2)), "trap": Trap(), "call": lambda: 1 / 0}, {"torch": torch})

    def of(text: str) -> object:
        return known.of(ast.parse(text, mode="eval").body)

    for text in ("trap.size", "trap + x", "x + trap", "trap[0]", "trap()", "not trap", "trap == x", "call()", "torch.rand(3)", "x.add_(1)"):
        assert of(text) is UNKNOWN, text
    assert torch.equal(x, torch.arange(6.0).reshape(3, 2))
    assert of("x.sum(0)[1].item() + len(x)") == 12.0
    assert tuple(of("g[:1] * x[0]").shape) == (1, 2)  # type: ignore[attr-defined]
    assert of("g.sum() > 0 and 1") is UNKNOWN
