"""What an optimizer holds, read from its parameter groups."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.torch_internals import storage_key


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """What an optimizer trains, group by group; empty for None and for optimizers without groups."""
    return [parameter for group in getattr(optimizer, "param_groups", None) or () for parameter in group.get("params", ())]


def holds_memory(optimizer: Any, storage: int) -> bool:
    """Whether one of the optimizer's parameters lives in this memory (see `storage_key`)."""
    return any(storage_key(parameter) == storage for parameter in parameters_of(optimizer))


def trained_by(optimizer: Any) -> set[int]:
    """The ids of what an optimizer trains."""
    return {id(parameter) for parameter in parameters_of(optimizer)}
