"""Threads that train at once: each gets its own diagnoses, as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradguard import GradGuardError
from tests.transparency.helpers import guarding

THREADS, STEPS = 3, 4


def _in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What a function gives in each of some threads that run it in lockstep, where they can."""
    results: list[Any] = [None] * THREADS
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        start.wait()
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _same_root(weight: torch.Tensor) -> None:
    loss = (weight * weight).sum()
    loss.backward()
    loss.backward()


def _accumulated(weight: torch.Tensor) -> None:
    total = (weight * weight).sum()
    total.backward()
    total = total + weight.exp().sum()
    total.backward()


def _overwritten(weight: torch.Tensor) -> None:
    grown = (weight * 2).exp()
    grown += 1
    grown.sum().backward()


FAILURES = {"GG201": _same_root, "GG204": _accumulated, "GG101": _overwritten}


def _failures(level: str, failing: Callable[[torch.Tensor], None]) -> list[tuple[str, str]]:
    found = []
    with guarding(level):
        for _ in range(STEPS):
            weight = torch.ones(2, requires_grad=True)
            with pytest.raises(RuntimeError) as caught:
                failing(weight)
            diagnosis = caught.value.diagnosis if isinstance(caught.value, GradGuardError) else None
            found.append(("", "") if diagnosis is None else (diagnosis.code, diagnosis.culprit.text if diagnosis.culprit else ""))
    return found


@pytest.mark.parametrize(("level", "code"), [("watch", "GG201"), ("standard", "GG204"), ("strict", "GG101"), ("forensic", "GG201")])
def test_each_thread_has_all_its_failures_diagnosed(level: str, code: str) -> None:
    failing = FAILURES[code]
    alone = _failures(level, failing)
    assert {found for found, _ in alone} == {code}
    assert _in_threads(lambda number: _failures(level, failing)) == [alone] * THREADS


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_threads_with_different_bugs_share_a_guard(level: str) -> None:
    guard = guarding(level)
    kinds = list(FAILURES.items())

    def work(number: int) -> set[str]:
        found = set()
        with guard:
            for _ in range(STEPS):
                try:
                    kinds[number % len(kinds)][1](torch.ones(2, requires_grad=True))
                except GradGuardError as error:
                    found.add(error.diagnosis.code)
        return found

    assert _in_threads(work) == [{kinds[number % len(kinds)][0]} for number in range(THREADS)]
    assert len(guard.diagnoses) == THREADS * STEPS


def test_silent_bugs_are_counted_thread_by_thread() -> None:
    def work(number: int) -> list[int]:
        with guarding("strict") as guard:
            weight = torch.ones(4, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.01)
            for _ in range(STEPS):
                optimizer.zero_grad()
                grown = (weight * 2).exp()
                grown.data.mul_(2)
                grown.sum().backward()
                optimizer.step()
        return [diagnosis.repeats for diagnosis in guard.diagnoses]

    assert _in_threads(work) == [[STEPS - 1]] * THREADS
