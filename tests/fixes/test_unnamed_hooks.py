"""Hooks that PyTorch has no name for: what an object's `__call__` or a `partial` returns is the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import HEAD, only, run_source, said

OBJECT = """
class Smooth:
    def __init__(self):
        self.norms = []

    def __call__(self, grad):
        self.norms.append(grad.norm().item())
        return grad.mean(0)

ATTACH
net = nn.Linear(3, 4)
for it in range(2):
    h = net(torch.randn(5, 3))
    REGISTER
    h.tanh().sum().backward()
"""
PARTIAL = """
from functools import partial

def smooth(dim, grad):
    return grad.mean(dim)

net = nn.Linear(3, 4)
for it in range(2):
    h = net(torch.randn(5, 3))
    h.register_hook(partial(smooth, 0))
    h.tanh().sum().backward()
"""


@pytest.mark.parametrize(
    ("attach", "register"),
    [
        ("", "h.register_hook(Smooth())"),
        ("smooth = Smooth()", "h.register_hook(smooth)"),
        ("smooth = Smooth()", "h.register_hook(hook=smooth)"),
        ("class Holder:\n    def __init__(self):\n        self.hook = Smooth()\n\nholder = Holder()\nholder.hook = Smooth()\n",
         "h.register_hook(holder.hook)"),
    ],
)  # fmt: skip
def test_what_an_object_returns_is_named(tmp_path: Path, attach: str, register: str) -> None:
    found = only(tmp_path, OBJECT.replace("ATTACH", attach).replace("REGISTER", register), "GG408", "grad.mean(0)")
    assert "`Smooth.__call__` on `h`" in found.headline


def test_an_object_that_registers_itself_is_named(tmp_path: Path) -> None:
    source = OBJECT.replace("        self.norms = []\n", "        self.norms = []\n\n    def on(self, t):\n        t.register_hook(self)\n")
    only(tmp_path, source.replace("ATTACH", "smooth = Smooth()").replace("REGISTER", "smooth.on(h)"), "GG408", "grad.mean(0)")


def test_what_a_partial_returns_is_named(tmp_path: Path) -> None:
    found = only(tmp_path, PARTIAL, "GG408", "grad.mean(dim)")
    assert "`smooth` on `h`" in found.headline


def test_an_object_that_only_looks_is_not_the_one(tmp_path: Path) -> None:
    other = "class Look:\n    def __call__(self, grad):\n        print(grad.norm())\n\nnn.Linear(1, 1).weight.register_hook(Look())"
    only(tmp_path, OBJECT.replace("ATTACH", other).replace("REGISTER", "h.register_hook(Smooth())"), "GG408", "grad.mean(0)")


def test_of_two_objects_none_is_blamed(tmp_path: Path) -> None:
    other = "class Scale:\n    def __call__(self, grad):\n        return 2 * grad\n\nnn.Linear(1, 1).weight.register_hook(Scale())"
    found = said(tmp_path, OBJECT.replace("ATTACH", other).replace("REGISTER", "h.register_hook(Smooth())"))
    assert [diagnosis.code for diagnosis in found] == ["GG408"] and found[0].culprit is None


@pytest.mark.parametrize(
    ("source", "sound"),
    [
        (OBJECT.replace("ATTACH", "").replace("REGISTER", "h.register_hook(Smooth())"), "grad.mean(0, keepdim=True).expand_as(grad)"),
        (OBJECT.replace("ATTACH", "").replace("REGISTER", "h.register_hook(Smooth())"), "None"),
    ],
)
def test_a_gradient_of_the_same_shape_is_silent(tmp_path: Path, source: str, sound: str) -> None:
    assert not run_source(tmp_path, HEAD + source.replace("grad.mean(0)", sound))


def test_a_sound_partial_is_silent(tmp_path: Path) -> None:
    assert not run_source(tmp_path, HEAD + PARTIAL.replace("grad.mean(dim)", "grad - grad.mean(dim)"))
