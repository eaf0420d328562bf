"""Allocations that were refused: which exceptions say so, the call that was refused, and room to make a diagnosis in afterwards."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from gradguard.core.safe_read import message_of

_TEXTS = ("DefaultCPUAllocator: ", "MPS backend out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_MOST = 8  # tensors of a call
_RESERVE = 16 << 20


def is_refusal(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had: of an accelerator, of PyTorch's on the CPU, or Python's and numpy's."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, torch.OutOfMemoryError):  # with another text than PyTorch's it is the program's own
        return "out of memory" in message_of(error).lower()
    return isinstance(error, RuntimeError) and any(text in message_of(error) for text in _TEXTS)


class Refused(NamedTuple):
    """An operator call that could not allocate its result.

    Attributes:
        name: of the function.
        shapes: of its tensors.
        itemsize: bytes of an element of the first.
        equation: of an einsum.
        account: what was held then, where somebody made one (`gradguard.core.account`).
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    equation: str | None
    account: Any = None


def refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], account: Any) -> Refused | None:
    """The call of a torch function that raised; None where no plain tensor was given to it."""
    flat = [each for arg in (*args, *kwargs.values()) for each in (arg if type(arg) in (tuple, list) else (arg,))]
    plain = [each for each in flat[: 4 * _MOST] if type(each) in (torch.Tensor, torch.nn.Parameter)][:_MOST]
    if not plain:
        return None
    equation = next((each for each in flat[:2] if type(each) is str), None)
    name = getattr(func, "__name__", "")
    return Refused(name, tuple(tuple(each.shape) for each in plain), plain[0].element_size(), equation, account)


class Reserve:
    """Address space that is set aside, and never touched, for the diagnosis that is made once there is no more.

    A limit on the process's address space counts it; it takes no memory.
    """

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None

    def fill(self) -> None:
        """Sets it aside, where that is still possible."""
        if self._held is None and hasattr(mmap, "MAP_PRIVATE"):
            with suppress(OSError, ValueError, MemoryError):
                self._held = mmap.mmap(-1, _RESERVE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @contextmanager
    def given_up(self, error: BaseException) -> Iterator[None]:
        """Makes room, where an exception says that there is none."""
        if not is_refusal(error):
            yield
            return
        if self._held is not None:
            self._held.close()
            self._held = None
        try:
            yield
        finally:
            self.fill()


reserve = Reserve()
