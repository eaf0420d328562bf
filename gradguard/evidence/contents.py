"""What values hold: tensors inside containers and small objects, what a dotted name stands for in a frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradguard.evidence.frames import FrameView
from gradguard.evidence.names import Names


def lookup(view: FrameView, name: str) -> Any:
    """What a name such as `self.state.h` stands for in a frame; None where it stands for nothing."""
    first, *rest = name.split(".")
    value = view.locals.get(first, view.globals.get(first))
    for part in rest:
        value = getattr(value, part, None) if not isinstance(value, type) else None
    return value


def tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, items of containers, attributes of small objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value[:64]:
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in list(value.values())[:64]:
            yield from tensors_in(item, depth - 1)
    elif (
        depth
        and not isinstance(value, (torch.nn.Module, type, torch.optim.Optimizer))
        and isinstance(getattr(value, "__dict__", None), dict)
    ):
        yield from tensors_in(vars(value), depth - 1)


def own_objects(names: Names, frames: Sequence[FrameView]) -> set[int]:
    """ids of what gradguard itself has made in looking around, which holds tensors too."""
    own = {id(view._locals) for view in frames if view._locals is not None}
    bindings = vars(names).get("bindings", ())
    return own | {id(entry) for entry in bindings} | {id(bindings)}
