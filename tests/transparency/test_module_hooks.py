"""Hooks on all modules beside torch.compile: modules are watched in programs that compile something, and nothing compiled sees a hook."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from gradguard.probes.step_protocol import ModuleHook
from tests.running import applied, said
from tests.transparency.helpers import guarding


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


TRAINING = """
scale = torch.compile(lambda x: x.sin() * 2, backend="eager")
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
model = {model}
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scale(torch.ones(3))
for epoch in range(4):
    model.train()
    for _ in range(4):
        optimizer.zero_grad()
        model({given}).pow(2).mean().backward()
        optimizer.step()
{validation}
"""
LOOP = """
    {switch}
    with torch.no_grad():
        for _ in range(5):
            out = model({given})
"""
COMPREHENSION = """
    {switch}
    with torch.inference_mode():
        outs = [model({given}) for _ in range(5)]
"""
DECORATED = """
    @torch.no_grad()
    def validate():
        return sum(model(x).mean() for x in [{given} for _ in range(5)])
    {switch}
    validate()
"""
COMPILED = 'torch.compile(net, backend="eager")'


def _program(model: str, given: str, validation: str, switch: str) -> str:
    return TRAINING.format(model=model, given=given, validation=validation.format(given=given, switch=switch))


@pytest.mark.parametrize("validation", [LOOP, COMPREHENSION, DECORATED])
@pytest.mark.parametrize("model", ["net", COMPILED])
def test_validation_in_train_mode_is_found_where_something_is_compiled(model: str, validation: str, tmp_path: Path) -> None:
    source = _program(model, "scale(torch.randn(8, 4))", validation, "pass")
    (found,) = said(tmp_path, source)
    assert found.code == "GG609"
    assert "training` is True" in found.culprit.label and "model(" in found.culprit.text
    patch = found.fixes[0].patch
    assert patch is None or not said(tmp_path, applied(source, patch))


@pytest.mark.parametrize("validation, switch", [(LOOP, "model.eval()"), (COMPREHENSION, "net.eval()"), (DECORATED, "model.eval()")])
@pytest.mark.parametrize("model", ["net", COMPILED])
def test_validation_in_eval_mode_is_sound(switch: str, model: str, validation: str, tmp_path: Path) -> None:
    assert not said(tmp_path, _program(model, "scale(torch.randn(8, 4))", validation, switch))


def test_a_compiled_module_warns_of_the_users_hooks_only(level: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.ones(6, 4)
    compiled(x)
    ran: list[Any] = []
    with guarding(level), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            compiled(x).pow(2).mean().backward()
            optimizer.step()
        with torch.no_grad():
            assert modules._global_forward_pre_hooks, "a forward without grad is watched"
            compiled(x)
            assert modules._global_forward_pre_hooks
            assert not heard
            handle = modules.register_module_forward_pre_hook(lambda module, _: ran.append(module))
            compiled(x)
            handle.remove()
    assert ["global hooks" in str(each.message) for each in heard] == [True]
    assert compiled in ran
    assert not modules._global_forward_pre_hooks


def test_no_hook_stands_while_another_thread_runs_what_is_compiled() -> None:
    seen: list[tuple[int, bool]] = []

    def look(graph: Any, inputs: Any) -> Any:
        late = ModuleHook(modules.register_module_forward_pre_hook, lambda module, _: None)
        seen.append((len(modules._global_forward_pre_hooks), late.stands))
        return graph.forward

    with guarding("standard"):
        hook = ModuleHook(modules.register_module_forward_pre_hook, lambda module, _: None)
        assert hook.stands and len(modules._global_forward_pre_hooks) == 1
        thread = threading.Thread(target=lambda: torch.compile(lambda x: x.sin(), backend=look)(torch.ones(2)))
        thread.start()
        thread.join()
        assert not hook.stands
    assert seen == [(0, False)]


UNUSED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.side = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
    def forward(self, x):
        h = self.body(x)
        s = self.side(h)
        return self.head(h)
net = Net()
model = {model}
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    with torch.no_grad():
        net(torch.randn(8, 4))
"""


def test_calls_inside_what_is_compiled_are_not_taken_for_none(tmp_path: Path) -> None:
    """`side` runs with grad mode on too, where no hook sees it: that it is only called with grad mode off would be false."""
    (seen,) = said(tmp_path, UNUSED.format(model="net"))
    assert seen.code == "GG605" and "does not reach any loss" in seen.headline
    assert not said(tmp_path, UNUSED.format(model=COMPILED))
