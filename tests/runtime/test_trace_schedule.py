"""Which steps are traced at the default level, and that a guard costs nothing that piles up."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import gradguard
from gradguard.runtime.guard import Guard
from gradguard.runtime.session import current_session


def _loop(
    net: nn.Module, optimizer: torch.optim.Optimizer, guard: Guard, steps: int, width: Callable[[int], int] = lambda i: 1
) -> list[bool]:
    """Trains under one guard, entered anew in each step; says of each step whether it was traced."""
    traced = []
    for i in range(steps):
        _ = torch.ones(3, requires_grad=True) * 2 if i % 3 else None  # what runs outside of the guard makes nodes too
        with guard:
            traced.append(current_session().tracing)
            optimizer.zero_grad()
            loss = net(torch.randn(4, 2)).pow(2).mean()
            for _ in range(width(i)):
                loss = loss * 1.0
            loss.backward()
            optimizer.step()
    return traced


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


def test_a_steady_loop_is_traced_in_its_first_steps_alone() -> None:
    net, optimizer = _made()
    assert _loop(net, optimizer, gradguard(level="standard"), 40) == [True] * 3 + [False] * 37


def test_another_graph_is_traced_again() -> None:
    net, optimizer = _made()
    traced = _loop(net, optimizer, gradguard(level="standard"), 30, lambda i: 5 if i >= 20 else 1)
    assert traced[3:21] == [False] * 18
    assert traced[21:24] == [True] * 3
    assert traced[24:] == [False] * 6


@pytest.mark.parametrize("change", ["switch", "optimizer"])
def test_a_switch_of_modes_and_a_new_optimizer_are_traced_again(change: str) -> None:
    net, optimizer = _made()
    guard = gradguard(level="standard")
    assert not any(_loop(net, optimizer, guard, 20)[3:])
    with guard:
        if change == "switch":
            net.eval()
        else:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    traced = _loop(net, optimizer, guard, 8)
    assert any(traced[:3])
    assert not any(traced[5:])


def test_the_journal_is_as_large_as_the_settings_say() -> None:
    journal = current_session().journal
    with gradguard(level="strict", journal={"ops": 32, "writes": 16}):
        value = torch.ones(3, requires_grad=True)
        for _ in range(100):
            value = value * 1.5
        assert len(journal.ops) == 32
        assert journal.writes.maxlen == 16
    with gradguard(level="strict"):
        (torch.ones(3, requires_grad=True) * 2).sum().backward()
        assert journal.ops.maxlen == 16_384


def test_entering_an_adapters_guard_again_registers_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(level="watch")
    guard.made_at = None  # as for guards that no line of the user's has made
    with guard:
        run = guard.run
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    for _ in range(20):
        with guard:
            assert guard.run is run
    assert registered == []
