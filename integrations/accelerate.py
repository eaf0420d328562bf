"""gradguard for accelerate: `guard = watch(accelerator, model, optimizer)`, then `with guard:` around each step.

`accelerator.backward` ends in `torch.autograd.backward`, which the guard watches anyway; what this adapter adds are names
through accelerate's wrappers, a report from the main process only, and the re-run of a failed step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradguard.runtime.guard import Guard


def watch(accelerator: Any, *prepared: Any, **settings: Any) -> Guard:
    """A guard that knows what stands behind accelerate's wrappers.

    Args:
        accelerator: an `accelerate.Accelerator`.
        prepared: what `accelerator.prepare` returned, in any order: models and optimizers are taken, the rest is left.
        settings: what `gradguard()` takes; the report is written by the main process.

    Raises:
        ConfigError: a setting that does not exist or fit.
    """
    if not accelerator.is_main_process:
        settings.pop("report", None)
    known: list[Any] = []
    for item in prepared:
        if isinstance(item, nn.Module):
            known.append(accelerator.unwrap_model(item))
        elif isinstance(item, torch.optim.Optimizer):
            known.append(getattr(item, "optimizer", item))  # AcceleratedOptimizer keeps the real one there
    return Guard(*known, **settings)
