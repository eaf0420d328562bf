"""Collective calls that fill other tensors with the values of one: no gradient comes back through them.

They are no torch functions that a mode would see; each costs one look at a thread-local.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from gradguard.probes.hub import listener
from gradguard.torch_internals import is_compiling

_FILLED, _READ = ("tensor_list", "output_tensor", "gather_list"), ("tensor", "input_tensor")
_POSITIONS = {"all_gather": (0, 1), "all_gather_into_tensor": (0, 1), "gather": (1, 0)}  # of what is filled and of what is read


def install(replace: Callable[..., None]) -> None:
    """Puts the replacements in place, if this torch has distributed at all."""
    if not torch.distributed.is_available():
        return
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        for name in _POSITIONS:
            replace(owner, name, _gathering(name))


def _gathering(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    into, of = _POSITIONS[name]

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not is_compiling():
                session = listener()
                if session is not None and session.tracing:
                    session.gathered(name, _given(args, kwargs, into, _FILLED), _given(args, kwargs, of, _READ))
            return result

        return guarded

    return make


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, names: tuple[str, ...]) -> Any:
    return args[position] if len(args) > position else next((kwargs[name] for name in names if name in kwargs), None)
