"""Differences and products of an [n, 1] and an [n] tensor, which broadcasting makes an [n, n] table."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.facts import Spread
from gradguard.journal import Journal
from gradguard.probes.arguments import call_name
from gradguard.torch_internals import grad_fn_of

_Tensor = torch.Tensor
_DIFFERENCES = frozenset({"sub", "subtract", "rsub", "__sub__", "__rsub__"})
_PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
# a column that one of these made is meant to be one
_MADE_COLUMNS = (
    "Unsqueeze",
    "View",
    "Reshape",
    "UnsafeView",
    "Expand",
    "Index",
    "Slice",
    "Sum",
    "Mean",
    "Norm",
    "Linalg",
    "Permute",
    "TBackward",
)


def note_spread(journal: Journal, func: Any, args: tuple[Any, ...], result: Any, seq: int) -> None:
    """Notes such a difference or product, of a tensor with a gradient and one without.

    Args:
        args: the two operands, as the function got them.
        seq: of the node that the call made.
    """
    one, other = args
    if type(result) is not _Tensor or not isinstance(one, _Tensor) or not isinstance(other, _Tensor) or result.dim() != 2:
        return
    size = result.shape[0]
    if size < 2 or result.shape[1] != size or {one.dim(), other.dim()} != {1, 2} or one.requires_grad == other.requires_grad:
        return
    name = call_name(func)
    column, row = (one, other) if one.dim() == 2 else (other, one)
    product = name in _PRODUCTS
    if (name not in _DIFFERENCES and not product) or column.shape[1] != 1 or row.shape[0] != size:
        return
    node = grad_fn_of(column)
    if node is not None and node.name().startswith(_MADE_COLUMNS):
        return
    position = 0 if column is one else 1
    journal.spread.append(Spread(seq, journal.step, size, 1 - position if name in ("rsub", "__rsub__", "__rmul__") else position, product))
