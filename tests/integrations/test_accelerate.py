"""The accelerate adapter on the real Accelerator."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradguard import GradGuardError, GradGuardWarning, gradguard
from tests.running import applied, run_source

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def setting(**options: Any) -> tuple[Any, Any, Any, Any, Any]:
    from gradguard.integrations.accelerate import watch

    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    x = torch.randn(32, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return accelerator, *prepared, watch(accelerator, *prepared, level="strict")


def test_it_knows_what_stands_behind_the_wrappers() -> None:
    accelerator, model, optimizer, _, guard = setting()
    assert guard.models == [accelerator.unwrap_model(model)]
    assert guard.optimizers == [optimizer.optimizer]


def test_a_failing_step_is_diagnosed_through_accelerate() -> None:
    accelerator, model, optimizer, loader, guard = setting()

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        shown = model(x).exp()
        shown += 1  # the culprit
        accelerator.backward(nn.functional.mse_loss(shown, y))
        optimizer.step()

    with pytest.raises(GradGuardError) as caught:
        for x, y in loader:
            guard.step(step, x, y)
    found = caught.value.diagnosis
    assert found.code == "GG101"
    assert found.culprit is not None
    assert "the culprit" in Path(__file__).read_text().splitlines()[found.culprit.line - 1]


@pytest.mark.parametrize("bypassed", [True, False])
def test_backward_past_the_accelerator(bypassed: bool) -> None:
    accelerator, model, optimizer, loader, _ = setting(gradient_accumulation_steps=4)
    from gradguard.integrations.accelerate import watch

    guard = watch(accelerator, model, optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in loader:
            with guard, accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                if bypassed:
                    loss.backward()
                else:
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    told = [each.message for each in said if isinstance(each.message, GradGuardWarning)]
    if not bypassed:
        assert guard.diagnoses == []
        return
    [found] = guard.diagnoses
    assert len(told) == 1
    assert found.name == "accelerate-backward-bypassed"
    assert found.culprit is not None
    assert "loss.backward()" in Path(__file__).read_text().splitlines()[found.culprit.line - 1]
    assert "4 times" in found.headline


def test_a_training_of_its_own_beside_an_accelerator() -> None:
    """Accelerate's state is the process's: another training's accumulation is none of a loop's that nothing was prepared for."""
    setting(gradient_accumulation_steps=4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gradguard(level="strict")
    with guard:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
    assert guard.diagnoses == []


ACCUMULATING = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(256, 3)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
net, opt, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
for inputs, wanted in data:
    with accelerator.accumulate(net):
        {first}
        loss = nn.functional.mse_loss(net(inputs), wanted)
        accelerator.backward(loss)
        opt.step()
        {last}
"""


@pytest.mark.filterwarnings("ignore::gradguard.GradGuardWarning")
@pytest.mark.parametrize(("clearing", "place"), [("net.zero_grad()", "first"), ("net.zero_grad()", "last"), ("opt.zero_grad()", "first")])
def test_gradients_that_are_cleared_within_an_accumulation(clearing: str, place: str, tmp_path: Path) -> None:
    source = ACCUMULATING.format(**{"first": "pass", "last": "pass", place: clearing})
    [(found, _)] = run_source(tmp_path, source)
    assert found.code == "GG602" and found.culprit is not None and found.culprit.text == clearing
    assert f"`{clearing}` clears the gradients of `loss`" in found.headline
    repaired = applied(source, found.fixes[0].patch or "") if clearing == "net.zero_grad()" and place == "last" else None
    assert "opt.zero_grad()" in found.fixes[0].title
    if repaired is not None:
        assert run_source(tmp_path, repaired) == []
    else:
        assert found.fixes[0].patch is not None
        assert f"-        {clearing}" in found.fixes[0].patch and "         opt.step()\n+        opt.zero_grad()" in found.fixes[0].patch


@pytest.mark.filterwarnings("ignore::gradguard.GradGuardWarning")
def test_gradients_that_accelerate_clears_once_an_accumulation(tmp_path: Path) -> None:
    assert run_source(tmp_path, ACCUMULATING.format(first="pass", last="opt.zero_grad()")) == []
