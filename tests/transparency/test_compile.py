"""torch.compile under the guard: equal results, and neither a frame, a graph, a break nor a recompilation more or fewer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F

from gradguard import gradguard
from gradguard.probes.listeners import local
from tests.transparency.helpers import bits, fresh_settings, guarding, stack_length


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(F.relu(self.first(x), inplace=True))
        with torch.no_grad():
            scale = hidden.abs().mean()
        return self.second(Scale.apply(hidden)) / (scale + 1)


def _train(level: str | None, steps: int, inside: bool, backend: Any = "aot_eager", fullgraph: bool = True) -> list[Any]:
    torch.manual_seed(0)
    net = Net()
    compiled = torch.compile(net, backend=backend, fullgraph=fullgraph)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    settings = None if level is None else fresh_settings(level)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = compiled(torch.randn(4, 6)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if settings is None:
        losses = [step() for _ in range(steps)]
    elif inside:
        losses = []
        for _ in range(steps):
            with gradguard(settings=settings):
                losses.append(step())
    else:
        with gradguard(settings=settings):
            losses = [step() for _ in range(steps)]
    return [bits(t) for t in losses] + [bits(p) for p in net.parameters()]


def _numbers() -> tuple[int, dict[str, int]]:
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def _on_the_input(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad * 2)
    return (x * x).mul(3)


def _on_a_result(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    y.register_hook(lambda grad: grad * 2)
    return y.mul(3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("hooked", [_on_the_input, _on_a_result])
def test_hooks_registered_in_a_compiled_function(hooked: Any, backend: str, level: str) -> None:
    """Dynamo's code for them has constants that cannot be hashed, nor can the code."""
    found = []
    for guard in (nullcontext(), guarding(level)):
        torch._dynamo.reset()
        x = torch.ones(3, requires_grad=True)
        with guard:
            torch.compile(hooked, backend=backend)(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("inside", [False, True], ids=["around the loop", "around each step"])
def test_aot_eager_is_identical_and_breaks_no_graph(inside: bool, level: str) -> None:
    bare = _train(None, 8, inside)
    bare_graphs, bare_breaks = _numbers()
    torch._dynamo.reset()
    counters.clear()
    guarded = _train(level, 8, inside)
    graphs, breaks = _numbers()
    assert guarded == bare
    assert breaks == bare_breaks == {}
    assert graphs == bare_graphs


def test_traced_phases_share_their_graph_with_the_others() -> None:
    """Steps 1-3 are traced, then one in five."""
    counter = CompileCounterWithBackend("aot_eager")
    net = nn.Linear(3, 1)
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with guarding("standard", trace={"every": 5}):
        for _ in range(24):
            optimizer.zero_grad()
            compiled(torch.randn(2, 3)).mean().backward()
            optimizer.step()
    assert counter.frame_count == 1


def test_a_compiled_function_made_before_the_guard_is_not_compiled_again_at_watch() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return x.sin() * y

    x = torch.randn(3, requires_grad=True)
    f(x).sum().backward()
    with guarding("watch"):
        f(x).sum().backward()
    f(x).sum().backward()
    with torch.no_grad():
        f(x)
        count = counter.frame_count
        with guarding("watch"):
            f(x)
    assert counter.frame_count == count == 2


def test_what_is_replaced_is_transparent_to_dynamo(level: str) -> None:
    """Each function that gradguard replaces, inside a compiled region."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False)
    x = torch.randn(2, 3, 8)

    def whole(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            a = encoder(x)
        with torch.enable_grad():
            b = Scale.apply(encoder(x))
        with torch.inference_mode(False):
            return a + b

    bare = whole(x)
    counters.clear()
    before = torch.compile(whole, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with guarding(level):
        compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
        found = compiled(x)
        compiled(x)
    assert bits(found) == bits(before)
    assert torch.allclose(found, bare, atol=1e-6)
    assert not counters["graph_break"]


def test_a_region_that_breaks_breaks_the_same(level: str) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        if y.sum() > 0:
            y = y * 2
        return y.cos()

    def run(guarded: bool) -> Any:
        torch._dynamo.reset()
        counters.clear()
        x = torch.ones(3, requires_grad=True)
        f = torch.compile(broken, backend="aot_eager")
        if guarded:
            with guarding(level):
                f(x).sum().backward()
        else:
            f(x).sum().backward()
        assert x.grad is not None
        return bits(x.grad), *_numbers()

    assert run(True) == run(False)


def test_a_backward_inside_a_compiled_step(level: str) -> None:
    net = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(net(x).sum(), [net.weight])
        return grad

    def run(guarded: bool) -> Any:
        torch._dynamo.reset()
        x = torch.ones(2, 3)
        f = torch.compile(step, backend="eager")
        if guarded:
            with guarding(level):
                return bits(f(x))
        return bits(f(x))

    assert run(True) == run(False)


def test_the_guard_inside_a_compiled_function_does_not_break_it(level: str) -> None:
    settings = fresh_settings(level)

    def f(x: torch.Tensor) -> torch.Tensor:
        with gradguard(settings=settings):
            return x.sin() * 2

    x = torch.ones(2)
    assert torch.equal(torch.compile(f, backend="eager")(x), x.sin() * 2)


def test_compiled_optimizers(level: str) -> None:
    def run(guarded: bool) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        step = torch.compile(lambda: optimizer.step(), backend="eager")

        def loop() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(2, 3)).sum().backward()
                step()

        if guarded:
            with guarding(level):
                loop()
        else:
            loop()
        return [bits(p) for p in net.parameters()]

    assert run(True) == run(False)


def _failing(graph: Any, inputs: Any) -> Any:
    raise ValueError("this backend compiles nothing")


def _fails_in_a_call(x: torch.Tensor) -> None:
    torch.compile(lambda x: x.sin(), backend=_failing)(x)


def _fails_in_a_block(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    with torch._dynamo.optimize(_failing):
        f(x)


def _fails_in_a_torch_function(x: torch.Tensor) -> None:
    F.triplet_margin_with_distance_loss(x, x + 1, x + 2, distance_function=torch.compile(lambda a, b: (a - b).sum(1), backend=_failing))


def _fails_in_a_backward(x: torch.Tensor) -> None:
    y = x * 2
    y.register_hook(torch.compile(lambda grad: grad.tan(), backend=_failing))
    y.sum().backward()


def _compiles_in_a_torch_function(x: torch.Tensor) -> None:
    F.triplet_margin_with_distance_loss(x, x + 1, x + 2, distance_function=torch.compile(lambda a, b: (a - b).sum(1), backend="eager"))


@pytest.mark.parametrize(
    "program", [_fails_in_a_call, _fails_in_a_block, _fails_in_a_torch_function, _fails_in_a_backward, _compiles_in_a_torch_function]
)
def test_the_function_modes_are_as_before_after_a_compile(program: Any, level: str) -> None:
    """Whether or not it succeeds: ours is there once, and not counted by who counts them; the next step is watched as before."""
    x = torch.ones(2, 3, requires_grad=True)
    with guarding(level):
        (x * 1).sum().backward()
        before, told = stack_length(), torch._C._len_torch_function_stack()
        for _ in range(2):
            with nullcontext() if program is _compiles_in_a_torch_function else pytest.raises(Exception):
                program(x)
            assert (stack_length(), torch._C._len_torch_function_stack()) == (before, told) == (before, 0)
            assert not local.compiled
    assert stack_length() == 0


def test_dynamo_compiles_what_it_compiles_without_a_guard() -> None:
    """Frames, graphs, breaks and recompilations of compiled programs; in a process of their own, where the bare runs come first."""
    command = [sys.executable, "-m", "tests.transparency.compiled_program", "watch", "standard"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    *different, compared = done.stdout.splitlines()
    assert not different, done.stdout
    assert compared.startswith("compared 14; frames ")


def test_a_backward_that_is_compiled_as_a_whole(level: str) -> None:
    """Dynamo compiles the hooks of its nodes with it: there are none but the program's."""

    def run(guard: Any) -> list[float]:
        torch._dynamo.reset()
        x = torch.ones(3, requires_grad=True)
        compiler = lambda graph: torch.compile(graph, backend="eager", fullgraph=True)
        with torch._dynamo.compiled_autograd._enable(compiler), guard:
            y = x.exp()
            y.register_hook(lambda grad: grad * 2)
            y.sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run(guarding(level)) == run(nullcontext())


@pytest.mark.slow
@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
def test_inductor(level: str) -> None:
    def train(level: str | None) -> Any:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3))
        compiled = torch.compile(net, backend="inductor", fullgraph=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with guarding(level) if level else nullcontext():
            for _ in range(4):
                optimizer.zero_grad()
                compiled(torch.randn(2, 3)).tanh().pow(2).mean().backward()
                optimizer.step()
        return [bits(p) for p in net.parameters()], bits(torch.get_rng_state())

    assert train(level) == train(None)
    assert not counters["graph_break"]


@pytest.mark.parametrize("settings", [{"level": "forensic"}, {"level": "watch", "memory": True}], ids=["forensic", "memory"])
def test_a_backward_that_alone_is_compiled_as_a_whole(settings: dict[str, Any]) -> None:
    """The graph was made before, and gradguard's hooks hold what it has saved."""

    def train(guard: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net, counter, found = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), CompileCounterWithBackend("eager"), []
        with guard:
            for _ in range(3):
                loss = net(torch.randn(4, 6)).exp().mean()
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter, fullgraph=True)):
                    loss.backward()
                found.append([bits(parameter.grad) for parameter in net.parameters() if parameter.grad is not None])
                net.zero_grad()
            hidden = net[0](torch.randn(4, 6)).tanh()
            hidden.mul_(2)
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter, fullgraph=True)):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    hidden.sum().backward()
        return [*found, counter.frame_count]

    overrides = dict(settings)
    assert train(guarding(overrides.pop("level"), **overrides)) == train(nullcontext())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_that_takes_no_hooks(backend: str, level: str) -> None:
    """The graph itself runs where Dynamo compiles nothing, and that does not end the compiled function."""

    def run(guard: Any) -> float:
        torch._dynamo.reset()
        with guard:
            return torch.compile(lambda x: torch.func.grad(torch.sin)(x.sum()), backend=backend, fullgraph=True)(torch.ones(3)).item()

    assert run(guarding(level)) == run(nullcontext())
