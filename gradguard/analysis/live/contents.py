"""What values hold: tensors inside containers and small objects, what a dotted name stands for in a frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.names import Names
from gradguard.core.safe_read import UNKNOWN, attributes, elements, own_dict, peek


def lookup(view: FrameView, name: str) -> Any:
    """What a name such as `self.state.h` stands for in a frame; None where it stands for nothing."""
    first, *rest = name.split(".")
    value = view.locals.get(first, view.globals.get(first))
    for part in rest:
        value = peek(value, part) if not isinstance(value, type) else UNKNOWN
    return None if value is UNKNOWN else value


def tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, items of containers, attributes of small objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in elements(value, 64):
            yield from tensors_in(item, depth - 1)
    elif depth and not isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) and own_dict(value) is not None:
        yield from tensors_in(attributes(value), depth - 1)


def own_objects(names: Names, frames: Sequence[FrameView]) -> set[int]:
    """ids of what gradguard itself has made in looking around, which holds tensors too."""
    own = {id(held) for view in frames for held in (view._locals, view._globals) if held is not None}
    bindings = vars(names).get("bindings", ())
    return own | {id(entry) for entry in bindings} | {id(bindings)}
