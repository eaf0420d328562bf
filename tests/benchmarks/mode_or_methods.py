"""What seeing in-place writes costs: a function mode that does nothing, one that notes every call's place, and in-place methods
replaced by recording wrappers. The figures behind the choice in `gradguard/probes/operators.py`.

    python tests/benchmarks/mode_or_methods.py [--pairs 20]

Median ratios of loops to bare ones right before, in pairs. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from overhead import table, timed_loop
from torch.overrides import TorchFunctionMode
from workloads import WORKLOADS

from gradguard import gradguard


class Idle(TorchFunctionMode):
    """Hands every call through."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Noting(TorchFunctionMode):
    """Hands every call through and notes where it was made, with the graph's count before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count = torch._C._autograd._get_sequence_nr
        before = count()
        result = func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        self.notes.append((before, count(), frame.f_code, frame.f_lasti, func))
        if len(self.notes) > 10_000:
            self.notes.clear()
        return result


@contextmanager
def replaced_methods() -> Iterator[None]:
    """Every in-place method of tensors notes place and version; calls that are no writes are not seen at all."""
    notes: list[Any] = []

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before = self._version
            result = original(self, *args, **kwargs)
            frame = sys._getframe(1)
            notes.append((before, self._version, frame.f_code, frame.f_lasti))
            if len(notes) > 10_000:
                notes.clear()
            return result

        return method

    names = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_") and name != "requires_grad_"]
    names += ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"]
    originals = {name: getattr(torch.Tensor, name) for name in names if callable(getattr(torch.Tensor, name))}
    for name, original in originals.items():
        setattr(torch.Tensor, name, recording(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def measure(make: Callable[[], Any], contexts: dict[str, Any], pairs: int) -> dict[str, float]:
    """Median ratios of loops of some steps, each under one context, to bare loops right before."""
    torch.manual_seed(0)
    step = make()
    for context in (nullcontext, *contexts.values()):
        timed_loop(step, context, 10, time.perf_counter)
    once = timed_loop(step, nullcontext, 5, time.perf_counter) / 5
    repeat = max(3, int(0.05 / max(once, 1e-6)))
    ratios: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(pairs):
        for name, context in contexts.items():
            bare = timed_loop(step, nullcontext, repeat, time.perf_counter)
            ratios[name].append(timed_loop(step, context, repeat, time.perf_counter) / bare)
    return {name: statistics.median(values) for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    contexts: dict[str, Any] = {
        "idle mode": Idle,
        "noting mode": Noting,
        "replaced methods": replaced_methods,
        "gradguard, traced": lambda: gradguard(level="strict"),
    }
    rows = {name: measure(make, contexts, pairs) for name, make in WORKLOADS.items()}
    print(table("a loop under", rows))


if __name__ == "__main__":
    main()
