"""How it is seen whether a tensor has changed: its version counter, and a few of its values."""

from __future__ import annotations

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import has_memory, own_part


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; -1 for tensors that have none."""
    try:
        return int(tensor._version)
    except internal_error():
        return -1


def few_values(tensor: torch.Tensor) -> list[float]:
    """Some of a tensor's values, to see whether it changes."""
    try:
        tensor = own_part(tensor)
        if not has_memory(tensor):
            return []
        flat = tensor.detach().reshape(-1)
        return [float(x) for x in flat[:: max(1, flat.numel() // 8)][:8].tolist()]
    except internal_error():
        return []
