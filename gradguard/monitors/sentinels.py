"""Which parameters' gradients tell that something on the way to them went wrong: a few small ones stand for all."""

from __future__ import annotations

from typing import Any

import torch

_SMALL = 65_536  # elements of a gradient that is looked at every step
_MOST = 6


def ends(leaves: list[torch.Tensor], depths: list[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The small leaf at the graph's far end and the one next to the root; `leaves` come in order of depth."""
    if not leaves:
        return None, None
    for margin in (1, 4, 16):  # a huge embedding stands at the far end of many models: then what comes right after it
        end = [leaf for leaf, depth in zip(leaves, depths, strict=True) if depth >= depths[-1] - margin]
        far = min(end, key=lambda leaf: leaf.numel())
        if far.numel() <= _SMALL:
            break
    return far, leaves[0]


def beside(nodes: list[Any], risky: list[Any]) -> list[torch.Tensor]:
    """Small leaves for some risky nodes: one below it, one from the other operand of the first product above it.

    A NaN in a result spoils the gradient of what it is multiplied with, and may reach nothing else: the scores of a fully masked
    attention row spoil the values' projection and, with the mask in between, neither queries nor keys.
    """
    if not risky:
        return []
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for source, _ in node.next_functions:
            if source is not None:
                users.setdefault(source, []).append(node)
    chosen: dict[int, torch.Tensor] = {}
    for node in (*risky[:2], *risky[-2:]):
        for most in (1, 12):
            below = _nearest_leaf(node, most)
            if below is not None and below.numel() <= _SMALL:
                chosen[id(below)] = below
        for _ in range(8):
            above = users.get(node, [])
            if not above:
                break
            siblings = [source for source, _ in above[0].next_functions if source is not None and source is not node]
            leaf = _nearest_leaf(siblings[0]) if siblings else None
            if leaf is not None:
                chosen[id(leaf)] = leaf
                break
            node = above[0]
    return list(chosen.values())[:_MOST]


def _nearest_leaf(node: Any, most: int = 2) -> torch.Tensor | None:
    """The smallest of the first few leaves below a node."""
    order, seen, found = [node], {node}, list[torch.Tensor]()
    for item in order:
        leaf = getattr(item, "variable", None)
        if leaf is not None:
            found.append(leaf)
            if len(found) == most:
                break
        if len(order) > 64:
            break
        for source, _ in item.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                order.append(source)
    return min(found, key=lambda leaf: leaf.numel()) if found else None
