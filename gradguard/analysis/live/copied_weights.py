"""Whether a parameter began as a copy of another one: target networks, momentum encoders and reference models are written from the
network that trains, and are not meant to get gradients.

Matrices that were drawn for themselves are as good as uncorrelated, and training moves a matrix away from where it began only slowly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import has_memory, own_part

_READ = 4096  # elements of each
_LEAST = 64
_COMPARED = 64  # other parameters of the same shape
_SURE = 8.0  # standard deviations of what chance would give
_ALIKE = 0.3


def is_copied(parameter: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether a matrix has values that only one of the others can have given it; False of vectors, which begin as constants."""
    if parameter.dim() < 2:
        return False
    own = _centred(parameter)
    if own is None:
        return False
    compared = 0
    for other in others:
        if other is parameter or other.shape != parameter.shape:
            continue
        compared += 1
        values = _centred(other)
        if values is not None:
            correlation = float(own @ values)
            if correlation > _ALIKE and correlation * own.numel() ** 0.5 > _SURE:
                return True
        if compared >= _COMPARED:
            break
    return False


def _centred(tensor: torch.Tensor) -> torch.Tensor | None:
    """A sample of its values with mean 0 and length 1, [elements]; None where there are too few, or all are the same."""
    try:
        tensor = own_part(tensor)
        if not has_memory(tensor) or not tensor.is_floating_point() or tensor.numel() < _LEAST:
            return None
        values = tensor.detach().reshape(-1)
        values = values[:: max(1, values.numel() // _READ)].double().cpu()
        values = values - values.mean()
        length = float(values.norm())
    except internal_error():
        return None
    return values / length if length > 0 else None
