"""Real programs that break backward's contract: which rule speaks, where it points, which names it gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from contract_case import HEAD, Case, marked
from contract_dtypes import DTYPES
from contract_functions import FUNCTIONS
from contract_returns import RETURNS, SOUND_RETURNS
from contract_roots import ROOTS
from contract_sound import SOUND
from contract_targets import SOUND_TARGETS, TARGETS

BROKEN = [*ROOTS, *FUNCTIONS, *DTYPES, *RETURNS, *TARGETS]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.slug)
def test_traced(run_contract: Callable[..., list], case: Case) -> None:
    _check(run_contract, case, "standard")


@pytest.mark.parametrize("case", [case for case in BROKEN if case.watch], ids=lambda case: case.slug)
def test_untraced(run_contract: Callable[..., list], case: Case) -> None:
    _check(run_contract, case, "watch")


@pytest.mark.parametrize("level", ["standard", "watch"])
@pytest.mark.parametrize("case", [*SOUND, *SOUND_RETURNS, *SOUND_TARGETS], ids=lambda case: case.slug)
def test_sound_programs_pass(run_contract: Callable[..., list], case: Case, level: str) -> None:
    source, _ = marked(case)
    assert [(d.code, text) for d, text in run_contract(source, level) if d.code.startswith("GG4")] == []


def _check(run: Callable[..., list], case: Case, level: str) -> None:
    source, culprits = marked(case)
    said = run(source, level)
    assert said, "nothing was said"
    diagnosis, text = said[0]
    assert diagnosis.code == case.code, text
    assert diagnosis.culprit is not None, text
    assert diagnosis.culprit.line in culprits, text
    lines = source.splitlines()
    span = diagnosis.culprit
    if span.line == span.end_line and span.text is not None:
        assert lines[span.line - 1][span.column : span.end_column] == span.text
    for name in case.names:
        assert name in text


def test_no_return_is_named_where_it_is_not_known_which_ran(run_contract: Callable[..., list]) -> None:
    source = (
        HEAD
        + """
class Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        if grad.sum() > 3:
            return grad[:1]
        return grad[:1] * 2
x = torch.randn(4, requires_grad=True)
Pick.apply(x).sum().backward()
"""
    )
    ((diagnosis, text),) = run_contract(source, "standard")
    assert diagnosis.code == "GG402"
    assert diagnosis.culprit is None, text
    assert text.count("one of these returned it") == 2


def test_a_complex_number_is_not_to_be_reduced(run_contract: Callable[..., list]) -> None:
    source = HEAD + "w = torch.randn(3, dtype=torch.complex64, requires_grad=True)\nloss = (w * 1j).sum()\nloss.backward()\n"
    ((diagnosis, text),) = run_contract(source, "standard")
    assert diagnosis.culprit is not None, text
    assert diagnosis.code == "GG401"
    assert source.splitlines()[diagnosis.culprit.line - 1] in ("loss = (w * 1j).sum()", "loss.backward()")
    assert "reduce" not in text
    assert "loss.real.backward()" in diagnosis.fixes[0].patch
