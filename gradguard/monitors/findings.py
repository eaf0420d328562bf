"""What the ledger hands to the rules: a suspicion, and how a tensor's version is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import has_memory, own_part

if TYPE_CHECKING:
    from gradguard.monitors.optimizer_books import Book


@dataclass
class Suspicion:
    """Something that does not look like a sound loop, for the rule whose business it is.

    Attributes:
        code: the rule's.
        book: the optimizer concerned.
        data: what the rule needs beside; plain facts and weak references.
    """

    code: str
    book: Book | None = None
    data: dict[str, Any] = field(default_factory=dict)


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
