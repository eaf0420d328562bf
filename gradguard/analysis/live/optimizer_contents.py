"""What an optimizer holds, read from its parameter groups."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.core.safe_read import UNKNOWN, attributes, elements, item_of, peek
from gradguard.torch_compat.private_api import storage_key


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """What an optimizer trains, group by group; empty for None and for optimizers without groups."""
    groups = peek(optimizer, "param_groups")
    if groups is UNKNOWN:  # a framework's optimizer around another, whose groups it computes
        inner = next((held for held in attributes(optimizer).values() if isinstance(held, torch.optim.Optimizer)), None)
        return [] if inner is None else parameters_of(inner)
    return [
        parameter for group in elements(groups) for parameter in elements(item_of(group, "params")) if isinstance(parameter, torch.Tensor)
    ]


def holds_memory(optimizer: Any, storage: int) -> bool:
    """Whether one of the optimizer's parameters lives in this memory (see `storage_key`)."""
    return any(storage_key(parameter) == storage for parameter in parameters_of(optimizer))


def trained_by(optimizer: Any) -> set[int]:
    """The ids of what an optimizer trains."""
    return {id(parameter) for parameter in parameters_of(optimizer)}
