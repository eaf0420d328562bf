"""Exceptions from outside pass gradguard; its own cost the part that raised them, and odd tensors are no fault at all."""

from __future__ import annotations

import ast
import ctypes
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gradguard
from gradguard.core.errors import GradGuardError
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation import fault_barrier
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Share
from gradguard.monitors.train_modes import Modes
from gradguard.probes import lost_paths
from gradguard.probes.listeners import local
from gradguard.probes.lost_paths import LostPaths
from gradguard.rules import registry
from gradguard.runtime.guard import Guard
from gradguard.runtime.session import Session, current_session
from tests.transparency.helpers import guarding, stack_length
from tests.transparency.workloads import mlp

_PACKAGE = Path(gradguard.__file__).parent
# They start programs and print: no training runs inside what they catch but the user's own, which they hand on.
_OUTSIDE = {
    *(f"cli/{name}.py" for name in ("main", "config_command", "fix_command", "sarif_command", "script")),
    *(f"config/{name}.py" for name in ("files", "settings", "sources")),
    "fixes/rewriting.py",  # for `gradguard fix`, in whose process no program runs
    "reporting/tracebacks.py",
    "runtime/module_isolation.py",  # before a program starts
    "core/foreign_exceptions.py",  # decides what is foreign
    "core/safe_read.py",  # stands below it, and catches what C raises of dictionaries that change
    "runtime/rerun/reachable_state.py",  # puts everything back first; its caller raises what was foreign
}
_BROAD = {"Exception", "BaseException", "OSError", "RuntimeError", "TimeoutError"}


class TimeUp(Exception):
    pass


@pytest.fixture(autouse=True)
def forgive() -> Iterator[None]:
    fault_barrier._told.clear()
    yield
    current_session().faulty = False
    current_session()._runs.clear()
    fault_barrier._told.clear()


def test_no_broad_except_stands_outside_the_barrier() -> None:
    found = []
    for path in _PACKAGE.rglob("*.py"):
        if path.relative_to(_PACKAGE).as_posix() in _OUTSIDE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                broad = node.type is None or any(isinstance(kind, ast.Name) and kind.id in _BROAD for kind in kinds)
                hands_on = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
                if broad and not hands_on:
                    found.append(f"{path.relative_to(_PACKAGE)}:{node.lineno}")
            elif isinstance(node, ast.Attribute) and node.attr == "suppress":
                found.append(f"{path.relative_to(_PACKAGE)}:{node.lineno}")
    assert not found, found


def _handler(number: int, frame: Any) -> None:
    raise TimeUp("limit")


def _gives_up_its_place(number: int, frame: Any) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise RuntimeError("limit")


class _Handlers:
    def method(self, number: int, frame: Any) -> None:
        raise ValueError("limit")

    def __call__(self, *arguments: Any) -> None:
        raise TimeoutError("limit")


@pytest.mark.parametrize(
    "handler", [_handler, _gives_up_its_place, partial(_handler), lambda *a: _handler(*a), _Handlers().method, _Handlers()]
)
def test_what_a_signal_handler_raises_is_not_caught(handler: Callable[..., None]) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    caught = None
    try:
        try:
            try:
                signal.raise_signal(signal.SIGUSR1)
            except internal_error() as error:
                caught = error
        except Exception as error:
            assert "limit" in str(error)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught is None


def test_what_another_thread_sends_is_not_caught() -> None:
    for kind in (TimeUp, TimeoutError, RuntimeError):
        caught: list[str] = []
        ready = threading.Event()

        def run(ready: threading.Event = ready, caught: list[str] = caught) -> None:
            try:
                try:
                    ready.set()
                    while True:
                        pass
                except internal_error():
                    caught.append("as one of gradguard's own")
            except Exception as error:
                caught.append(type(error).__name__)

        thread = threading.Thread(target=run)
        thread.start()
        ready.wait()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
        thread.join(10)
        assert caught == [kind.__name__]


def test_faults_of_its_own_are_caught() -> None:
    def fails(kind: str) -> Any:
        if kind == "raise":
            raise KeyError("x")
        if kind == "assert":
            assert not kind
        return {"call": lambda: int("x"), "attribute": lambda: None.x, "torch": lambda: torch.ones(2) @ torch.ones(3)}[kind]()  # type: ignore[attr-defined]

    for kind in ("raise", "assert", "call", "attribute", "torch"):
        try:
            fails(kind)
        except internal_error():
            pass


def test_libraries_of_settings_are_imported_before_a_guard_is_made() -> None:
    """A time limit in the middle of such an import leaves PyYAML so that no later import of it works."""
    program = "import sys, gradguard; gradguard.gradguard; sys.exit(not {'yaml', 'pydantic_settings'} <= set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_time_limits_arrive_and_leave_nothing_behind(level: str) -> None:
    """At moments spread over guarded training: all of them arrive."""
    training = mlp()
    before = signal.signal(signal.SIGALRM, _handler)
    try:
        for i in range(12):
            with pytest.raises(TimeUp):
                signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.0007 * i)
                with guarding(level):
                    for _ in range(5_000):
                        training.step()
            assert stack_length() == 0 and torch._C._is_torch_function_enabled()
            torch.set_grad_enabled(True)  # which PyTorch's own no_grad blocks may leave off, guarded or not
            assert not current_session().guards
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_exception_from_outside_at_the_edges_of_a_shield(monkeypatch: pytest.MonkeyPatch) -> None:
    session = current_session()
    monkeypatch.setattr(fault_barrier.Compiler, "running", lambda: _handler(1, None))  # right after torch functions were switched off
    with pytest.raises(TimeUp):
        with session.shield:
            raise AssertionError("entered")
    assert torch._C._is_torch_function_enabled()
    monkeypatch.undo()
    with guarding("standard"):
        session.lookout.__enter__()  # whose `__exit__` is never called
        assert not torch._C._is_torch_function_enabled()
    assert torch._C._is_torch_function_enabled()


def _write_in_place() -> GradGuardError | None:
    h = torch.tanh(torch.ones(2, requires_grad=True))
    h += 1
    try:
        h.sum().backward()
    except GradGuardError as error:
        return error
    except RuntimeError:
        return None
    raise AssertionError("nothing raised")


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_a_rule_that_fails_costs_itself(level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def fails(_: Any) -> Any:
        asked.append(1)
        raise KeyError("injected")

    rule = registry.get_rule("GG102")
    broken = type(rule)(**{**vars(rule), "recognise": fails, "priority": 10_000, "messages": ()})
    monkeypatch.setattr("gradguard.runtime.diagnoser.rules_for", lambda moment: (broken, *registry.rules_for(moment)))
    with Guard(level=level):
        for _ in range(3):
            error = _write_in_place()
            assert error is not None and error.diagnosis.code == "GG101"
    assert len(asked) == 1, "left out from then on"
    (said,) = _said(caplog)
    assert "rule GG102" in said and "off for the rest of this run" in said and "report it" in said


def test_a_monitor_that_fails_costs_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("injected")

    monkeypatch.setattr(Modes, "switched", fault_barrier.barred(fails))
    monkeypatch.setattr(Modes, "PART", "watch of train and eval modes")
    training = mlp()
    with Guard(level="strict") as guard:
        for _ in range(3):
            training.model.eval()
            training.model.train()
            training.step()
        session = current_session()
        assert session.tracing and not session.run.blind and not guard.run.ledger.failed
        assert _write_in_place() is not None
    assert len(_said(caplog)) == 1


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [(Ledger, "after_step", Ledger), (Share, "__init__", Ledger), (lost_paths, "storage_key", LostPaths)],
)
def test_a_part_that_fails_costs_itself(
    owner: Any, name: str, part: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it has called: it is told from the objects that the exception came through."""

    def fails(*_: Any) -> Any:
        raise KeyError("injected")

    monkeypatch.setattr(owner, name, fails)
    training = mlp()
    with Guard(level="strict") as guard:
        for _ in range(3):
            training.step()
            torch.ones(2, requires_grad=True).detach().numpy()
        session = current_session()
        assert session.tracing and not session.run.blind
        error = _write_in_place()
        assert error is not None and error.diagnosis.code == "GG101" and error.diagnosis.culprit is not None
    (said,) = _said(caplog)
    assert f"the {part.PART} had an internal fault, it is off" in said
    assert [type(each) for each in guard.run.muted] == [part]


@pytest.mark.parametrize("name", ["close", "steps_so_far"])
def test_a_guard_that_cannot_be_closed_in_good_order_is_left(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("injected")

    with guarding(level):
        mlp().step()
        with monkeypatch.context() as broken:
            guard = guarding(level).__enter__()
            broken.setattr(Session, name, fails)
            guard.__exit__(None, None, None)
        mlp().step()
        assert current_session().guards and guard not in current_session().guards
    assert stack_length() == 0 and local.listener is None
    with guarding(level):
        error = _write_in_place()
    assert error is not None and error.diagnosis.code == "GG101"
    assert len(_said(caplog)) == 1


def test_a_full_disk_costs_the_report(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with Guard(level="strict", report="/dev/full"):
        for _ in range(2):
            error = _write_in_place()
            assert error is not None and error.diagnosis.code == "GG101" and error.diagnosis.culprit is not None
        assert current_session().tracing
    (said,) = _said(caplog)
    assert "cannot write its report" in said and "No space left" in said


class _Poisoned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _GivesNumbers(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.numpy, torch.Tensor.data.__get__, torch.Tensor.tolist):
            return -1
        return super().__torch_function__(func, types, args, kwargs or {})


class _RefusesAttributes(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            raise RuntimeError("no attribute for you")
        return super().__torch_function__(func, types, args, kwargs or {})


class _Likes:
    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return lambda *args: getattr(self.inner, name)(*args)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.inner if type(value) is cls else type(value)(map(bare, value)) if type(value) in (tuple, list) else value

        return func(*bare(args), **{key: bare(value) for key, value in (kwargs or {}).items()})


def _poisoned_view() -> None:
    view = _Poisoned.apply(torch.rand(2, 3, requires_grad=True).clone())
    with torch.no_grad():
        view.t_()
    with pytest.raises(RuntimeError):
        view.add_(1)
    with pytest.raises(RuntimeError):
        (view * 2).sum().backward()


def _numbers_for_tensors() -> None:
    y = torch.randn(3, requires_grad=True).as_subclass(_GivesNumbers) * 2
    assert y.data == -1 and y.numpy() == -1


def _attributes_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2).as_subclass(_RefusesAttributes))
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([other], lr=0.1)
    for _ in range(4):
        torch.autograd.backward((weight.as_subclass(torch.Tensor) * other).sum())
        optimizer.step()
        optimizer.zero_grad()


def _tensor_likes() -> None:
    a = torch.randn(3, requires_grad=True)
    assert torch.autograd.grad(_Likes((a * a).sum()), _Likes(a))[0].equal(2 * a.detach())


@pytest.mark.parametrize("program", [_poisoned_view, _numbers_for_tensors, _attributes_refused, _tensor_likes])
def test_odd_tensors_are_no_fault(program: Callable[[], None], level: str, caplog: pytest.LogCaptureFixture) -> None:
    with Guard(level=level, actions__silent="log"):  # type: ignore[arg-type]
        program()
    assert not current_session().faulty
    assert not [said for said in _said(caplog) if "internal fault" in said]


def test_a_rule_file_that_cannot_be_loaded_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import importlib

    original = importlib.import_module
    lost = registry.get_rule("GG502").recognise.__module__

    def loads(name: str, package: str | None = None) -> Any:
        if name == lost:
            raise ImportError("no module of this name")
        return original(name, package)

    known = len(registry.all_rules())
    monkeypatch.setattr(registry, "import_module", loads)
    registry.all_rules.cache_clear()
    try:
        assert len(registry.all_rules()) == known - 1
        (said,) = _said(caplog)
        assert lost in said and "no module of this name" in said
    finally:
        registry.broken.clear()
        registry.all_rules.cache_clear()
