"""`guard.step`: a step that fails untraced is run again, traced, and nothing of the second run stays."""

from __future__ import annotations

import os
import queue
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import GradGuardError, gradguard
from gradguard.config.settings import load_settings
from gradguard.runtime.rerun.random_state import RandomState


def untraced(**settings: Any) -> Any:
    return gradguard(trace__mode="never", trace__first_steps=0, **settings)


def alone() -> Any:
    """An untraced guard with a run of its own: no earlier failure has made it trace the next steps."""
    return gradguard(settings=load_settings(level="standard", trace={"mode": "never", "first_steps": 0}))


def line_of(function: Any, text: str) -> int:
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


class Training:
    """A model with dropout, a buffer, momentum and a learning rate schedule; `step` writes a saved tensor in place."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.loose = torch.randn(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([*self.model.parameters(), self.loose], lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.runs = 0

    def step(self, bad: bool = True) -> torch.Tensor:
        self.runs += 1
        hidden = torch.exp(self.model(torch.randn(5, 3))) + random.random()
        shown = torch.exp(hidden * self.loose)
        if bad:
            shown.add_(1)  # the culprit
        loss = shown.mean()
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def everything(self) -> list[torch.Tensor]:
        tensors = [*self.model.state_dict().values(), self.loose]
        tensors += [p.grad for p in [*self.model.parameters(), self.loose] if p.grad is not None]
        tensors += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        rates = [group["lr"] for group in self.optimizer.param_groups] + [float(self.scheduler.last_epoch)]
        return [t.detach().clone() for t in tensors] + [torch.tensor(rates), torch.get_rng_state(), torch.tensor(random.getstate()[1])]


def test_an_untraced_failure_names_its_line() -> None:
    training, guard = Training(), untraced()
    with pytest.raises(GradGuardError) as caught:
        guard.step(training.step)
    assert isinstance(caught.value, RuntimeError)
    found = caught.value.diagnosis
    assert (found.code, found.culprit.line) == ("GG101", line_of(Training.step, "the culprit"))
    assert any("run again" in note for note in found.notes)
    assert training.runs == 1, "what the second run counted is put back"
    assert [d.code for d in guard.diagnoses] == ["GG101"]
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_nothing_of_the_second_run_stays() -> None:
    guarded, bare = Training(), Training()
    for training in (bare, guarded):
        random.seed(1)
        torch.manual_seed(1)
        training.step(bad=False)
        if training is bare:
            with pytest.raises(RuntimeError):
                training.step()
        else:
            with pytest.raises(GradGuardError):
                untraced().step(training.step)
        training.now = training.everything()  # type: ignore[attr-defined]
    pairs = zip(bare.now, guarded.now, strict=True)  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in pairs)
    assert "step" not in vars(nn.Module)
    for training in (bare, guarded):  # and training goes on alike
        torch.manual_seed(2)
        random.seed(2)
        training.step(bad=False)
    assert all(torch.equal(a, b) for a, b in zip(bare.everything(), guarded.everything(), strict=True))


def test_what_the_step_writes_by_hand_is_put_back() -> None:
    weight = torch.ones(3, requires_grad=True)
    module = nn.Linear(2, 2)

    def step() -> None:
        module.eval()
        module.weight.requires_grad_(False)
        with torch.no_grad():
            weight.mul_(2)
        shown = weight.exp()
        shown += 1
        shown.sum().backward()

    with pytest.raises(GradGuardError):
        untraced().step(step)
    assert weight.tolist() == [2.0, 2.0, 2.0], "the first run's write stands, the second run's does not"
    assert weight.grad is None
    assert module.training is False
    assert not module.weight.requires_grad


def test_a_failure_that_does_not_come_again_says_so() -> None:
    weight = torch.ones(3, requires_grad=True)
    runs: list[int] = []

    def step() -> None:
        runs.append(1)
        shown = weight.exp()
        if len(runs) == 1:
            shown += 1
        shown.sum().backward()

    with pytest.raises(GradGuardError) as caught:
        untraced().step(step)
    assert any("did not fail" in note for note in caught.value.diagnosis.notes)
    assert len(runs) == 1


def test_a_closure_is_run_and_not_applied() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        shown = weight.exp()
        shown += 1  # the culprit
        loss = shown.sum()
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step(closure)

    with pytest.raises(GradGuardError) as caught:
        untraced().step(step)
    assert caught.value.diagnosis.culprit is not None
    assert caught.value.diagnosis.culprit.line == line_of(test_a_closure_is_run_and_not_applied, "the culprit")
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert optimizer.state == {} or "d" not in optimizer.state[weight]


def test_a_traced_failure_is_not_run_again() -> None:
    training = Training()
    with pytest.raises(GradGuardError):
        gradguard(level="strict").step(training.step)
    assert training.runs == 1


def test_a_program_that_steers_itself_by_an_exception_is_not_run_again() -> None:
    class Pruned(Exception):
        pass

    runs: list[int] = []

    def step() -> None:
        runs.append(1)
        raise Pruned("enough")

    with pytest.raises(Pruned, match="enough"):
        untraced().step(step)
    assert len(runs) == 1


def test_a_step_that_succeeds_leaves_later_diagnoses_alone() -> None:
    training, guard = Training(), untraced()
    guard.step(training.step, bad=False)
    with pytest.raises(GradGuardError), guard:
        training.step()


def test_an_interrupt_passes() -> None:
    guard = untraced()

    def step() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.step(step)
    with pytest.raises(GradGuardError), guard:
        Training().step()


def test_every_generator_is_restored() -> None:
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(0)  # its generator is made when it is first asked for

    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(numpy.random.rand())]

    for fresh in (True, False, False):
        before = RandomState(fresh)
        drawn = draw()
        assert draw() != drawn
        before.restore()
        assert draw() == drawn


def test_pythons_generator_is_restored_whatever_moved_it() -> None:
    moves = [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.getrandbits(7),
        lambda: random.shuffle([1, 2, 3]),
        lambda: random.seed(5),
    ]
    for move in [*moves, *moves]:
        move()
        state = random.getstate()
        before, again = RandomState(fresh=False), RandomState(fresh=False)
        for taken in (before, again):
            random.random()
            random.gauss(0, 1)
            taken.restore()
            assert random.getstate() == state


def test_values_come_back() -> None:
    assert untraced().step(lambda a, *, b: (a, b), 1, b=2) == (1, 2)
    assert gradguard(level="off").step(lambda: 3) == 3


def test_what_the_program_counts_and_draws_itself_is_put_back() -> None:
    numpy = pytest.importorskip("numpy")

    class Counter:
        total = 0
        __slots__ = ("own",)

    def program(call: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        generator, drawn, python = torch.Generator().manual_seed(3), numpy.random.default_rng(3), random.Random(3)
        array, plain, seen = numpy.zeros(2), torch.zeros(2), {"losses": [0.0], "names": set()}
        counter, calls = Counter(), 0
        counter.own = 0
        Counter.total = 0

        def step() -> None:
            nonlocal calls
            calls += 1
            Counter.total += 1
            counter.own += 1
            model.steps = getattr(model, "steps", 0) + 1
            noise = torch.randn(6, 4, generator=generator) + float(drawn.normal()) + python.random()
            array[0] += 1
            plain.add_(1)
            optimizer.zero_grad()
            loss = model(noise).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen["losses"].append(loss.item())
            seen["names"].add(calls)
            seen[calls] = calls
            print("a step")
            loss.backward()

        for _ in range(2):
            with pytest.raises(RuntimeError):
                call(step)
        state = [calls, Counter.total, counter.own, model.steps, array.tolist(), plain.tolist(), seen, scaler.get_scale()]
        draws = [torch.rand(1, generator=generator).item(), float(drawn.normal()), python.random(), torch.rand(1).item()]
        return [*state, *draws, model.weight.tolist()]

    guard = alone()
    assert program(guard.step) == program(lambda step: step())
    assert any("run again" in note for found in guard.diagnoses for note in found.notes)


def test_a_step_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.ones(3, requires_grad=True)

    def step() -> None:
        print("here")
        shown = weight.exp()
        shown += 1
        shown.sum().backward()

    with pytest.raises(GradGuardError) as caught:
        alone().step(step)
    assert capsys.readouterr().out == "here\n"
    assert caught.value.diagnosis.culprit is not None


def outside(kind: str, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Something that keeps its state where a guard cannot put it back: how a step uses it, and what is seen of it afterwards."""
    log = folder / "log.txt"
    if kind == "generator":
        left = [1.0, 2.0, 3.0]
        numbers = (left.pop() for _ in range(3))
        return lambda: numbers.__next__(), lambda: left
    if kind == "file":
        file = log.open("w")
        return lambda: file.write("step\n"), lambda: (file.flush(), log.read_text())[1]
    if kind == "opened":
        path = str(log)

        def append() -> None:
            with open(path, "a") as out:
                out.write("step\n")

        return append, log.read_text
    if kind == "queue":
        waiting: queue.Queue[int] = queue.Queue()
        return lambda: waiting.put(1), waiting.qsize
    if kind == "save":
        return lambda: torch.save({}, folder / str(len(os.listdir(folder)))), lambda: len(os.listdir(folder))
    return lambda: subprocess.run(["mkdir", str(folder / str(len(os.listdir(folder))))], check=True), lambda: len(os.listdir(folder))


@pytest.mark.parametrize("kind", ["generator", "file", "opened", "queue", "save", "subprocess"])
def test_what_cannot_be_put_back_is_not_touched_again(kind: str, tmp_path: Path) -> None:
    for name in ("bare", "guarded"):
        (tmp_path / name).mkdir()
    use, look = outside(kind, tmp_path / "guarded")
    weight = torch.ones(3, requires_grad=True)

    def step() -> None:
        use()
        loss = weight.exp().sum()
        loss.backward()
        loss.backward()

    with pytest.raises(GradGuardError) as caught:
        alone().step(step)
    assert any("was not run again" in note for note in caught.value.diagnosis.notes)
    used, (bare, seen) = look(), outside(kind, tmp_path / "bare")
    bare()
    assert used == seen()
