"""The state of the random generators, taken at the beginning of a step so that it can be run again from there.

It is taken at every untraced step, in the midst of a training that leaves none of this in the processor's caches. So Python's and
NumPy's generators, which most steps do not draw from and whose state takes long to read, are first asked whether their memory has
changed: both are Mersenne twisters of 624 words and a position.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

from gradguard.core.foreign_exceptions import internal_error

_WORDS = 624
_OWN = object.__basicsize__  # bytes of an object's head
_Peek = Callable[[], tuple[Any, ...]]


class RandomState:
    """The state of every random generator a step may draw from (PyTorch's on all devices, Python's, NumPy's).

    Args:
        fresh: False where it is taken at every step: Python's and NumPy's are then read only if they have moved.
    """

    def __init__(self, fresh: bool = True) -> None:
        self._torch = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        numpy = sys.modules.get("numpy.random.mtrand")
        if fresh:
            self._python = random.getstate()
            self._numpy = None if numpy is None else numpy.get_state()
        else:
            self._python = _python.read()
            self._numpy = None if numpy is None else _numpy.read()

    def restore(self) -> None:
        """Puts every generator back."""
        torch.default_generator.set_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random.mtrand"].set_state(self._numpy)


class _Reader:
    """A generator whose state is read again only when it has moved.

    Args:
        owner: the object that the generator belongs to now; another one is looked at anew.
        state: reads the state, the slow way.
        peek: makes a function that tells where the generator stands, from the owner; None where its memory is laid out otherwise.
    """

    def __init__(self, owner: Callable[[], Any], state: Callable[[], Any], peek: Callable[[Any], _Peek | None]) -> None:
        self._owner, self._state, self._make = owner, state, peek
        self._known: Any = None
        self._peek: _Peek | None = None
        self._seen: tuple[Any, ...] | None = None
        self._last: Any = None

    def read(self) -> Any:
        """The state now."""
        owner = self._owner()
        if owner is not self._known:
            self._known, self._seen = owner, None
            try:
                self._peek = self._make(owner)
            except internal_error():  # a generator of another kind
                self._peek = None
        if self._peek is None:
            return self._state()
        now = self._peek()
        if now != self._seen:
            self._last, self._seen = self._state(), now
        return self._last


def _peek_python(generator: Any) -> _Peek | None:
    if sys.implementation.name != "cpython":
        return None
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(id(generator) + _OWN)
    *state, position = random.getstate()[1]
    if type(generator).__basicsize__ < _OWN + ctypes.sizeof(words) or bytes(words) != struct.pack(f"{_WORDS + 1}I", position, *state):
        return None
    return lambda: (bytes(words), generator.gauss_next)  # gauss() draws two numbers and keeps one


def _peek_numpy(owner: Any) -> _Peek | None:
    rand = sys.modules["numpy.random.mtrand"]._rand
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(owner.ctypes.state_address)
    name, state, position, *_ = rand.get_state()
    if name != "MT19937" or bytes(words) != struct.pack(f"{_WORDS + 1}I", *state.tolist(), position):
        return None
    # the object itself keeps the second of two normal numbers drawn
    kept = (ctypes.c_uint64 * ((type(rand).__basicsize__ - _OWN) // 8)).from_address(id(rand) + _OWN)
    return lambda: (bytes(words), bytes(kept))


_python = _Reader(lambda: getattr(random, "_inst", None), random.getstate, _peek_python)
_numpy = _Reader(
    lambda: sys.modules["numpy.random.mtrand"]._rand._bit_generator,
    lambda: sys.modules["numpy.random.mtrand"].get_state(),
    _peek_numpy,
)
