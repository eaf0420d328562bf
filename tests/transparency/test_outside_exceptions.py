"""A signal handler raises at each place in gradguard at which the interpreter looks for signals: it arrives, and nothing is left behind."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from gradguard.core.callsite import PACKAGE_DIR
from gradguard.instrumentation.fault_barrier import Shield
from gradguard.probes import compilers, diversions, torch_functions, warning_attribution
from gradguard.probes.operators import OpProbe
from gradguard.runtime.op_tracing import OpTracing
from gradguard.runtime.session import Session, current_session
from tests.transparency.helpers import guarding, stack_length

Place = tuple[CodeType, int]
_LOOKS = {dis.opmap[name] for name in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD") if name in dis.opmap}
_WATCHED = {
    function.__code__
    for kind in (Shield, OpTracing)
    for name, function in vars(kind).items()
    if hasattr(function, "__code__") and name != "__init__"
} | {each.__code__ for each in (OpProbe._mode_call, OpProbe._mode_switch, Session.trace, Session.begin_step, Session.close)}
_INSTALLING = {
    function.__code__
    for owner in (torch_functions, diversions, warning_attribution, diversions.Diversion, diversions.Surrounding)
    for function in vars(owner).values()
    if isinstance(function, FunctionType) and function.__code__.co_filename == getattr(sys.modules[function.__module__], "__file__", "")
} | {compilers.install.__code__, compilers._exchange.__code__}


class TimeUp(Exception):
    pass


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def raises(number: int, frame: Any) -> None:
        raise TimeUp("limit")

    before = signal.signal(signal.SIGUSR1, raises)
    yield
    signal.signal(signal.SIGUSR1, before)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(3, 4)).relu().pow(2).mean().backward()
    optimizer.step()
    with torch.no_grad():
        net(torch.ones(1, 4))


def _train(level: str) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with guarding(level):
        _step(net, optimizer)


def _run(program: Callable[[], None], watched: set[CodeType], seen: list[Place], target: Place | None) -> None:
    """Notes the places, or raises at the first that is the target."""
    before: dict[int, int] = {}

    def at(place: Place) -> None:
        if target is None:
            seen.append(place)
        elif place == target:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    def opcode(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            last, before[id(frame)] = before.get(id(frame)), frame.f_lasti
            if last is not None and frame.f_code.co_code[last] in _LOOKS:
                at((frame.f_code, frame.f_lasti))
        return opcode

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE_DIR) or frame.f_code not in watched:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before.pop(id(frame), None)
        return opcode

    tracer = sys.gettrace()
    sys.settrace(call)
    try:
        program()
    finally:
        sys.settrace(tracer)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer is there already")
def test_nothing_is_left_behind() -> None:
    seen: list[Place] = []
    _run(partial(_train, "forensic"), _WATCHED, seen, None)
    places = list(dict.fromkeys(seen))
    assert len(places) > 40
    wrong = []
    for place in places:
        arrived = False
        try:
            _run(partial(_train, "forensic"), _WATCHED, [], place)
        except TimeUp:
            arrived = True
        left = (stack_length(), torch._C._is_torch_function_enabled(), torch.is_grad_enabled(), len(current_session().guards))
        torch.set_grad_enabled(True)
        as_bare = place[0] is OpProbe._mode_call.__code__ and left == (0, True, False, 0)  # the moment after torch has switched it off
        if not arrived or (left != (0, True, True, 0) and not as_bare):
            wrong.append((place[0].co_name, place[1], arrived, *left))
    assert not wrong


def _enter() -> None:
    with guarding("watch"):
        pass


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer is there already")
def test_a_first_guard_that_is_cut_short_is_entered_anew() -> None:
    """What torch is watched at is put in place by the first guard of a process: all of it, or none."""
    seen: list[Place] = []
    torch_functions.uninstall()
    _run(_enter, _INSTALLING, seen, None)
    whole = _watched()
    places = list(dict.fromkeys(seen))
    assert len(places) > 100
    wrong = []
    for place in places[::6]:
        torch_functions.uninstall()
        with pytest.raises(TimeUp):
            _run(_enter, _INSTALLING, [], place)
        with guarding("watch") as guard:
            assert _watched() == whole, place
            _step(net := nn.Linear(4, 2), torch.optim.SGD(net.parameters(), lr=0.01))
        if (guard.run.ledger.steps, guard.run.ledger.backwards) != (1, 1):
            wrong.append((place[0].co_name, place[1]))
    assert not wrong


def _watched() -> tuple[int, ...]:
    return tuple(map(len, (torch_functions._diverted, torch_functions._replaced, torch_functions._hooks)))
