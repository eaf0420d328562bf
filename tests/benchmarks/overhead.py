"""What the guard costs, as median ratios to bare training.

    python tests/benchmarks/overhead.py [--pairs 30] [--levels watch,strict] [--clock wall|cpu] [--run-in 3] [--amortised 2000] [--loops 3]

Bare, guarded and anomaly-mode steps alternate in one process, so that drift of the machine hits all alike; each figure is
the median over pairs of (steps under X) / (bare steps right before). A run's first steps are looked at more closely than
those after: `--run-in` says how many go before the measuring, `--amortised` measures whole loops, first steps and all.
Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from workloads import WORKLOADS, Step

from gradguard import gradguard
from gradguard.runtime.guard import Guard

Context = Callable[[], AbstractContextManager[object]]


def timed(step: Step, context: Context, repeat: int, clock: Callable[[], float]) -> float:
    """Seconds for `repeat` steps, each under a context of its own."""
    start = clock()
    for _ in range(repeat):
        with context():
            step()
    return clock() - start


def timed_loop(step: Step, context: Context, repeat: int, clock: Callable[[], float]) -> float:
    """Seconds for `repeat` steps under one context around the loop."""
    start = clock()
    with context():
        for _ in range(repeat):
            step()
    return clock() - start


def measure(
    make: Callable[[], Step], contexts: dict[str, Context], pairs: int, clock: Callable[[], float], run_in: int
) -> dict[str, float]:
    """Median ratios to bare for each context, after `run_in` steps under each."""
    torch.manual_seed(0)
    step = make()
    for context in (nullcontext, *contexts.values()):
        timed(step, context, run_in, clock)
    once = timed(step, nullcontext, 5, clock) / 5
    repeat = max(1, int(0.02 / max(once, 1e-6)))
    ratios: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(pairs):
        for name, context in contexts.items():
            bare = timed(step, nullcontext, repeat, clock)
            ratios[name].append(timed(step, context, repeat, clock) / bare)
    return {name: statistics.median(values) for name, values in ratios.items()}


def amortised(make: Callable[[], Step], levels: list[str], steps: int, pairs: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median ratios of whole loops of `steps` steps under one guard, each of a training and a run of its own."""

    def of_its_own(level: str) -> Guard:
        guard = gradguard(level=level)
        guard.made_at = None  # else those made at one line share what they remember, and only the first loop would have first steps
        return guard

    def loop(context: Context) -> float:
        torch.manual_seed(0)
        step = make()
        timed_loop(step, nullcontext, 5, clock)
        return timed_loop(step, context, steps, clock)

    ratios: dict[str, list[float]] = {level: [] for level in levels}
    for _ in range(pairs):
        for level in levels:
            bare = loop(nullcontext)
            ratios[level].append(loop(partial(of_its_own, level)) / bare)
    return {level: statistics.median(values) for level, values in ratios.items()}


def table(title: str, rows: dict[str, dict[str, float]]) -> str:
    """A markdown table of ratios."""
    columns = list(next(iter(rows.values())))
    lines = [f"| {title} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| {name} | " + " | ".join(f"x{row[column]:.3f}" for column in columns) + " |" for name, row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--levels", default="watch,standard,strict,forensic")
    parser.add_argument("--only", default="", help="a part of a workload's name")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--run-in", type=int, default=3, metavar="STEPS", help="steps under each guard before any is measured")
    parser.add_argument("--amortised", type=int, default=0, metavar="STEPS", help="also whole loops of so many steps under one guard")
    parser.add_argument("--loops", type=int, default=3, help="pairs of such loops")
    parser.add_argument("--memory", action="store_true", help="also with the account of memory")
    parser.add_argument("--only-loops", action="store_true", help="leave out the steps under a guard of their own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    levels = options.levels.split(",")
    guards = {level: gradguard(level=level) for level in levels}
    contexts: dict[str, Context] = {level: (lambda guard=guard: guard) for level, guard in guards.items()}  # type: ignore[misc]
    if options.memory:
        accounted = gradguard(level="watch", memory=True)
        contexts["watch, memory"] = lambda: accounted
    contexts["anomaly mode"] = lambda: torch.autograd.set_detect_anomaly(True)
    chosen = {name: make for name, make in WORKLOADS.items() if options.only in name}
    if not options.only_loops:
        rows = {name: measure(make, contexts, options.pairs, clock, options.run_in) for name, make in chosen.items()}
        print(table("each step under a guard", rows))
    if options.amortised:
        rows = {name: amortised(make, levels, options.amortised, options.loops, clock) for name, make in chosen.items()}
        print("\n" + table(f"{options.amortised} steps under one guard", rows))


if __name__ == "__main__":
    main()
