"""What the transparency tests share: run a program bare and under a guard, and compare everything that can be seen of it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard import GradGuardError, GradGuardWarning, gradguard
from gradguard.config.settings import Settings, load_settings
from gradguard.torch_compat.private_api import function_modes

LEVELS = ("watch", "standard", "strict", "forensic")

Program = Callable[[], Any]


def fresh_settings(level: str, **overrides: Any) -> Settings:
    """Settings of their own: a guard with new settings has a new run, so that `standard` traces its first steps again.

    Silent bugs are only logged: the checks run, and a program that has such a bug on purpose goes on.
    """
    return load_settings(level=level, **({"actions": {"silent": "log"}} | overrides))


def guarding(level: str, *objects: Any, **overrides: Any) -> gradguard:
    """A guard of a level with a run of its own."""
    return gradguard(*objects, settings=fresh_settings(level, **overrides))


def stack_length() -> int:
    """How many function modes stand on this thread's stack, gradguard's own counted."""
    return function_modes()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything of a dense, sparse or nested tensor, comparable: NaNs are equal to themselves, -0.0 is not 0.0."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return ("nested", *(bits(piece) for piece in tensor.unbind()))
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return ("coo", tuple(tensor.shape), bits(tensor.indices()), bits(tensor.values()))
    if tensor.layout == torch.sparse_csr:
        return ("csr", tuple(tensor.shape), bits(tensor.crow_indices()), bits(tensor.col_indices()), bits(tensor.values()))
    with torch._C.DisableTorchFunctionSubclass():
        dense = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = dense.view(torch.uint8) if dense.numel() else dense
        return (tuple(tensor.shape), str(tensor.dtype), bytes(raw.tolist()) if dense.numel() else b"")


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type)):
        return value if value == value else "nan"
    return type(value).__qualname__


@dataclass
class Outcome:
    """What can be seen of a program that ran."""

    value: Any = None
    error: tuple[type, str] | None = None
    rng: bytes = b""
    python_rng: Any = None
    said: list[tuple[str, str, str, int]] = field(default_factory=list)
    """Warnings: category, text, file, line."""
    grad_mode: bool = True
    stack: int = 0


def observe(program: Program, around: AbstractContextManager[Any] | None = None, seed: int = 11) -> Outcome:
    """Runs a program from a seed and takes down its result, its warnings and what it left behind."""
    torch.manual_seed(seed)
    random.seed(seed)
    outcome = Outcome()
    before = stack_length()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with around or nullcontext():
                outcome.value = _comparable(program())
        except Exception as error:
            text = str(error) if not isinstance(error, GradGuardError) else str(error.__cause__)
            kind = type(error) if not isinstance(error, GradGuardError) else type(error.__cause__)
            outcome.error = (kind, text)
        outcome.said = [
            (str(w.category.__name__), str(w.message), w.filename, w.lineno) for w in caught if not issubclass(w.category, GradGuardWarning)
        ]
    outcome.rng = bytes(torch.get_rng_state().tolist())
    outcome.python_rng = random.getstate()
    outcome.grad_mode = torch.is_grad_enabled()
    outcome.stack = stack_length() - before
    return outcome


def assert_transparent(program: Program, levels: tuple[str, ...] = LEVELS, *, rehearse: bool = True, fails: bool = False) -> Outcome:
    """A program does the same bare and at every level; returns the bare outcome.

    Args:
        program: takes nothing; its result (nested tensors and plain values) is compared bit by bit.
        levels: the levels to try.
        rehearse: run once before, for what PyTorch does only the first time in a process.
        fails: whether it must end in an exception (the same one, or a diagnosis caused by it).
    """
    if rehearse:
        observe(program)
    bare = observe(program)
    assert (bare.error is not None) == fails, bare.error
    for level in levels:
        guarded = observe(program, guarding(level))
        assert guarded.error == bare.error, (level, guarded.error)
        assert guarded.value == bare.value, level
        assert guarded.rng == bare.rng, level
        assert guarded.python_rng == bare.python_rng, level
        assert guarded.said == bare.said, (level, guarded.said, bare.said)
        assert (guarded.grad_mode, guarded.stack) == (bare.grad_mode, 0), level
    return bare


def grads(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
    """Their gradients, cloned."""
    return [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors]
