"""A cause that was told is only counted when it is met again; another cause of the same rule is found all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gradguard.rules.registry import all_rules
from tests.transparency.helpers import guarding

STEPS = 40


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each rule has worked out a diagnosis."""
    counts: Counter[str] = Counter()

    def counted(code: str, recognise: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(recognise)
        def counting(incident: Any) -> Any:
            diagnosis = recognise(incident)
            counts[code] += diagnosis is not None
            return diagnosis

        return counting

    originals = {rule: rule.recognise for rule in all_rules()}
    for rule, original in originals.items():
        object.__setattr__(rule, "recognise", counted(rule.code, original))
    yield counts
    for rule, original in originals.items():
        object.__setattr__(rule, "recognise", original)


def _train(loss_of: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(weight, step).backward()
        optimizer.step()


def _written_through_data(weight: torch.Tensor, step: int) -> torch.Tensor:
    grown = (weight * 2).exp()
    grown.data.mul_(2)
    return grown.sum()


def _written_through_numpy(weight: torch.Tensor, step: int) -> torch.Tensor:
    grown = (weight * 2).exp()
    array = grown.detach().numpy()
    array += 1
    return grown.sum()


def _broadcast(weight: torch.Tensor, step: int) -> torch.Tensor:
    return F.mse_loss((weight * 2)[:, None], torch.arange(4.0))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss_of", [_written_through_data, _written_through_numpy, _broadcast])
def test_a_known_cause_is_counted_and_seldom_looked_into(found: Counter[str], loss_of: Any) -> None:
    with guarding("strict") as guard:
        _train(loss_of)
    (diagnosis,) = guard.diagnoses
    assert diagnosis.repeats == STEPS - 1
    # at the 1st, 2nd, 4th, 8th, 16th and 32nd meeting; once more where the evidence of the first step is another
    assert found[diagnosis.code] in (6, 7)


def test_a_finding_about_another_optimizer_is_seldom_looked_into(found: Counter[str]) -> None:
    actor, critic = (torch.ones(4, requires_grad=True) for _ in range(2))
    first, second = (torch.optim.SGD([weight], lr=0.01) for weight in (actor, critic))
    with guarding("standard") as guard:
        for _ in range(STEPS):
            first.zero_grad()
            (actor * 2).sum().backward()
            first.step()
            second.zero_grad()
            (critic * 2).sum().backward()
            first.step()
    (diagnosis,) = (each for each in guard.diagnoses if each.code == "GG607")
    assert diagnosis.repeats > 20
    assert found["GG607"] <= 7


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_another_cause_of_the_same_rule_at_the_same_backward_call_is_found(found: Counter[str]) -> None:
    def loss_of(weight: torch.Tensor, step: int) -> torch.Tensor:
        if step % 2 and step > 10:
            return F.mse_loss((weight * 3)[:, None], torch.arange(4.0))
        return F.mse_loss((weight * 2)[:, None], torch.arange(4.0))

    with guarding("strict") as guard:
        _train(loss_of)
    first, second = guard.diagnoses
    assert first.code == second.code and first.culprit != second.culprit
    assert (first.repeats, second.repeats) == (24, 14)
    assert found[first.code] in (5 + 4, 5 + 4 + 1)


def test_what_is_no_longer_found_on_the_same_evidence_is_not_counted_for_long(found: Counter[str]) -> None:
    factor = torch.full((4,), 2.0)

    def loss_of(weight: torch.Tensor, step: int) -> torch.Tensor:
        grown = (weight * 2).exp()
        grown.data.mul_(factor if step < 20 else 1)  # the same lines; nothing is changed by the later ones
        return grown.sum()

    with guarding("strict") as guard:
        _train(loss_of)
    (diagnosis,) = guard.diagnoses
    assert 19 <= diagnosis.repeats <= 30
    assert found[diagnosis.code] == 5


def test_a_mended_line_is_not_counted(found: Counter[str]) -> None:
    def loss_of(weight: torch.Tensor, step: int) -> torch.Tensor:
        return _written_through_data(weight, step) if step < 20 else (weight * 2).exp().sum()

    with guarding("strict") as guard:
        _train(loss_of)
    (diagnosis,) = guard.diagnoses
    assert diagnosis.repeats == 19
