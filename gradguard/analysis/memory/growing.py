"""Containers and tensors that get larger from look to look, and how many bytes of tensors and arrays each look adds.

A look goes through all objects alive; it is taken where memory is known to grow. From look to look nothing is kept but ids and lengths.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import is_quiet
from gradguard.torch_compat.private_api import grad_fn_of, is_a, memory_of

_KINDS = (list, deque, dict)
_DEEPEST = 3
_ITEMS = 64  # of one container, newest first
_MOST_GROWING = 4_096  # containers that grew between two looks


@dataclass
class Census:
    """What was seen so far.

    Attributes:
        lengths: of containers, by id, at the last look.
        grew: by id, at how many looks in a row a container has been longer than at the one before.
        looks: how many there were.
    """

    lengths: dict[int, int] = field(default_factory=dict)
    grew: dict[int, int] = field(default_factory=dict)
    looks: int = 0
    step: int = 0


@dataclass(frozen=True)
class Grown:
    """A container that has grown at each look.

    Attributes:
        container: itself.
        added: how many items since the last look.
        nbytes: of the tensors and arrays in them, each memory once.
        newest: the tensors in them.
        keys: the newest keys, of a dictionary; the last added first.
        graphed: whether any of the tensors has a graph.
    """

    container: Any
    added: int
    nbytes: int
    newest: tuple[Any, ...]
    keys: tuple[Any, ...]
    graphed: bool


def look(census: Census, step: int, least: int) -> list[Grown]:
    """Takes a look; gives the containers that have grown at three looks in a row by at least so many bytes, the fastest first."""
    if census.step and step != census.step + 1:
        census.grew, census.lengths = {}, {}
    census.step, census.looks = step, census.looks + 1
    lengths: dict[int, int] = {}
    grew: dict[int, int] = {}
    found: list[Grown] = []
    kinds: dict[int, bool] = {}
    for obj in gc.get_objects():
        kind = type(obj)
        verdict = kinds.get(id(kind))
        if verdict is None:
            verdict = kinds[id(kind)] = issubclass(kind, _KINDS) and is_quiet(obj)
        if not verdict:
            continue
        length = _length(obj)
        if not length:
            continue
        key = id(obj)
        lengths[key] = length
        before = census.lengths.get(key, 0)
        if census.lengths and length > before:
            if before:
                grew[key] = census.grew.get(key, 0) + 1
            if grew.get(key, 0) >= 2 and not _is_bounded(obj):
                new = _grown(obj, length - before)
                if new.nbytes >= least:
                    found.append(new)
        if len(grew) > _MOST_GROWING:
            break
    census.lengths, census.grew = lengths, grew
    return sorted(found, key=lambda each: -each.nbytes)


def _length(obj: Any) -> int:
    """Whatever its class makes of `len()`."""
    kind: Any = next((kind for kind in _KINDS if isinstance(obj, kind)), None)
    return 0 if kind is None else int(kind.__len__(obj))


def _is_bounded(obj: Any) -> bool:
    return isinstance(obj, deque) and deque.maxlen.__get__(obj) is not None


def _grown(obj: Any, added: int) -> Grown:
    """What the newest items hold."""
    keys: tuple[Any, ...] = ()
    count = min(added, _ITEMS)
    if isinstance(obj, list):
        newest = [list.__getitem__(obj, -1 - i) for i in range(min(count, list.__len__(obj)))]
    elif isinstance(obj, deque):
        newest = list(islice(deque.__reversed__(obj), count))
    else:
        pairs = list(islice(reversed(list(dict.items(obj))), count))
        newest, keys = [value for _, value in pairs], tuple(key for key, _ in pairs)
    tensors: list[Any] = []
    arrays: dict[int, int] = {}
    for item in (*newest, *keys):
        _collect(item, tensors, arrays, 0)
    memory = dict(pair for tensor in tensors for pair in memory_of(tensor))
    graphed = any(grad_fn_of(tensor) is not None for tensor in tensors)
    return Grown(obj, added, sum(memory.values()) + sum(arrays.values()), tuple(tensors), keys, graphed)


def _collect(item: Any, tensors: list[Any], arrays: dict[int, int], depth: int) -> None:
    if is_a(item, torch.Tensor):
        tensors.append(item)
    elif _is_array(item):
        base = item
        while _is_array(getattr(base, "base", None)):
            base = base.base
        arrays[id(base)] = int(base.nbytes)
    elif depth < _DEEPEST and type(item) in (list, tuple, dict, deque):
        for each in islice(item.values() if type(item) is dict else item, _ITEMS):
            _collect(each, tensors, arrays, depth + 1)


def _is_array(item: Any) -> bool:
    numpy = sys.modules.get("numpy")
    try:
        return numpy is not None and type(item) is numpy.ndarray
    except internal_error():
        return False
