"""A fault in gradguard itself never breaks training: it is told once on the logger, and the guard steps back."""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradguard.analysis.graph.node_values import GraphValues, health, plain
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.instrumentation import fault_barrier
from gradguard.instrumentation.journal import Journal
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.probes import replicas
from gradguard.probes.lost_paths import LostPaths
from gradguard.probes.operators import OpProbe
from gradguard.runtime import backward_calls, fast_path
from gradguard.runtime import session as session_module
from gradguard.runtime.calm_steps import Calm
from gradguard.runtime.module_hooks import ModuleHooks
from gradguard.runtime.run import Run
from gradguard.runtime.session import Session, current_session
from gradguard.runtime.trace_schedule import Depth
from tests.running import HEAD, run_source
from tests.transparency.helpers import bits, guarding, stack_length
from tests.transparency.workloads import mlp


class Fault(Exception):
    pass


def _fail(*_: Any, **__: Any) -> Any:
    raise Fault("injected")


@pytest.fixture(autouse=True)
def forgive() -> Iterator[None]:
    yield
    _forgive()


def _forgive() -> None:
    session = current_session()
    session.faulty = False
    fault_barrier._told.clear()
    session._runs.clear()  # guards made at one line share what was left out


def _train(level: str | None) -> list[Any]:
    torch.manual_seed(3)
    training = mlp()
    if level is None:
        for _ in range(5):
            training.step()
    else:
        with guarding(level):
            for _ in range(5):
                training.step()
                training.model(training.batch()[0]).detach().add_(1).sum().item()
                torch.manual_seed(3)
                with torch.no_grad():
                    training.model(training.batch()[0])
                torch.manual_seed(3)
    return [bits(t) for t in training.state()]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (OpProbe, "_gradless"),
        (OpProbe, "_writes"),
        (LostPaths, "cut"),
        (LostPaths, "operand"),
        (LostPaths, "_inputs"),
        (LostPaths, "escape"),
        (OpProbe, "_mode_switch"),
        (Journal, "remember_cut"),
        (Journal, "cut_of"),
        (session_module, "backward_fact"),
        (Session, "moment"),
        (session_module, "user_frame"),
        (session_module, "StepFact"),
        (backward_calls, "BackwardFact"),
        (session_module, "site_of"),
        (Session, "_tell"),
        (ModuleHooks, "pause"),
        (Ledger, "opened"),
        (Ledger, "before_step"),
        (Depth, "next_step"),
        (Depth, "pause"),
        (Run, "tell_repeats"),
        (Run, "silent_rules"),
    ],
)
def test_a_failing_part_leaves_the_training_as_it_is(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    def bare() -> list[Any]:
        torch.manual_seed(3)
        training = mlp()
        for _ in range(5):
            training.step()
            torch.manual_seed(3)
        return [bits(t) for t in training.state()]

    expected = bare()
    monkeypatch.setattr(owner, name, _fail)
    with caplog.at_level(logging.ERROR, logger="gradguard"):
        found = _train(level)
    assert found == expected
    assert stack_length() == 0
    told = [record for record in caplog.records if "had an internal fault" in record.getMessage()]
    assert len(told) <= 1, "said once"
    if told:
        assert told[0].name == "gradguard"
        assert "Fault: injected" in told[0].getMessage()
        assert "training goes on" in told[0].getMessage()
        assert current_session().faulty


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        (LostPaths, "_inputs", LostPaths.PART),
        (Ledger, "after_backward", Ledger.PART),
    ],
)
def test_only_the_part_that_failed_is_lost(
    owner: Any, name: str, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever in the package the part lives: the innermost one in the traceback is off, nothing else is."""
    asked = getattr(owner, name)

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked(self, *args, **kwargs)
        raise Fault("injected")

    monkeypatch.setattr(owner, name, fail)
    with caplog.at_level(logging.ERROR, logger="gradguard"):
        _train("strict")
    told = [record.getMessage() for record in caplog.records if "had an internal fault" in record.getMessage()]
    assert [line.split(" had an internal fault, ")[0] for line in told] == [f"gradguard: the {part}"]
    assert "it is off for the rest of this run" in told[0]


def test_a_fault_while_diagnosing_lets_the_original_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    for owner, name in ((Incident, "says"), (FrameView, "locals"), (Session, "incident")):
        _forgive()
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, property(_fail) if name == "locals" else _fail)
            with pytest.raises(RuntimeError) as info:
                with guarding(level):
                    x = torch.ones(2, requires_grad=True)
                    y = x.sigmoid()
                    y.mul_(2)
                    y.sum().backward()
        if type(info.value) is not RuntimeError:
            continue  # the diagnosis did without
        assert "modified by an inplace operation" in str(info.value)
        assert [record for record in caplog.records if record.name == "gradguard"]
    assert stack_length() == 0


def test_a_missing_private_name_degrades(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a torch release without function-mode stack access would: nothing is traced, everything works."""
    from gradguard.torch_compat import private_api

    for name in ("_len_stack", "_push", "_pop", "_stack_at"):
        monkeypatch.setattr(private_api, name, None)
    with guarding("strict"):
        assert stack_length() == 0
        mlp().step()
        x = torch.ones(2, requires_grad=True)
        y = x.sigmoid()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            y.sum().backward()


@pytest.mark.parametrize(("owner", "name"), [(fast_path, "tell"), (fast_path, "set_off"), (Calm, "begins")])
def test_a_fault_in_a_calm_step(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def train(guarded: bool) -> list[Any]:
        torch.manual_seed(3)
        training = mlp()
        with guarding("standard") if guarded else nullcontext():
            for _ in range(90):
                training.step()
        return [bits(t) for t in training.state()]

    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)  # of other tests: with an Accelerator no step is calm
    monkeypatch.setattr(replicas, "known", weakref.WeakKeyDictionary())
    bare = train(False)
    monkeypatch.setattr(owner, name, _fail)
    assert train(True) == bare
    assert [record.message for record in caplog.records if "internal fault" in record.message], "the calm path was never taken"


def test_an_object_that_warns_when_it_is_looked_at_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `torch.distributed.reduce_op` does, which `import torch.distributed as dist` brings along."""
    source = """
import warnings

class Deprecated:
    def __getattribute__(self, key):
        warnings.warn("use the new name", FutureWarning, stacklevel=2)
        return object.__getattribute__(self, key)

old_name = Deprecated()
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(6):
    net(torch.randn(5, 4)).pow(2).mean().backward()
    opt.step()
"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = run_source(tmp_path, HEAD + source, "standard")
    assert [diagnosis.code for diagnosis, _ in said] == ["GG601"]
    assert not [warning for warning in caught if warning.category is FutureWarning]
    assert not [record for record in caplog.records if "internal fault" in record.message]


def test_the_values_of_fake_tensors_are_not_read() -> None:
    """They say of themselves that they are on the CPU, and raise when an element is asked for."""
    with FakeTensorMode():
        fake = torch.ones(3, 2, requires_grad=True)
        result = fake.exp().square()
    assert fake.device.type == "cpu"
    assert plain(fake) is None
    assert health(fake).finite
    assert GraphValues([result.grad_fn], [fake]).output(result.grad_fn) is None
    assert plain(torch.ones(2)) is not None
    assert plain(torch.ones(0)) is not None


def test_gradients_made_in_inference_mode_are_gradients_like_others(level: str) -> None:
    """They have no version counter: asked for it, PyTorch raises."""

    def run() -> list[Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for turn in range(18):
            optimizer.zero_grad()
            if turn % 3:
                net(torch.randn(3, 4)).pow(2).mean().backward()
            with torch.inference_mode():
                for parameter in net.parameters():
                    parameter.grad = torch.ones_like(parameter) * turn if parameter.grad is None else parameter.grad * 0.5
            torch.nn.utils.clip_grad_norm_([parameter for parameter in net.parameters() if not parameter.grad.is_inference()], 1.0)
            _ = [parameter.grad + 1 for parameter in net.parameters()]
            optimizer.step()
        return [bits(parameter) for parameter in net.parameters()]

    bare = run()
    with guarding(level) as guard:
        assert run() == bare
    assert not current_session().faulty and not guard.run.muted and not guard.diagnoses
