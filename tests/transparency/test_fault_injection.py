"""Every function of gradguard that runs in a guarded training is made to raise, one after the other: training goes on bit for bit.

By default a fixed sample is taken, since each function takes a training of its own; `ALL_FAULTS=1` in the environment takes all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from inspect import isfunction
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import gradguard as package
from gradguard.instrumentation import fault_barrier
from gradguard.runtime.guard import Guard
from tests.transparency.helpers import stack_length

_ALL = bool(os.environ.get("ALL_FAULTS"))
_ALONE = "FAULTS_IN_THIS_PROCESS"
_SAMPLED = 60  # of some 1,000
_HERE = os.path.dirname(os.path.abspath(package.__file__)) + os.sep

# What the barrier itself is made of: code of a few lines that stands around the user's calls, or decides whether anything listens.
_BARRIER = {
    *("gradguard.core.foreign_exceptions", "gradguard.instrumentation.fault_barrier", "gradguard.config.settings", "gradguard.core.errors"),
    *(
        f"gradguard.core.safe_read.{name}"  # by which the barrier tells whose exception one is
        for name in ("unless_loud", "function_code", "in_class", "namespace", "variables_of", "own_variable")
    ),
    *("gradguard.probes.listeners.listener", "gradguard.probes.listeners.tracer", "gradguard.probes.listeners.idle_listener"),
    *(
        "gradguard.probes.operators.OpProbe.__torch_function__",
        "gradguard.runtime.session.Session.fault",
        "gradguard.runtime.session.Session.lookout",
        "gradguard.runtime.session.Session.tracing",
    ),
    *(
        f"gradguard.runtime.session.Session.{name}"
        for name in ("run_backward", "run_engine", "run_python", "run_function", "unwatched", "_off")
    ),
    *(
        f"gradguard.runtime.session.Session.{name}"
        for name in ("before_step", "after_step", "protocol", "run_checkpoint", "coasted_returned", "compiled_begins", "compiled_ends")
    ),
    *(
        f"gradguard.torch_compat.private_api.{name}"
        for name in ("call_alone", "stands_alone", "mode_is_active", "remove_mode", "is_compiling")
    ),
    *(
        f"gradguard.runtime.guard.Guard.{name}"
        for name in ("__init__", "__enter__", "__exit__", "watch", "explaining", "step", "steps", "_leave")
    ),
    *("gradguard.runtime.rerun.guarded_step.run_step", "gradguard.runtime.guard.Guard.of_run", "gradguard.probes.step_protocol._caller"),
    *(f"gradguard.runtime.op_tracing.OpTracing.{name}" for name in ("run_engine", "run_python", "unwatched")),
    "gradguard.probes.step_protocol._forward",
    *(f"gradguard.torch_compat.saved_tensors.{name}" for name in ("unpack", "_check", "_put_back", "acts", "unhooked", "Packed.__init__")),
    *(
        f"gradguard.probes.saved_tensor_hooks.{name}"
        for name in ("_packed", "SavedTensors._pack", "SavedTensors._noted", "SavedTensors.apply")
    ),
    *(f"gradguard.torch_compat.private_api.{name}" for name in ("quiet", "_foreign_modes")),  # which every shield begins with
    *(f"gradguard.probes.compilers.{name}" for name in ("_enter", "_leave", "Aside", "swap_callback")),
}


class Boom(Exception):
    pass


def _boom(*_: Any, **__: Any) -> Any:
    raise Boom("injected")


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5


def _sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def _train(steps: int = 6) -> list[Any]:
    """A training with what gradguard has probes for, and failures that the program itself catches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    seen: list[Any] = []
    for i in range(steps):
        x = torch.randn(5, 4)
        if i != 4:
            optimizer.zero_grad()
        loss = (_Halves.apply(model(x)) - x.sum(1, keepdim=True).detach()).pow(2).mean()
        loss.backward()
        seen.append(loss.item())
        for failing in (_write_in_place, _wrong_shape, _twice) if i in (1, 3) else ():
            with pytest.raises(RuntimeError) as info:
                failing(model, x)
            seen.append(isinstance(info.value, RuntimeError))
        if i == 2:
            seen.append(torch.autograd.grad(model(x).sum(), model[0].weight)[0].clone())
            seen.append(torch.compile(_sine, backend="eager")(model(x)).detach())
            seen.append(torch.jit.trace(torch.cos, x, check_trace=False)(x))
            with torch.no_grad():
                model.eval()
                seen.append(model(x).numpy().sum())
                model.train()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return [*seen, *[p.detach().clone() for p in model.parameters()], torch.get_rng_state()]


def _write_in_place(model: nn.Module, x: torch.Tensor) -> None:
    h = torch.tanh(model(x))
    h += 1
    h.sum().backward()


def _wrong_shape(model: nn.Module, x: torch.Tensor) -> None:
    (model(x) @ torch.ones(5, 5)).sum().backward()


def _twice(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).pow(2).sum()
    loss.backward()
    loss.backward()


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def _guarded(level: str) -> tuple[Any, int]:
    """The training in a thread of its own, with what is left on the function-mode stack: sessions are per thread."""
    result: list[Any] = [None, 0]

    def run() -> None:
        try:
            with Guard(level=level, actions__silent="log"):  # type: ignore[arg-type]
                result[0] = _train()
        except BaseException as error:
            result[0] = error
        result[1] = stack_length()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0], result[1]


def _run_codes(level: str) -> set[CodeType]:
    """The code objects of gradguard's that a guarded training runs."""
    codes: set[CodeType] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_HERE):
            codes.add(frame.f_code)

    threading.setprofile(note)
    try:
        _guarded(level)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return codes


def _functions() -> Iterator[tuple[str, Any, str, Any]]:
    """(label, owner, name, function) of everything that can be replaced: functions of modules, methods, properties."""
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith("gradguard") or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if isfunction(value) and value.__module__ == module_name:
                yield f"{module_name}.{name}", module, name, value
            elif isinstance(value, type) and value.__module__ == module_name:
                for inner, held in list(vars(value).items()):
                    function = getattr(held, "fget", None) or getattr(held, "func", None) or getattr(held, "__func__", None) or held
                    if isfunction(function) and inner != "__init_subclass__":
                        yield f"{module_name}.{value.__qualname__}.{inner}", value, inner, function


def _code_of(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__  # type: ignore[no-any-return]


def _exempt(label: str) -> bool:
    return any(label == known or label.startswith(f"{known}.") for known in _BARRIER)


def _break(owner: Any, name: str, function: Any) -> Callable[[], None]:
    """Puts a function that raises in a function's place, also where it was imported by name; returns what takes it back."""
    undo: list[tuple[Any, str, Any]] = [(owner, name, vars(owner)[name])]
    if isinstance(owner, ModuleType):
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("gradguard") and module is not owner:
                undo += [(module, other, value) for other, value in vars(module).items() if value is function]
    for place, attribute, value in undo:
        if isinstance(value, property) or hasattr(value, "func"):
            setattr(place, attribute, property(_boom))
        else:
            setattr(place, attribute, staticmethod(_boom) if isinstance(value, (staticmethod, classmethod)) else _boom)

    def put_back() -> None:
        for place, attribute, value in undo:
            setattr(place, attribute, value)

    return put_back


@pytest.mark.slow
@pytest.mark.parametrize("level", ["standard", "forensic"])
def test_whatever_fails_in_gradguard_the_training_goes_on(level: str, caplog: pytest.LogCaptureFixture) -> None:
    if _ALONE not in os.environ:  # a process of its own: which functions run depends on what other tests have run before
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"{__file__}", "-k", level]
        done = subprocess.run(command, env={**os.environ, _ALONE: "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:]
        return
    warnings.simplefilter("ignore")
    bare = _train()
    assert isinstance(_guarded(level)[0], list)  # rules and replacements are loaded once
    codes = _run_codes(level)
    targets = [each for each in _functions() if _code_of(each[3]) in codes and not _exempt(each[0])]
    assert len(targets) > 300
    if not _ALL:
        begin = ["standard", "forensic"].index(level)
        targets = targets[begin :: max(1, len(targets) * 2 // _SAMPLED)]
    wrong = []
    for label, owner, name, function in targets:
        fault_barrier._told.clear()
        caplog.clear()
        put_back = _break(owner, name, function)
        try:
            result, left = _guarded(level)
        finally:
            put_back()
        said = [record.getMessage() for record in caplog.records if "internal fault" in record.getMessage()]
        if not isinstance(result, list) or not _same(result, bare):
            wrong.append(f"{label}: {type(result).__name__} {result if isinstance(result, BaseException) else 'differs'}")
        elif left:
            wrong.append(f"{label}: a mode was left on the stack")
        elif len(said) > 1:
            wrong.append(f"{label}: said {len(said)} times: {said[1]}")
    assert not wrong, "\n".join(wrong)
