"""Objects that a deep copy goes through: their parts, and whether one is a record of values that are still being computed."""

from __future__ import annotations

import ast
from collections import deque
from typing import Any

import torch
from torch import nn

from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.provenance import Spot
from gradguard.core.safe_read import attributes, elements, own_dict, pairs


def children_of(item: Any) -> list[tuple[Any, str, str | None]]:
    """(child, how it is written after the parent, the attribute's name where it is one)."""
    if isinstance(item, dict):
        named = ((key if type(key) in (str, int, bool, type(None)) else ..., value) for key, value in pairs(item, 10_000))
        return [(value, f"[{key!r}]", None) for key, value in named]
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return [(value, f"[{i}]", None) for i, value in enumerate(elements(item, 10_000))]
    held = attributes(item)
    found: list[tuple[Any, str, str | None]] = []
    if isinstance(item, nn.Module):
        for store in ("_modules", "_parameters", "_buffers"):
            for key, value in pairs(held.pop(store, {})):
                found.append((value, f"[{key}]" if key.isdigit() else f".{key}", key))
    return [(value, f".{key}", key) for key, value in held.items()] + found


def is_data(copied: Any) -> bool:
    """Whether the copied object is a record of values: no module, nor one that holds modules or optimizers (an agent, a trainer)."""
    if isinstance(copied, nn.Module) or own_dict(copied) is None:
        return False
    queue, seen = deque([copied]), set[int]()
    while queue and len(seen) < 1000:
        item = queue.popleft()
        if isinstance(item, (nn.Module, torch.optim.Optimizer)):
            return False
        if id(item) not in seen and not isinstance(item, (torch.Tensor, type, str, bytes)):
            seen.add(id(item))
            queue.extend(child for child, _, _ in children_of(item))
    return True


def continues(spot: Spot, attribute: str | None) -> bool:
    """Whether what is stored is made from what the attribute held before, as a recurrent state is."""
    value = getattr(spot.statement, "value", None)
    return any(node.attr == attribute for node in inside(value, ast.Attribute))
