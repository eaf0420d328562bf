"""Training under the guard is the training without it, to the last bit and the last random number."""

from __future__ import annotations

import pytest
import torch

from gradguard import gradguard
from tests.transparency.helpers import assert_transparent, bits, fresh_settings, guarding
from tests.transparency.workloads import WORKLOADS

STEPS = 20


def _train(name: str, level: str | None, inside: bool) -> tuple[list[object], object]:
    torch.manual_seed(5)
    training = WORKLOADS[name]()
    losses = []
    if level is None:
        losses = [training.step() for _ in range(STEPS)]
    elif inside:  # the guard stands inside the loop
        settings = fresh_settings(level)
        for _ in range(STEPS):
            with gradguard(training.model, training.optimizer, settings=settings):
                losses.append(training.step())
    else:
        with guarding(level, training.model, training.optimizer):
            losses = [training.step() for _ in range(STEPS)]
    return [bits(tensor) for tensor in losses + training.state()], bits(torch.get_rng_state())


@pytest.mark.parametrize("inside", [False, True], ids=["around the loop", "around each step"])
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_parameters_gradients_and_random_state_after_twenty_steps(name: str, inside: bool, level: str) -> None:
    assert _train(name, level, inside) == _train(name, None, inside)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_evaluation_in_between(name: str, level: str) -> None:
    def program() -> list[torch.Tensor]:
        training = WORKLOADS[name]()
        found = []
        for _ in range(2):
            training.step()
            training.model.eval()
            with torch.no_grad():
                found.append(training.model(training.batch()[0]))
            with torch.inference_mode():
                found.append(training.model(training.batch()[0]).clone())
            training.model.train()
        return found + training.state()

    assert_transparent(program, (level,), rehearse=False)


def test_a_diagnosis_draws_no_random_number(level: str) -> None:
    def program() -> torch.Tensor:
        x = torch.randn(4, requires_grad=True)
        for spoil in (lambda y: y.mul_(2), lambda y: y.backward(), lambda y: y.detach().sum().backward()):
            try:
                y = x.sigmoid()
                spoil(y)
                y.sum().backward()
            except RuntimeError:
                pass
        return torch.randn(4)

    assert_transparent(program, (level,))
