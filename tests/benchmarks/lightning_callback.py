"""What the Lightning callback costs a fit, as median ratios to the same fit without it.

    python tests/benchmarks/lightning_callback.py [--pairs 10] [--steps 400] [--levels watch,strict] [--clock wall|cpu]

Fits without and with the callback alternate in one process, so that drift of the machine hits both alike. Each starts from the
same weights and goes through the same batches of 64, without checkpoints, progress bar or logger. Two figures a network: the
whole loop, from on_train_start to on_fit_end, its closely watched first steps and the callback's last look included; and the
median step, which is what a long fit pays and what another process on the machine disturbs least. Each is the median over pairs
of (fit with the callback) / (fit without), with the quartiles beside it. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from overhead import table
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradguard.integrations.lightning import GradGuardCallback

BATCH = 64


class Classifier(pl.LightningModule):
    """A network with a loss and Adam around it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.body(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def mlp() -> nn.Module:
    """Three linear layers on flat 28x28 images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def conv_net() -> nn.Module:
    """Two convolutions with batch norm on 28x28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {"3-layer MLP": mlp, "conv net": conv_net}


class Stopwatch(pl.Callback):
    """The moments at which a fit began, ended each of its steps, and ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.moments: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.moments.append(self.clock())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.moments.append(self.clock())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.moments.append(self.clock())


def timed(make: Callable[[], nn.Module], level: str | None, steps: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a fit's loop and of its median step; without the callback where there is no level."""
    torch.manual_seed(0)
    images, labels = torch.randn(50 * BATCH, 1, 28, 28), torch.randint(0, 10, (50 * BATCH,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH)
    watch = Stopwatch(clock)
    callbacks: list[pl.Callback] = [watch]  # first: the guard does nothing before it
    if level is not None:
        callbacks.append(GradGuardCallback(level=level))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(max_steps=steps, max_epochs=-1, accelerator="cpu", callbacks=callbacks, **off)  # type: ignore[arg-type]
    trainer.fit(Classifier(make()), loader)
    moments = watch.moments
    return moments[-1] - moments[0], statistics.median(after - before for before, after in pairwise(moments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400, help="of each fit")
    parser.add_argument("--levels", default="watch,standard,strict")
    parser.add_argument("--only", default="", help="a part of a network's name")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    medians: dict[str, dict[str, float]] = {}
    spreads: list[str] = []
    levels = options.levels.split(",")
    for name, make in NETWORKS.items():
        if options.only not in name:
            continue
        for level in (None, *levels):  # what the first fit of a process loads and compiles is nobody's cost
            timed(make, level, options.steps, clock)
        whole: dict[str, list[float]] = {level: [] for level in levels}
        steps: dict[str, list[float]] = {level: [] for level in levels}
        bare_steps = []
        for _ in range(options.pairs):
            for level in levels:
                bare, bare_step = timed(make, None, options.steps, clock)
                guarded, guarded_step = timed(make, level, options.steps, clock)
                whole[level].append(guarded / bare)
                steps[level].append(guarded_step / bare_step)
                bare_steps.append(bare_step)
        spreads.append(f"{name}: a step without the callback takes {statistics.median(bare_steps) * 1e3:.2f} ms; quartiles")
        for row, ratios in ((f"{name}, {options.steps} steps", whole), (f"{name}, median step", steps)):
            medians[row] = {level: statistics.median(values) for level, values in ratios.items()}
            spreads.append(f"  {row}: {quartiles(ratios)}")
    print(table("a fit with the callback", medians) + "\n\n" + "\n".join(spreads))


def quartiles(ratios: dict[str, list[float]]) -> str:
    """The middle half of each level's ratios."""
    halves = {level: statistics.quantiles(values, n=4) for level, values in ratios.items() if len(values) > 1}
    return ", ".join(f"{level} x{low:.3f} to x{high:.3f}" for level, (low, _, high) in halves.items())


if __name__ == "__main__":
    main()
