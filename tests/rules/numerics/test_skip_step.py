"""`rules: {GG502: {skip_step: true}}` leaves out the optimizer's step on a gradient that is not finite."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import gradguard
from gradguard.core.errors import ConfigError

MAKERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def _train(maker: str, spoilt: set[int], skip: bool, steps: int = 100) -> tuple[nn.Module, Any, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = MAKERS[maker](model.parameters())
    rules: Any = {"GG502": {"action": "warn", "skip_step": skip}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gradguard(level="watch", rules=rules) as guard:
            for step in range(steps):
                x = torch.randn(8, 4)
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                if step in spoilt:
                    model[0].weight.grad[0, 0] = float("nan")  # as a hook, or an all-reduce with a broken rank, would
                before = model[2].bias.grad
                optimizer.step()
                assert model[2].bias.grad is before
    return model, optimizer, [diagnosis.code for diagnosis in guard.diagnoses]


@pytest.mark.parametrize("maker", sorted(MAKERS))
def test_the_step_is_left_out_and_training_goes_on(maker: str) -> None:
    spoilt = {1, 2, 50, 90}
    model, optimizer, said = _train(maker, spoilt, skip=True)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert set(said) == {"GG502"}
    if maker == "AdamW":
        assert {int(state["step"]) for state in optimizer.state.values()} == {100 - len(spoilt)}


def test_without_it_the_weights_are_lost() -> None:
    model, _, _ = _train("SGD", {50}, skip=False)
    assert not all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_sound_run_is_the_same_to_the_bit() -> None:
    one, other = _train("AdamW", set(), skip=True), _train("AdamW", set(), skip=False)
    assert one[2] == other[2] == []
    assert all(torch.equal(p, q) for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True))


def test_options_are_checked() -> None:
    wrong: Any = {"GG503": {"steps": 1}}
    with pytest.raises(ConfigError, match="steps"):
        gradguard(rules=wrong)
    unknown: Any = {"GG504": {"stepz": 5}}
    with pytest.raises(ConfigError, match="did you mean `steps`"):
        gradguard(rules=unknown)


def test_the_number_of_stale_steps_is_the_users() -> None:
    def said(after: int) -> list[str]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        rules: Any = {"stale-gradients": {"after": after}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with gradguard(rules=rules) as guard:
                for _ in range(12):
                    model(torch.randn(4, 2)).pow(2).mean().backward()
                    optimizer.step()
        return [diagnosis.code for diagnosis in guard.diagnoses]

    assert said(2) == ["GG601"]
    assert said(24) == []


def test_skipped_steps_are_counted_in_the_summary() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gradguard(level="watch", rules={"GG502": {"skip_step": True}}) as guard:
            for step in range(12):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).mean().backward()
                if step in (4, 9):
                    model.weight.grad[0, 0] = float("inf")  # type: ignore[index]
                optimizer.step()
    assert guard.summary().skipped == 2
    assert "2 of them left out" in guard.summary().text()
