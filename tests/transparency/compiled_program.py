"""What Dynamo does with programs, bare and then under guards, in a process where no guard was open before; prints what differs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

Step = Callable[[torch.Tensor], Any]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def whole_step() -> Step:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return torch.compile(step, backend="eager")


def compiled_module() -> Step:
    net = _net()
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        compiled(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        net.eval()
        with torch.no_grad():
            compiled(x)
        net.train()

    return step


def compiled_in_place() -> Step:
    net = _net()
    net.compile(backend="eager")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    update = torch.compile(optimizer.step, backend="eager")

    def step(x: torch.Tensor) -> None:
        net(x).pow(2).mean().backward()
        update()
        scheduler.step()
        net.zero_grad()

    return step


def modes_and_switches() -> Step:
    net = _net()
    weights = list(net.parameters())

    def prepare() -> None:
        net.eval()
        net.train()
        net.zero_grad()

    def step(x: torch.Tensor) -> torch.Tensor:
        prepare()
        with torch.no_grad():
            target = net(x)
        with torch.inference_mode():
            scale = x.abs().max()
        loss = (net(x) - target).pow(2).sum() / scale.clone()
        grads = torch.autograd.grad(loss, weights, allow_unused=True)
        nn.utils.clip_grad_value_(weights, 1.0)
        net.requires_grad_(True)
        return sum(g.sum() for g in grads if g is not None)  # type: ignore[return-value]

    return torch.compile(step, backend="eager")


def nothing_but_calls() -> Step:
    """Frames without any operator, which Dynamo leaves alone."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    functions = [torch.compile(f, backend="eager") for f in (net.train, net.eval, net.zero_grad, optimizer.zero_grad, optimizer.step)]

    def step(x: torch.Tensor) -> None:
        for function in functions:
            function()

    return step


def hooks_and_breaks() -> Step:
    net = _net()

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = net(x)
        hidden.register_hook(lambda grad: grad * 2)
        torch._dynamo.graph_break()
        if hidden.sum() > 0:
            hidden = hidden * 2
        return torch.utils.checkpoint.checkpoint(lambda h: h.sin().cos(), hidden, use_reentrant=False).sum()

    compiled = torch.compile(step, backend="eager")
    return lambda x: compiled(x).backward()


def other_shapes() -> Step:
    f = torch.compile(lambda x, n: torch.nn.functional.softmax(x * n, dim=-1), backend="eager")

    def step(x: torch.Tensor) -> None:
        for n in range(3):
            f(torch.ones(2 + n, 3, requires_grad=True), n).sum().backward()

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    f.__name__: f
    for f in (whole_step, compiled_module, compiled_in_place, modes_and_switches, nothing_but_calls, hooks_and_breaks, other_shapes)
}


def dynamo_on(make: Callable[[], Step], around: Callable[[], Any] = nullcontext) -> dict[str, Any]:
    """Dynamo's own counts, and what it has compiled: frames, operators in each graph, why it broke, why once more."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    torch.manual_seed(0)
    with around():
        step = make()
        for _ in range(5):  # traced steps and untraced ones
            step(torch.ones(6, 4))
    with around():
        step(torch.ones(6, 4))
    return {name: dict(counts) for name, counts in counters.items()} | {
        "compiled": [
            (each.compile_id, each.co_name, each.graph_op_count, each.fail_type, each.recompile_reason, each.restart_reasons)
            for each in get_compilation_metrics()
        ]
    }


def main(levels: list[str]) -> None:
    warnings.simplefilter("ignore")
    for make in PROGRAMS.values():  # some frames are compiled only once a process
        dynamo_on(make)
    bare = {name: dynamo_on(make) for name, make in PROGRAMS.items()}
    from gradguard import gradguard

    for level in levels:
        for name, make in PROGRAMS.items():
            guarded = dynamo_on(make, lambda level=level: gradguard(level=level, actions__silent="log"))  # type: ignore[misc]
            for key in sorted(bare[name].keys() | guarded.keys()):
                if bare[name].get(key) != guarded.get(key):
                    print(f"{level}, {name}: {key} {guarded.get(key)}, bare {bare[name].get(key)}")
    print(f"compared {len(levels) * len(PROGRAMS)}; frames {sum(each['frames']['total'] for each in bare.values())}")


if __name__ == "__main__":
    main(sys.argv[1:])
