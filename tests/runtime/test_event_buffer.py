"""Coasting through calm steps: afterwards everything is known that would be known had each event been told at once."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import gradguard
from gradguard.instrumentation.journal import current_journal
from gradguard.monitors.numerics import Numbers
from gradguard.probes import replicas
from gradguard.probes.listeners import local
from gradguard.runtime import fast_path
from gradguard.runtime.guard import Guard
from gradguard.runtime.session import current_session

STEPS = 150


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the process may have left replicas or an Accelerator that accumulates, with which no step is calm."""
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    monkeypatch.setattr(replicas, "known", weakref.WeakKeyDictionary())
    current_session()._runs.clear()  # guards made at one line of this file share their run


class Training:
    """A small training of which a step can be taken."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.coasted = 0

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(8, 4)).pow(2).mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.coasted += local.coast is not None
        self.optimizer.step()


def _plain(guard: Guard) -> Training:
    training = Training()
    with guard:
        for _ in range(STEPS):
            training.step()
    return training


def _accumulating(guard: Guard) -> Training:
    training = Training()
    with guard:
        for step in range(2 * STEPS):
            (training.loss() / 2).backward()
            training.coasted += local.coast is not None
            if step % 2:
                training.optimizer.step()
                training.optimizer.zero_grad()
    return training


def _scheduled_and_clipped(guard: Guard) -> Training:
    training = Training()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, STEPS)
    with guard:
        for _ in range(STEPS):
            training.model.train()
            training.optimizer.zero_grad()
            training.loss().backward()
            training.coasted += local.coast is not None
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.optimizer.step()
            scheduler.step()
    return training


def _two_optimizers(guard: Guard) -> Training:
    training, other = Training(), Training()
    with guard:
        for _ in range(STEPS):
            training.step()
            other.step()
    return training


def _guarded_step_by_step(guard: Guard) -> Training:
    training = Training()
    for _ in range(STEPS):
        with guard:
            training.step()
        training.loss()  # outside: none of the guard's business
    return training


def _entered_twice(guard: Guard) -> Training:
    training = Training()
    with guard:
        for step in range(STEPS):
            with guard if step % 2 else nullcontext():
                training.step()
    return training


def _between_the_hooks_of_an_adapter(guard: Guard) -> Training:
    training = Training()
    for _ in range(STEPS):
        guard.__enter__()
        getattr(guard, "step", lambda step: step())(training.step)
        getattr(guard, "leave", lambda: None)()
    return training


def _with_an_average_of_the_weights(guard: Guard) -> Training:
    training = Training()
    average = [p.detach().clone() for p in training.model.parameters()]
    with guard:
        for _ in range(STEPS):
            training.step()
            with torch.no_grad():
                for mean, weight in zip(average, training.model.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)
    return training


def _with_validation(guard: Guard) -> Training:
    training = Training()
    with guard:
        for step in range(STEPS):
            training.step()
            if step % 20 == 19:
                training.model.eval()
                with torch.no_grad():
                    training.loss()
                training.model.train()
    return training


def _closures(guard: Guard) -> Training:
    training = Training()
    training.optimizer = torch.optim.LBFGS(training.model.parameters(), lr=1e-3, max_iter=2)

    def closure() -> float:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        training.coasted += local.coast is not None
        return loss.item()

    with guard:
        for _ in range(STEPS):
            training.optimizer.step(closure)
    return training


def _stepping_in_a_hook(guard: Guard) -> Training:
    training = Training()

    def hook(parameter: torch.Tensor) -> None:
        training.optimizer.step()
        training.optimizer.zero_grad()

    next(iter(training.model.parameters())).register_post_accumulate_grad_hook(hook)
    with guard:
        for _ in range(STEPS):
            training.loss().backward()
    return training


def _graphs_of_all_sizes(guard: Guard) -> Training:
    training = Training()
    with guard:
        for step in range(STEPS):
            out = training.model(torch.randn(8, 4))
            for _ in range(step * 7 % 199):
                out = out + 1e-3
            training.optimizer.zero_grad()
            out.pow(2).mean().backward()
            training.coasted += local.coast is not None
            training.optimizer.step()
    return training


_LIBRARY: dict[str, Any] = {}
exec(
    compile(
        """
def deep(depth, call, *args):
    return deep(depth - 1, call, *args) if depth else call(*args)

def backward(loss):
    loss.backward()
""",
        os.path.join(os.path.dirname(torch.__file__), "trainer_of_a_library.py"),
        "exec",
    ),
    _LIBRARY,
)


def _deep_in_a_library(guard: Guard) -> Training:
    """One instruction of the library's calls backward for several lines of the user's, in stacks of several depths."""
    training = Training()
    deep, backward = _LIBRARY["deep"], _LIBRARY["backward"]
    with guard:
        for step in range(5 * STEPS):
            training.optimizer.zero_grad()
            loss = training.loss()
            if step % 6 < 2:
                deep(20, backward, loss)
            elif step % 6 < 4:
                deep(20, backward, loss * 1)
            else:
                deep(20 - step % 4, lambda loss: deep(12, backward, loss), loss)
            training.coasted += local.coast is not None
            training.optimizer.step()
    return training


PROGRAMS = [
    _plain,
    _deep_in_a_library,
    _accumulating,
    _scheduled_and_clipped,
    _two_optimizers,
    _guarded_step_by_step,
    _entered_twice,
    _between_the_hooks_of_an_adapter,
    _with_an_average_of_the_weights,
    _with_validation,
    _closures,
    _stepping_in_a_hook,
    _graphs_of_all_sizes,
]


def _known(program: Callable[[Guard], Training], level: str) -> tuple[Training, dict[str, Any]]:
    """What journal, ledger and rules know after a run, without what differs between two runs in any case."""
    journal = current_journal()
    session = current_session()
    session.catch_up()
    calls, step, seq, tick = journal.backward_count, session.step, torch._C._autograd._get_sequence_nr(), journal.tick()
    session._runs.clear()
    guard = gradguard(level=level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training = program(guard)
    session.catch_up()
    ledger = guard.run.ledger
    numbers = guard.run.notes[Numbers]
    known = {
        "steps": (ledger.steps, ledger.backwards, session.step - step, guard.run.depth.steps, guard.run.depth.sizes),
        "backwards": [
            (
                fact.index - calls,
                fact.step - step,
                fact.site,
                [root - seq for root in fact.root_seqs],
                fact.seq - seq,
                fact.retain_graph,
                fact.nested,
                fact.stack,
            )
            for fact in journal.backwards
            if fact.clock > tick
        ],
        "optimizer steps": [
            (fact.seq - seq, fact.step - step, fact.site, fact.type_name, fact.optimizer() is not None)
            for fact in journal.steps
            if fact.clock > tick
        ],
        "order": [
            kind for _, kind in sorted([(f.clock, "b") for f in journal.backwards] + [(f.clock, "s") for f in journal.steps]) if _ > tick
        ],
        "books": [(book.steps, book.rates.highest, book.rates.zero, book.rates.tiny) for book in ledger.books.values()],
        "losses": [(plan.calls, list(plan.losses)) for plan in numbers.plans.values()],
        "schedules": [(each.calls, each.site, each.steps_at_call) for each in ledger.schedules._known.values()],
        "said": [diagnosis.code for diagnosis in guard.diagnoses],
    }
    return training, known


@pytest.mark.parametrize("level", ["watch", "standard"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_forgotten(program: Callable[[Guard], Training], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for coasts in (True, False):  # from one line, since lines are what is compared
        with monkeypatch.context() as patched:
            if not coasts:
                patched.setattr(fast_path, "set_off", lambda session, run: None)
            runs.append(_known(program, level))
    (coasting, known), (awake, expected) = runs
    assert not awake.coasted
    for what in expected:
        assert known[what] == expected[what], what
    if program is not _stepping_in_a_hook:
        assert coasting.coasted > 10
    for ours, theirs in zip(coasting.model.parameters(), awake.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_and_random_state_are_those_of_a_bare_run(program: Callable[[Any], Training]) -> None:
    guarded = program(gradguard())
    state = torch.get_rng_state()
    bare = program(nullcontext())
    assert torch.equal(state, torch.get_rng_state())
    for ours, theirs in zip(guarded.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_optimizer_that_dies_on_the_way_is_counted_to_its_last_step() -> None:
    training, second = Training(), Training()
    with gradguard(level="watch") as guard:
        for step in range(120):
            training.step()
            if second is not None:
                second.step()
            if step == 100:
                assert local.coast is not None
                book = guard.run.ledger.books[id(second.optimizer)]
                second = None  # type: ignore[assignment]
                gc.collect()
                assert book.ref() is None
                assert book.steps == 101
    assert guard.run.ledger.steps == 221
    assert guard.diagnoses == []


def test_the_second_backward_of_a_calm_step_names_the_first() -> None:
    training = Training()
    with pytest.raises(RuntimeError, match="GG2") as caught, gradguard(level="watch"):
        for step in range(100):
            training.optimizer.zero_grad()
            loss = training.loss()
            loss.backward()  # the first
            if step == 90:
                assert local.coast is not None
                loss.backward()  # the second
            training.optimizer.step()
    text = str(caught.value)
    assert "# the first" in text
    assert "# the second" in text


def test_state_carried_over_from_a_calm_step_is_named() -> None:
    torch.manual_seed(0)
    cell, head = nn.GRUCell(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=1e-3)
    hidden = torch.zeros(2, 8)
    with pytest.raises(RuntimeError, match="GG20") as caught, gradguard(level="watch"):
        for step in range(100):
            hidden = cell(torch.randn(2, 4), hidden if step > 90 else hidden.detach())
            loss = head(hidden).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert "hidden" in str(caught.value)


def test_a_failure_outside_any_backward_call_knows_the_calm_steps() -> None:
    training = Training()
    guard = gradguard(level="watch")
    with pytest.raises(IndexError), guard:
        for step in range(100):
            training.step()
            if step == 90:
                assert local.coast is not None
                raise IndexError("the data ran out")
    assert local.coast is None
    assert guard.run.ledger.steps == 91


def test_a_gradient_beyond_all_bounds_ends_the_stretch_in_its_own_step() -> None:
    training = Training()
    scale = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gradguard(level="watch") as guard:
            for step in range(100):
                if step == 90:
                    assert local.coast is not None
                    scale = math.inf
                training.optimizer.zero_grad()
                (training.loss() * scale).backward()
                training.optimizer.step()
    assert guard.diagnoses[0].code == "GG501"
    assert guard.diagnoses[0].step == 91


def test_a_guard_of_another_run_in_between() -> None:
    training = Training()
    first, second = gradguard(level="watch"), gradguard(level="standard")
    for step in range(100):
        with first:
            training.step()
        if step > 80:
            with second:
                training.step()
    assert first.run.ledger.steps == 100
    assert second.run.ledger.steps == 19
    assert first.diagnoses == second.diagnoses == []


def test_a_guard_within_a_guard() -> None:
    training = Training()
    with gradguard(level="watch") as outer:
        for step in range(100):
            with gradguard(level="strict") if step % 3 else nullcontext():
                training.step()
    assert outer.run.ledger.steps == 100
    assert outer.diagnoses == []


def test_threads_coast_on_their_own() -> None:
    guard = gradguard(level="watch")
    steps: list[int] = []

    def work() -> None:
        training = Training()
        with guard:
            for _ in range(100):
                training.step()
            steps.append(guard.run.ledger.steps + (0 if local.coast is None else local.coast.stepped))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps == [100, 100, 100]


def test_what_was_written_down_is_let_go_with_its_thread() -> None:
    refs: list[weakref.ref[Any]] = []

    def work() -> None:
        training = Training()
        guard = gradguard(level="watch")
        for _ in range(100):
            with guard:
                training.step()
        refs.append(weakref.ref(training.model))
        refs.append(weakref.ref(training.optimizer))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_an_optimizer_never_seen_before_ends_the_stretch() -> None:
    training = Training()
    late = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1e-3)
    with gradguard(level="watch") as guard:
        for step in range(100):
            training.step()
            if step == 90:
                assert local.coast is not None
                late.param_groups[0]["params"][0].grad = torch.ones(2)
                late.step()
                assert guard.run.ledger.books[id(late)].steps == 1


def test_a_mode_of_the_users_sees_nothing_of_the_guard() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def counted(guard: Any) -> list[str]:
        training = Training()
        Count.seen = []
        with guard:
            for step in range(100):
                with Count() if step >= 90 else nullcontext():
                    training.step()
        return Count.seen

    assert counted(gradguard(level="watch")) == counted(nullcontext())


def test_a_learning_rate_that_is_a_tensor_is_not_kept_alive() -> None:
    training = Training()
    scale = torch.ones((), requires_grad=True)
    with gradguard(level="watch"):
        for step in range(100):
            training.step()
            if step == 90:
                assert local.coast is not None
                rate = (scale * 1e-3).clone()
                training.optimizer.param_groups[0]["lr"] = rate.detach()
                ref = weakref.ref(training.optimizer.param_groups[0]["lr"])
                training.step()
                training.optimizer.param_groups[0]["lr"] = 1e-3
                assert local.coast is not None
                assert ref() is None


def test_a_scheduler_that_dies_on_the_way_has_been_stepped() -> None:
    training = Training()
    with gradguard(level="watch") as guard:
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1_000)
        for step in range(100):
            training.step()
            if step <= 90:
                scheduler.step()
            if step == 90:
                assert local.coast is not None
                del scheduler
                gc.collect()
        current_session().catch_up()
        (schedule,) = guard.run.ledger.schedules._known.values()
    assert schedule.calls == 91


def test_the_rates_of_an_optimizer_that_dies_on_the_way_are_known() -> None:
    training = Training()
    with gradguard(level="watch") as guard:
        for step in range(100):
            training.step()
            if step == 80:
                training.optimizer.param_groups[0]["lr"] = 1e-2
        book = guard.run.ledger.books[id(training.optimizer)]
        assert local.coast is not None
        del training
        gc.collect()
        assert book.ref() is None
    assert book.rates.highest == 1e-2


@pytest.mark.parametrize("level", ["watch", "strict"])
def test_what_a_handler_of_a_signal_raises_gets_through(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that runs out while gradguard's own code runs."""

    class TooLong(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise TooLong

    training = Training()
    before = signal.signal(signal.SIGALRM, handler)
    steps = 0
    try:
        with pytest.raises(TooLong), gradguard(level=level):
            for step in range(100):
                if step == 90:  # as if the signal came right there
                    place = (
                        "gradguard.instrumentation.event_buffer.sequence_number"
                        if level == "watch"
                        else "gradguard.runtime.backward_calls.user_stack"
                    )
                    monkeypatch.setattr(place, lambda *_: handler(signal.SIGALRM, None))
                training.step()
                steps += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert steps == 90
