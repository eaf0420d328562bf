"""Who keeps tensors, looked up for many of them at once."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch

from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.holders import holdings


class Bank:
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.last: Any = None


def test_each_tensor_has_its_own_holders() -> None:
    weight = torch.ones(3, requires_grad=True)
    bank, alone, table = Bank(), weight * 2, {"a": (weight * 3, "label")}
    bank.rows.append([weight * 4])
    bank.last = weight * 5
    tensors = [alone, table["a"][0], bank.rows[0][0], bank.last, weight * 6]
    found = holdings(tensors, [FrameView(sys._getframe())])
    names = [[(each.name, each.owner_type, each.through) for each in held] for held in found]
    assert names == [
        [("alone", None, ())],
        [("table", None, ("dict", "tuple"))],
        [("self.rows", "Bank", ("list", "list"))],
        [("self.last", "Bank", ())],
        [],
    ]
    assert all(each.tensor is tensor for tensor, held in zip(tensors, found, strict=True) for each in held)


def test_the_heap_is_looked_through_once_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(3, requires_grad=True)
    looks, original = [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: (looks.append(len(objects)), original(*objects))[1])
    assert holdings([weight * i for i in range(30)], []) == [[]] * 30
    assert len(looks) <= 6 and looks[0] == 30
