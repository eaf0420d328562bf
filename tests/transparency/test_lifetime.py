"""Nothing lives longer under the guard, a step needs no more memory, and what the guard remembers is bounded."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gradguard import gradguard
from gradguard.instrumentation.journal import Limits, current_journal
from gradguard.runtime.session import current_session
from gradguard.torch_compat.private_api import memory_of
from tests.transparency.helpers import LEVELS, fresh_settings, guarding
from tests.transparency.workloads import WORKLOADS, Training


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _refs_of_a_step(step: Callable[[], list[Any]]) -> list[bool]:
    return [ref() is None for ref in step()]


def _forward_and_backward() -> list[Any]:
    x = torch.randn(50, 50, requires_grad=True)
    hidden = (x @ x).sigmoid()
    out = hidden.exp() * hidden
    refs = [weakref.ref(hidden), weakref.ref(out)]
    out.sum().backward()
    return refs


def _forward_only() -> list[Any]:
    """The op that saves its own output is the classic cycle."""
    x = torch.randn(50, 50, requires_grad=True)
    out = x.sigmoid().tanh().exp()
    return [weakref.ref(out)]


def _no_grad() -> list[Any]:
    x = torch.randn(50, 50, requires_grad=True)
    with torch.no_grad():
        out = x * 2
        more = out + 1
    detached = (x * 3).detach()
    number = torch.tensor(detached.sum().item())
    array = detached.numpy()
    back = torch.from_numpy(array)
    return [weakref.ref(t) for t in (out, more, detached, number, back)]


def _module_and_optimizer() -> list[Any]:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(torch.randn(2, 4)).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
    net.eval()
    with torch.no_grad():
        net(torch.randn(2, 4))
    return [weakref.ref(item) for item in (net, net[0], net[0].weight, loss, scheduler)]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def _custom_function() -> list[Any]:
    x = torch.randn(50, requires_grad=True)
    out = Twice.apply(x)
    out.sum().backward()
    return [weakref.ref(x), weakref.ref(out)]


@pytest.mark.parametrize("step", [_forward_and_backward, _forward_only, _no_grad, _custom_function])
def test_tensors_die_without_the_collector(step: Callable[[], list[Any]], level: str) -> None:
    with no_collector():
        assert all(_refs_of_a_step(step)), "it is so without the guard"
        with guarding(level):
            for _ in range(5):  # traced steps and others
                assert all(_refs_of_a_step(step))


def test_models_and_optimizers_are_let_go(level: str) -> None:
    with guarding(level):
        for _ in range(3):
            refs = _module_and_optimizer()
            gc.collect()  # a scheduler stands in a cycle with its optimizer
            assert [ref() for ref in refs] == [None] * len(refs)
    refs = _module_and_optimizer()


def test_nothing_is_kept_after_the_guard(level: str) -> None:
    gc.collect()
    there = {id(item) for item in gc.get_objects() if isinstance(item, torch.Tensor)}
    training: Training | None = WORKLOADS["conv"]()
    assert training is not None
    guard: Any = guarding(level)  # objects named to the guard live as long as it does
    with guard:
        for _ in range(5):
            training.step()
        x = torch.randn(3, requires_grad=True)
        y = x.sigmoid()
        y.mul_(2)
        with pytest.raises(RuntimeError):
            y.sum().backward()
    refs = [
        weakref.ref(training.model),
        weakref.ref(training.optimizer),
        *map(weakref.ref, training.model.parameters()),
        weakref.ref(x),
        weakref.ref(y),
    ]
    del training, x, y
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    assert not [item.shape for item in gc.get_objects() if type(item) is torch.Tensor and id(item) not in there]


def test_dropped_graphs_hold_no_memory(level: str) -> None:
    """Sixty graphs of a six-layer MLP, made and dropped: what acting in reinforcement learning does."""
    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Sigmoid())])
    x = torch.randn(128, 64)
    with no_collector(), guarding(level):
        net(x)
        before = _live_tensor_bytes()
        for _ in range(60):
            net(x)
        assert _live_tensor_bytes() - before <= 128 * 64 * 4


def _live_tensor_bytes() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return sum(nbytes for each in tensors for _, nbytes in memory_of(each))


def _peak(run: Callable[[], Any]) -> int:
    """The highest sum of bytes that PyTorch's CPU allocator had handed out at once during a call, above what it had at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False, acc_events=True) as profiler:
        run()
    now = high = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        high = max(high, now)
    assert events
    return high


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_peak_memory_of_a_step(name: str, level: str) -> None:
    training = WORKLOADS[name]()
    settings = fresh_settings(level)
    for _ in range(2):
        training.step()

    def guarded() -> None:
        with gradguard(settings=settings):
            training.step()

    bare = min(_peak(training.step) for _ in range(2))
    guarded()  # imports, caches
    peaks = [_peak(guarded) for _ in range(2)]
    print(f"{name} at {level}: {min(peaks) / bare - 1:+.2%} of {bare} bytes")
    # what a rule looks at is small: on models this tiny a page of it may show
    assert min(peaks) <= bare * 1.02 + 1024


def _size(journal: Any) -> dict[str, int]:
    return {name: len(value) for name, value in vars(journal).items() if hasattr(value, "__len__") and not isinstance(value, (str, tuple))}


def test_the_journal_keeps_its_bounds() -> None:
    journal = current_journal()
    limits: Limits = journal.limits
    x = torch.randn(2, requires_grad=True)
    with guarding("strict", actions={"silent": "off"}):
        for _ in range(1200):
            y = (x * 2).detach()
            y.add_(1)
            y.sum().item()
            with torch.no_grad():
                y = x + y
            (x * 2 + torch.tensor(y.sum().item())).sum().backward()
        for _ in range(limits.ops):
            x + 1
        kept = [(x * i).detach() for i in range(limits.cuts + 10)]
    sizes = _size(journal)
    print(sizes)
    del kept
    bounds = {
        "ops": limits.ops,
        "writes": limits.writes,
        "_backwards": limits.calls,
        "_steps": limits.calls,
        "_later": 3 * limits.calls,
        "modes": limits.modes,
        "escapes": limits.escapes,
        "_cuts": limits.cuts,
    }
    assert sizes["ops"] == limits.ops
    for name, bound in bounds.items():
        assert sizes[name] <= bound, name
    assert max(sizes.values()) <= limits.cuts


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_ten_thousand_steps_take_flat_memory_and_as_many_calls(level: str) -> None:
    weight = torch.randn(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    settings = fresh_settings(level)

    def steps(n: int) -> None:
        for i in range(n):
            with gradguard(settings=settings):
                weight.grad = None
                hidden = (weight * 2).sigmoid_()
                if i % 10 == 0:
                    with torch.no_grad():
                        hidden.mean().item()
                hidden.sum().backward()
                optimizer.step()

    def calls(n: int) -> int:
        """Calls of functions, Python's and C's, in so many steps: what they cost grows with that."""
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            steps(n)
        finally:
            sys.setprofile(None)
        return counted

    steps(4500)  # the rings of backward calls and optimizer steps are full then
    gc.collect()
    tracemalloc.start()
    try:
        steps(1200)  # the rings (1,024 calls) have turned over once, so that what leaves them is counted as well as what comes in
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        steps(800)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    early = calls(1000)
    steps(2000)
    late = calls(1000)
    sizes = _size(current_journal())
    print(f"{level}: {grown} bytes in 800 steps, {early / 1000:.1f} calls a step, then {late / 1000:.1f}, {sizes}")
    # the rings go on turning: a fact dropped was allocated before tracing began and is not counted, one made now is
    ring = 64 * 1024 * 1024 if level in ("strict", "forensic") else 512 * 1024
    assert grown < ring
    assert late < early * 1.05


@pytest.mark.slow
def test_memory_of_the_whole_process_is_flat() -> None:
    import resource

    weight = torch.randn(8, requires_grad=True)
    with guarding("strict"):

        def steps(n: int) -> None:
            for _ in range(n):
                weight.grad = None
                hidden = weight * 2
                with torch.no_grad():
                    hidden.mean().item()
                hidden.pow(2).mean().backward()

        steps(6000)
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        steps(4000)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"resident set grew by {grown} KiB over 4000 steps after 6000")
    assert grown < 2048


def test_a_session_keeps_no_guard(level: str) -> None:
    guard: Any = guarding(level)
    with guard:
        pass
    ref = weakref.ref(guard)
    del guard
    gc.collect()
    assert ref() is None
    assert not current_session().guards


def test_runs_of_many_lines_are_bounded() -> None:
    for i in range(200):
        scope: dict[str, Any] = {"gradguard": gradguard, "settings": fresh_settings("watch")}
        exec(compile("with gradguard(settings=settings): pass", f"<generated {i}>", "exec"), scope)
    assert len(current_session()._runs) <= 64
    with nullcontext():
        pass
