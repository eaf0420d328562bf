"""Exceptions pass through the guard as they are, unless a rule explains them; then the original is the cause."""

from __future__ import annotations

import asyncio
import gc
import sys
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import GradGuardError
from tests.transparency.helpers import guarding, stack_length


class Mine(Exception):
    pass


@pytest.mark.parametrize(
    "kind",
    [
        KeyboardInterrupt,
        SystemExit,
        GeneratorExit,
        StopIteration,
        StopAsyncIteration,
        asyncio.CancelledError,
        Mine,
        RuntimeError,
        ValueError,
        AssertionError,
        MemoryError,
        torch.OutOfMemoryError,
    ],
)
@pytest.mark.parametrize("where", ["block", "hook", "module", "closure"])
def test_the_same_object_comes_out(kind: type[BaseException], where: str, level: str) -> None:
    raised = kind("nothing that a rule knows")
    attributes = set(vars(raised)) if hasattr(raised, "__dict__") else set()

    def fail(*_: Any) -> Any:
        raise raised

    caught: BaseException | None = None
    x = torch.ones(2, requires_grad=True)
    try:
        with guarding(level):
            y = x * 2
            if where == "block":
                fail()
            elif where == "hook":
                y.register_hook(fail)
                y.sum().backward()
            elif where == "module":
                layer = nn.Linear(2, 2)
                layer.register_forward_pre_hook(fail)
                layer(x)
            else:
                torch.optim.SGD([x], lr=0.1).step(fail)
    except BaseException as error:
        caught = error
    assert caught is raised
    assert raised.__cause__ is None
    assert set(vars(raised)) <= attributes | {"__gradguard_seen__"}
    assert stack_length() == 0


def test_errors_no_rule_understands_keep_their_traceback(level: str) -> None:
    """The user's own frames are in it, in order, and the last line is the one that failed."""

    def inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    with pytest.raises(RuntimeError) as info:
        with guarding(level):
            inner(torch.ones(2, 3), torch.ones(2, 3))
    frames = [frame.name for frame in traceback.extract_tb(info.value.__traceback__) if frame.filename == __file__]
    assert frames == ["test_errors_no_rule_understands_keep_their_traceback", "inner"]
    assert not isinstance(info.value, GradGuardError)


def test_an_exception_the_user_catches_inside_stays_inside(level: str) -> None:
    caught = []
    with guarding(level):
        try:
            torch.ones(2, 3) @ torch.ones(2, 3)
        except RuntimeError as error:
            caught.append(error)
        x = torch.ones(2, requires_grad=True)
        loss = x.exp().sum()
        loss.backward()
        try:
            loss.backward()
        except RuntimeError as error:
            caught.append(error)
        x.grad = None
        x.exp().sum().backward()
    assert len(caught) == 2
    assert x.grad is not None


def test_a_diagnosis_is_a_runtime_error_with_the_original_as_its_cause(level: str) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.sigmoid()
    y.mul_(2)
    with pytest.raises(RuntimeError) as info:
        with guarding(level):
            y.sum().backward()
    assert isinstance(info.value, GradGuardError)
    assert type(info.value.__cause__) is RuntimeError
    assert "modified by an inplace operation" in str(info.value.__cause__)


def test_actions_off_lets_the_original_through(level: str) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.sigmoid()
    y.mul_(2)
    with pytest.raises(RuntimeError) as info:
        with guarding(level, actions={"exceptions": "off", "silent": "off"}):
            y.sum().backward()
    assert type(info.value) is RuntimeError


def test_context_and_notes_survive(level: str) -> None:
    with pytest.raises(Mine) as info:
        with guarding(level):
            try:
                raise KeyError("first")
            except KeyError as error:
                second = Mine("second")
                if sys.version_info >= (3, 11):
                    second.add_note("a note")
                raise second from error
    assert isinstance(info.value.__cause__, KeyError)
    if sys.version_info >= (3, 11):
        assert info.value.__notes__ == ["a note"]


def test_stop_iteration_in_a_generator_under_the_guard(level: str) -> None:
    def batches() -> Any:
        yield torch.ones(1)
        yield torch.ones(1)

    source = batches()
    count = 0
    while True:
        try:
            with guarding(level):
                next(source)
                count += 1
        except StopIteration:
            break
    assert count == 2


@pytest.mark.parametrize("explained", [False, True])
def test_a_failed_step_dies_with_its_exception(explained: bool, level: str) -> None:
    """As without the guard: once the exception is gone, nothing holds the step's tensors (no cycle, no collector)."""

    def step() -> weakref.ref[torch.Tensor]:
        x = torch.ones(1000, requires_grad=True)
        y = x.sigmoid()
        seen = weakref.ref(y)
        try:
            if explained:
                y.mul_(2)
                y.sum().backward()
            else:
                y @ torch.ones(3, 3)
        except RuntimeError:
            pass
        return seen

    gc.collect()
    gc.disable()
    try:
        assert step()() is None, "without the guard it is so"
        with guarding(level):
            assert step()() is None
            assert step()() is None
    finally:
        gc.enable()


def test_recursion_and_deep_graphs(level: str) -> None:
    x = torch.ones(1, requires_grad=True)
    with guarding(level):
        y = x
        for _ in range(3000):
            y = y + 1
        y.backward()
        with pytest.raises(RecursionError):

            def forever() -> None:
                forever()

            forever()
    assert x.grad is not None
