"""Guards nested, re-entered, shared, suspended in generators and coroutines, in threads, processes and workers."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradguard.probes.listeners import listener
from gradguard.runtime.session import current_session
from tests.transparency.helpers import assert_transparent, bits, guarding, stack_length
from tests.transparency.workloads import WORKLOADS, mlp


def test_two_guards_nested(level: str) -> None:
    for inner_level in ("watch", "strict"):
        with guarding(level) as outer:
            outside = stack_length()
            with guarding(inner_level) as inner:
                assert current_session().guard is inner
                mlp().step()
            assert current_session().guard is outer
            assert stack_length() in (outside, 0, 1)
            mlp().step()
        assert stack_length() == 0
        assert listener() is None


def test_the_same_guard_entered_recursively(level: str) -> None:
    guard = guarding(level)

    @guard
    def recurse(depth: int) -> int:
        x = torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()
        return 1 + recurse(depth - 1) if depth else 0

    assert recurse(3) == 3
    with guard, guard, guard:
        assert len(current_session().guards) == 3
    assert not current_session().guards
    with pytest.raises(ZeroDivisionError):
        with guard, guard:
            1 / 0
    assert not current_session().guards


def test_guards_left_in_another_order(level: str) -> None:
    first, second = guarding(level), guarding(level)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert current_session().guard is second
    mlp().step()
    second.__exit__(None, None, None)
    assert listener() is None


def test_leaving_a_guard_that_was_never_entered(level: str) -> None:
    guarding(level).__exit__(None, None, None)
    assert listener() is None


def test_the_decorator_keeps_what_it_decorates(level: str) -> None:
    @guarding(level)
    def step(x: int, *, y: int = 2) -> int:
        """Documented."""
        return x + y

    assert step(1, y=3) == 4
    assert step.__name__ == "step"
    assert step.__doc__ == "Documented."


def test_a_decorated_generator_is_guarded_while_it_runs(level: str) -> None:
    @guarding(level)
    def losses(n: int) -> Any:
        for i in range(n):
            inside = listener() is not None
            sent = yield inside, i
            if sent:
                yield "sent", sent

    source = losses(2)
    assert next(source) == (True, 0)
    assert listener() is None
    assert source.send("x") == ("sent", "x")
    assert next(source) == (True, 1)
    with pytest.raises(StopIteration):
        next(source)
    thrown = losses(2)
    next(thrown)
    with pytest.raises(KeyError):
        thrown.throw(KeyError("k"))
    thrown = losses(2)
    next(thrown)
    thrown.close()
    assert listener() is None


def test_a_decorated_coroutine_is_guarded_while_it_runs(level: str) -> None:
    @guarding(level)
    async def step(n: float) -> tuple[bool, float]:
        x = torch.tensor([n], requires_grad=True)
        await asyncio.sleep(0)
        inside = listener() is not None
        (x * n).sum().backward()
        await asyncio.sleep(0)
        assert x.grad is not None
        return inside, float(x.grad)

    async def main() -> Any:
        return await asyncio.gather(*(step(float(n)) for n in range(4)))

    assert asyncio.run(main()) == [(True, 0.0), (True, 1.0), (True, 2.0), (True, 3.0)]
    assert listener() is None
    assert asyncio.iscoroutinefunction(step)


def test_guards_in_interleaved_coroutines(level: str) -> None:
    async def work(n: int) -> float:
        with guarding(level):
            training = mlp()
            await asyncio.sleep(0.001 * (n % 2))
            loss = training.step()
            await asyncio.sleep(0.001)
        return float(loss)

    async def main() -> Any:
        return await asyncio.gather(*(work(n) for n in range(4)))

    assert len(asyncio.run(main())) == 4
    assert listener() is None
    assert stack_length() == 0


def test_a_generator_that_holds_a_guard_open(level: str) -> None:
    def stream() -> Any:
        with guarding(level):
            for _ in range(3):
                yield torch.ones(1, requires_grad=True)

    for x in stream():
        (x * 2).sum().backward()
    for _ in stream():
        break
    gc.collect()
    abandoned = stream()
    next(abandoned)
    del abandoned  # closed by its destructor
    assert listener() is None
    assert stack_length() == 0


def test_a_guard_in_one_thread_while_another_trains_without(level: str) -> None:
    barrier = threading.Barrier(2, timeout=30)
    results: dict[str, Any] = {}

    def run(name: str, guarded: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        net = nn.Linear(4, 1)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def loop() -> None:
            for _ in range(20):
                barrier.wait()
                assert (listener() is not None) == guarded
                assert guarded or stack_length() == 0
                optimizer.zero_grad()
                net(torch.randn(3, 4, generator=generator)).pow(2).mean().backward()
                optimizer.step()

        if guarded:
            with guarding(level):
                loop()
        else:
            loop()
        results[name] = [bits(p) for p in net.parameters()]

    threads = [threading.Thread(target=run, args=("bare", False)), threading.Thread(target=run, args=("guarded", True))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["bare"] == results["guarded"]


def test_one_guard_shared_by_threads(level: str) -> None:
    """A decorated step called from a pool: each thread opens and closes its own session."""
    guard = guarding(level)
    inside = threading.Barrier(3, timeout=30)

    @guard
    def step(n: int) -> float:
        x = torch.full((2,), float(n), requires_grad=True)
        inside.wait()
        (x * x).sum().backward()
        inside.wait()
        assert current_session().guards == [guard]
        assert x.grad is not None
        return float(x.grad.sum())

    def call(n: int) -> tuple[float, bool, int]:
        return step(n), listener() is None, stack_length()

    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            assert list(pool.map(call, range(3))) == [(0.0, True, 0), (4.0, True, 0), (8.0, True, 0)]


def test_data_parallel_style_threads(level: str) -> None:
    """Forwards in worker threads, one backward for all in the guarded one."""

    def program() -> Any:
        net = nn.Linear(3, 2)
        chunks = torch.randn(4, 2, 3).unbind()
        outputs: list[Any] = [None] * 4

        def work(i: int) -> None:
            outputs[i] = net(chunks[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cat(outputs).pow(2).mean().backward()
        return [p.grad for p in net.parameters()]

    assert_transparent(program, (level,))


def test_a_backward_in_a_thread_of_its_own(level: str) -> None:
    x = torch.ones(2, requires_grad=True)
    errors = []

    def work() -> None:
        try:
            with guarding(level):
                (x * 2).sum().backward()
        except Exception as error:
            errors.append(error)

    with guarding(level):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert listener() is not None
    assert not errors
    assert x.grad is not None


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3,), float(i)) + torch.randn(3) + torch.randn(3, requires_grad=True).detach() * 0


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_workers(workers: int, level: str) -> None:
    def program() -> Any:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loader = DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=workers, multiprocessing_context="fork" if workers else None)
        seen = []
        for batch in loader:
            seen.append(batch.clone())
            optimizer.zero_grad()
            net(batch).mean().backward()
            optimizer.step()
        return seen, list(net.parameters())

    assert_transparent(program, (level,), rehearse=False)


def _child(connection: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    (x * 3).sum().backward()
    y = x.sigmoid()
    y.mul_(2)
    try:
        y.sum().backward()
        said = "nothing"
    except RuntimeError as error:
        said = type(error).__name__
    connection.send((x.grad.tolist(), said, listener() is not None))  # type: ignore[union-attr]
    connection.close()


def test_a_fork_while_the_guard_is_open(level: str) -> None:
    context = multiprocessing.get_context("fork")
    with guarding(level):
        torch.ones(2, requires_grad=True).sum().backward()
        here, there = context.Pipe()
        process = context.Process(target=_child, args=(there,))
        process.start()
        assert here.poll(60)
        gradient, said, open_there = here.recv()
        process.join(60)
        assert process.exitcode == 0
        mlp().step()
    assert gradient == [3.0, 3.0]
    assert said == "GradGuardRuntimeError" or said == "GradGuardError"
    assert open_there


def test_os_fork_in_the_middle_of_a_step(level: str) -> None:
    with guarding(level):
        x = torch.ones(2, requires_grad=True)
        loss = (x * 2).sum()
        pid = os.fork()
        if pid == 0:
            loss.backward()
            os._exit(0 if x.grad is not None and x.grad.tolist() == [2.0, 2.0] else 1)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        loss.backward()


def test_freezing_the_collector(level: str) -> None:
    with guarding(level):
        gc.freeze()
        try:
            mlp().step()
            gc.collect()
        finally:
            gc.unfreeze()


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_guard_for_every_line_of_a_step(name: str, level: str) -> None:
    """Forward in one block, backward in another, the optimizer outside of both."""

    def run(guarded: bool) -> Any:
        from contextlib import nullcontext

        torch.manual_seed(4)
        training = WORKLOADS[name]()
        for _ in range(3):
            training.optimizer.zero_grad()
            x, y = training.batch()
            with guarding(level) if guarded else nullcontext():
                loss = training.loss(training.model(x), y)
            with guarding(level) if guarded else nullcontext():
                loss.backward()
            training.optimizer.step()
        return [bits(t) for t in training.state()], bits(torch.get_rng_state())

    assert run(True) == run(False)


def test_a_guard_left_in_another_thread(level: str) -> None:
    """As web servers and executors do with context managers: the thread it was entered in is let go all the same."""
    guard = guarding(level)
    guard.__enter__()
    thread = threading.Thread(target=guard.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert listener() is None
    mlp().step()
    with guarding(level):
        mlp().step()
    assert stack_length() == 0


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_sound_training_is_never_traced_at_watch(name: str) -> None:
    training = WORKLOADS[name]()
    with guarding("watch", training.model, training.optimizer):
        for _ in range(30):
            training.step()
            assert stack_length() == 0
