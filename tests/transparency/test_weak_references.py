"""Weak references of the guard's are seen by nobody who counts them, and nothing that a program makes anew in each step is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from tests.transparency.helpers import bits, guarding


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 3), 0.1 * (i + 1), dtype=dtype)).pow(2).mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def _swapped(level: str | None) -> tuple[list[Any], list[str]]:
    """Training in which every parameter is swapped three times, and once more after the guard is left."""
    torch.manual_seed(0)
    guard = guarding(level) if level else None
    with guard or nullcontext():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        _train(model, optimizer, 6)
        model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
        _train(model, optimizer, 6)
        model.double()
        model.float()
        _train(model, optimizer, 12)
    model.double()
    assert all(parameter is same for parameter, same in zip(model.parameters(), parameters, strict=True))
    return [bits(p) for p in parameters], [] if guard is None else [diagnosis.code for diagnosis in guard.diagnoses]


@pytest.mark.usefixtures("swapping")
def test_parameters_can_be_swapped_and_stay_the_same_parameters(level: str) -> None:
    assert _swapped(level) == _swapped(None)


def test_no_tensor_has_more_weak_references(level: str) -> None:
    model, frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = weakref.ref(model.weight)
    with guarding(level):
        for _ in range(4):
            optimizer.zero_grad()
            with torch.no_grad():
                target = model(torch.ones(2, 3))
            detached, hidden = target.detach(), model(frozen(torch.ones(2, 3)))
            alias = hidden.data
            (hidden - detached).pow(2).sum().backward()
            tensors = [*model.parameters(), *frozen.parameters(), model.weight.grad, target, detached, hidden, alias]
            for tensor in tensors:
                expected = [own] if tensor is model.weight else []
                assert weakref.getweakrefs(tensor) == expected
                assert weakref.getweakrefcount(tensor) == len(expected)
            optimizer.step()
    assert weakref.getweakrefs(model.weight) == [own] and weakref.getweakrefcount(model.bias) == 0


def _counts(level: str | None) -> list[int]:
    """How many weak references there are to what a training is made of, in each of its steps and afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    criterion = nn.MSELoss()
    array = torch.ones(4, 3).numpy()
    pairwise = torch.ones(4, 1)[:, None]
    objects = [*model.modules(), optimizer, scheduler, scaler, averaged, criterion, array, pairwise, _counts]
    found = []
    with guarding(level) if level else nullcontext():
        for i in range(8):
            optimizer.zero_grad()
            rows = model(torch.from_numpy(array)).detach().numpy()
            loss = criterion(model(torch.from_numpy(array)), torch.ones(4)[:, None])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            averaged.update_parameters(model)
            if i == 4:
                model.load_state_dict(model.state_dict())
                model.double().float()
                with pytest.raises(RuntimeError):
                    loss.backward()
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 3))
            model.train()
            found += [weakref.getweakrefcount(each) for each in (*objects, rows)]
    return found + [weakref.getweakrefcount(each) for each in objects]


def test_nothing_of_a_training_has_more_weak_references(level: str) -> None:
    assert _counts(level) == _counts(None)


def test_references_do_not_ask_what_they_refer_to() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("asked")

        def __hash__(self) -> int:
            raise AssertionError("asked")

    odd = Odd()
    one, other = UncountedRef(odd), TensorRef(odd)
    assert one == one and one != other and len({one, other}) == 2
    assert one() is other() is odd


def _made_in_each_step(kept: list[weakref.ref[Any]]) -> None:
    """A step that makes its own classes and functions, all of which capture `mask`."""
    mask = torch.ones(4)

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * mask

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * mask

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Masked.apply(self.linear(x))

    class Fault(RuntimeError):
        captured = mask

    class Wrapped(torch.Tensor):
        pass

    def overridable(x: torch.Tensor) -> torch.Tensor:
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(overridable, (x,), x)
        return x * mask

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hidden = net(torch.ones(3, 4))
    hidden.register_hook(lambda gradient: gradient * mask)
    hidden = checkpoint(lambda x: x * mask, hidden, use_reentrant=False)
    loss = overridable(hidden + torch.ones(4).as_subclass(Wrapped)).as_subclass(torch.Tensor).pow(2).mean()
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError):
        loss.backward()
    with pytest.raises(RuntimeError), guarding("strict"):
        raise Fault("Trying to backward through the graph a second time")
    kept += [weakref.ref(each) for each in (mask, Masked, Net, net, net.linear.weight, optimizer, Fault, Wrapped, overridable, loss)]


def test_what_each_step_makes_anew_is_not_kept(level: str) -> None:
    kept: list[weakref.ref[Any]] = []
    with guarding(level):
        for _ in range(5):
            _made_in_each_step(kept)
        gc.collect()
        assert [ref() for ref in kept if ref() is not None] == []
