"""Operations on an [n, 1] and an [n] tensor, which broadcasting makes a table of all pairs: losses, differences and products."""

from __future__ import annotations

import os
import weakref
from collections import deque
from types import FrameType
from typing import Any

import torch

from gradguard.core.callsite import USER_FILES
from gradguard.instrumentation.facts import Spread
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.probes.call_arguments import call_name
from gradguard.torch_compat.private_api import grad_fn_of, node_sequence

_Tensor = torch.Tensor
_BETWEEN = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))  # torch, and gradguard itself
_DIFFERENCES = frozenset({"sub", "subtract", "rsub", "__sub__", "__rsub__"})
_PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
# losses that broadcast their input and target; others raise
PAIRING = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "gaussian_nll_loss", "poisson_nll_loss", "soft_margin_loss"})
# a column that one of these made is meant to be one
_MAKE_COLUMNS = ("Unsqueeze", "Expand", "Index", "Sum", "Mean", "Norm", "Linalg", "Permute", "TBackward")
# functions that make a column on purpose: of a row, or by keeping the dimension that they reduce
_KEEPING = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "norm", "vector_norm", "std", "var", "median", "prod", "logsumexp", "any", "all"}
)
COLUMNS = frozenset({"unsqueeze", "view", "reshape", "__getitem__", *_KEEPING})
_RESHAPE = ("View", "Reshape", "UnsafeView", "Squeeze")


class Columns:
    """Columns without a gradient that were made on purpose, as far as they are alive."""

    def __init__(self) -> None:
        self._made: deque[weakref.ref[torch.Tensor]] = deque(maxlen=32)

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Such a function was called."""
        if isinstance(result, tuple):
            result = result[0] if result else None
        if type(result) is not _Tensor or result.dim() < 2 or result.shape[-1] != 1 or not args or not isinstance(args[0], _Tensor):
            return
        name = call_name(func)
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            meant = any(part is None for part in index)
        else:
            meant = result.dim() == args[0].dim() if name in _KEEPING else result.dim() > args[0].dim()
        if meant:
            self._made.append(TensorRef(result))

    def __contains__(self, column: torch.Tensor) -> bool:
        return any(ref() is column for ref in self._made)


def note_spread(journal: Journal, columns: Columns, func: Any, args: tuple[Any, ...], result: Any, seq: int) -> None:
    """Notes such a difference or product, of a tensor with a gradient and one without.

    Args:
        args: the two operands, as the function got them.
        seq: of the node that the call made.
    """
    one, other = args
    if type(result) is not _Tensor or not isinstance(one, _Tensor) or not isinstance(other, _Tensor):
        return
    size = one.numel()
    if size < 2 or result.numel() != size * size or other.numel() != size or one.requires_grad == other.requires_grad:
        return
    name = call_name(func)
    product = name in _PRODUCTS
    if name not in _DIFFERENCES and not product:
        return
    column = _column(one, other)
    if column is None or _is_meant((one, other)[column]) or (one, other)[column] in columns:
        return
    position = 1 - column if name in ("rsub", "__rsub__", "__rmul__") else column
    shapes = (tuple(one.shape), tuple(other.shape)) if position == column else (tuple(other.shape), tuple(one.shape))
    journal.spread.append(Spread(seq, journal.step, size, position, shapes, "product" if product else "difference"))


def note_spread_loss(
    journal: Journal, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, caller: FrameType | None
) -> None:
    """Notes a loss function that got an input and a target of as many elements and another shape.

    Args:
        caller: the frame that called the function.
    """
    given = [*args[:2], *(kwargs[name] for name in ("input", "target")[len(args) :] if name in kwargs)]
    if len(given) != 2 or not all(isinstance(item, _Tensor) for item in given) or not isinstance(result, _Tensor):
        return
    one, other = given
    size = one.numel()
    column = None if size < 2 or size != other.numel() or one.shape == other.shape else _column(one, other)
    node = grad_fn_of(result)
    if column is None or node is None:
        return
    frame, direct = caller, True
    while frame is not None and not USER_FILES[frame.f_code.co_filename]:
        direct = direct and frame.f_code.co_filename.startswith(_BETWEEN)
        frame = frame.f_back
    shapes = tuple(one.shape), tuple(other.shape)
    journal.spread.append(Spread(node_sequence(node), journal.step, size, column, shapes, call_name(func), direct))


def _column(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Which of two tensors of as many elements is the column, where the other is a row."""
    sides = [tensor.dim() > 0 and tensor.shape[-1] == 1 for tensor in (one, other)]
    if sides[0] == sides[1]:
        return None
    row = (one, other)[sides.index(False)]
    return sides.index(True) if row.dim() > 0 and row.shape[-1] == row.numel() else None


def _is_meant(column: torch.Tensor) -> bool:
    """Whether a column was made one on purpose: of a row, or by a reduction that keeps its dimension."""
    node = grad_fn_of(column)
    if node is None:
        base = column._base
        return base is not None and base.dim() == 1
    kind = node.name()
    if kind.startswith(_RESHAPE):
        sizes = getattr(node, "_saved_self_sym_sizes", None)
        return sizes is None or len(sizes) == 1
    return bool(kind.startswith(_MAKE_COLUMNS))
