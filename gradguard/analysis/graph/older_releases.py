"""What newer releases of torch say of a graph node and older ones do not, made out from what is around the node.

torch 2.4 has neither `SavedTensor.data` (the saved tensor, without the check that unpacking makes) nor `node._input_metadata`
(the shape of a node's output). Here they are inferred where only one answer is possible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from gradguard.torch_compat.private_api import output_metadata, version_of

_SHAPE = re.compile(r"\[torch\.(?:cuda\.)?(\w+)Tensor \[([\d, ]*)\]")
_VIEWS = ("T", "Transpose", "View", "Permute", "AsStrided", "Expand", "Select", "Slice", "Reshape", "Alias", "Unsqueeze", "Squeeze")
_DTYPES = {"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16}
_TO_NUMBER = frozenset({"Mean", "Sum", "Dot", "MseLoss", "NllLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy"})
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Sqrt", "Abs", "Clamp", "Alias", "Clone", "ToCopy"}
)
_DEPTH = 64


def output_shape(node: Any, depth: int = 0) -> tuple[int, ...] | None:
    """The shape of a node's first output; None where nothing tells."""
    known = output_metadata(node)
    if known is not None or depth > _DEPTH:
        return known
    raw = str(node.name())
    name = raw.rstrip("0123456789").removesuffix("Backward")
    if name in _TO_NUMBER and raw.endswith("0"):  # SumBackward1 and MeanBackward1 keep dimensions
        return () if getattr(node, "_saved_reduction", 1) else None
    if name in _ELEMENTWISE:
        below = {output_shape(source, depth + 1) for source, _ in node.next_functions if source is not None}
        return () if below == {()} else None
    return None


def saved_leaves(node: Any) -> list[torch.Tensor]:
    """The leaves that a node reads, itself or through views."""
    found: dict[int, torch.Tensor] = {}
    stack = [(source, 0) for source, _ in node.next_functions if source is not None]
    while stack:
        current, depth = stack.pop()
        leaf = getattr(current, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        elif depth < 4 and str(current.name()).startswith(_VIEWS):
            stack += [(source, depth + 1) for source, _ in current.next_functions if source is not None]
    return list(found.values())


def described(message: str, version: int, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The only one of these tensors with the type, the number of elements and the version that PyTorch's words give."""
    match = _SHAPE.search(message)
    if match is None:
        return None
    size = prod(int(length) for length in match[2].split(",") if length.strip())
    dtype = _DTYPES.get(match[1])
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if version_of(tensor) == version and tensor.numel() == size and (dtype is None or tensor.dtype is dtype):
            found[id(tensor)] = tensor
    return next(iter(found.values())) if len(found) == 1 else None
