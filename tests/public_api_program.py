"""A user's program by the public names alone: `make types` checks it as strictly as a user may, and tests/test_public_api.py runs it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import nn

import gradguard as package
from gradguard import (
    ConfigError,
    Diagnosis,
    Fix,
    GradGuardError,
    GradGuardWarning,
    Guard,
    MemoryReport,
    RunSummary,
    Settings,
    SourceSpan,
    TensorFacts,
    UnknownRuleError,
    Verification,
    Writer,
    explain,
    gradguard,
    ignore,
)

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Board:
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...


class SummaryWriter:
    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: float | None = None, new_style: bool = False
    ) -> None: ...


class Logger:
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...


class Run:
    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None: ...


def write(metrics: object, step: int) -> None: ...


def write_dict(metrics: dict[str, float], step: int) -> None: ...


writers: list[Writer] = [Board(), SummaryWriter(), Logger(), Run(), write]
guard: Guard = gradguard(model, optimizer, level="strict", report="r.jsonl", writer=write_dict, write_every=10, trace__every=500)
for each in writers:
    gradguard(writer=each)
with_settings = gradguard(settings=Settings(level="watch"))


@gradguard()
def step(batch: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    total: torch.Tensor = (model(batch) * scale).sum()
    return total


@gradguard(model)
async def later(batch: torch.Tensor) -> float:
    return float(model(batch).sum())


@guard
def batches() -> Iterator[torch.Tensor]:
    yield torch.randn(2, 4)


loss: torch.Tensor = step(torch.randn(2, 4), scale=2.0)
number: torch.Tensor = guard.step(step, torch.randn(2, 4), scale=1.0)
for batch in guard.steps([torch.randn(2, 4)]):
    shape: torch.Size = batch.shape
with guard as entered, ignore("GG604", "GG6"):
    entered.watch(model).diagnoses.clear()

try:
    step(torch.randn(2, 4))
except GradGuardError as error:
    diagnosis: Diagnosis = error.diagnosis
    span: SourceSpan | None = diagnosis.culprit
    fixes: list[Fix] = diagnosis.fixes
    tensors: list[TensorFacts] = diagnosis.tensors
    verdicts: list[Verification] = [fix.verified for fix in fixes]
    print(diagnosis.key, diagnosis.place)
except UnknownRuleError as error:
    raise SystemExit(str(error)) from None
except ConfigError:
    pass
warnings.filterwarnings("error", category=GradGuardWarning)
summary: RunSummary = guard.summary()
memory: MemoryReport = guard.memory()
page: str = explain("GG101")
print(package.__version__, guard.level, summary.text(), memory.for_backward)
