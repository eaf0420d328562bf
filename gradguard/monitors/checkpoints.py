"""Activation checkpointing: what a checkpointed function reads must be the same when it runs again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from gradguard.core.safe_read import named_modules, named_parameters, pairs, unless_loud
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.monitors.findings import Finding
from gradguard.torch_compat.private_api import quiet, storage_key, version_of

if TYPE_CHECKING:
    from gradguard.core.callsite import CallSite
    from gradguard.instrumentation.journal import Journal

_MOST = 256  # checkpointed calls remembered; a deep model has dozens a step


@dataclass(frozen=True, eq=False)
class CutOff(Finding):
    """Parameters inside a reentrant checkpoint get no gradient, since no input requires grad.

    Attributes:
        parameters: how many.
        names: of some of them, in words.
        module: the type of the first module.
    """

    CODE = "GG711"

    site: CallSite | None
    parameters: int
    names: str
    module: str


@dataclass(frozen=True, eq=False)
class AnotherMask(Finding):
    """The random state is not restored for the second run, and a dropout in it draws.

    Attributes:
        path: of the dropout in the module.
        p: its probability.
    """

    CODE = "GG712"
    ROUTINE = True

    site: CallSite | None
    module: weakref.ref[nn.Module]
    type_name: str
    path: str
    p: float


def reentrant(memory: dict[str, Any], args: tuple[Any, ...], site: CallSite | None) -> Iterator[Finding]:
    """`CheckpointFunction.apply` begins: parameters inside count for nothing if no input requires grad.

    Args:
        memory: the run's.
        args: of `apply`.
        site: the user's line.
    """
    if len(args) > 1 and args[1] is False:
        yield from _random(memory, args[0], site)
    if not torch.is_grad_enabled() or any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args[1:]):
        return
    modules = [module for _, module in _reads(args[0]) if isinstance(module, nn.Module)]
    trained = [(name, p) for module in modules if module.training for name, p in named_parameters(module) if p.requires_grad]
    if not trained:
        return
    names = ", ".join(f"`{name}`" for name, _ in trained[:3]) + (f" and {len(trained) - 3} more" if len(trained) > 3 else "")
    # the rule about parameters without a gradient need not tell of these again
    memory.setdefault("cut off by checkpoints", {}).update((id(p), TensorRef(p)) for _, p in trained)
    yield CutOff(None, site, len(trained), names, type(modules[0]).__name__)


def begins(memory: dict[str, Any], journal: Journal, function: Any, preserve: Any, site: CallSite | None) -> Iterator[Finding]:
    """A non-reentrant checkpoint begins: notes the tensors its function reads from outside, with their versions.

    Args:
        preserve: whether the random state is restored for the second run.
    """
    if not torch.is_grad_enabled():
        return
    if preserve is False:
        yield from _random(memory, function, site)
    with quiet():
        held = [
            (name, TensorRef(value), value._version, storage_key(value), journal.tick())
            for name, value in _reads(function)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and version_of(value) is not None
        ]
    if held:
        kept = memory.setdefault("checkpoints", [])
        kept.append((site, held))
        del kept[:-_MOST]


def _random(memory: dict[str, Any], function: Any, site: CallSite | None) -> Iterator[Finding]:
    """The random state is not restored: dropout will draw another mask in backward."""
    modules = [module for _, module in _reads(function) if isinstance(module, nn.Module)]
    drawing = [
        (module, path, child.p)
        for module in modules
        for path, child in named_modules(module)
        if isinstance(child, _DropoutNd) and child.p > 0 and child.training
    ]
    told = memory.setdefault("checkpoints at random", set())
    if drawing and site not in told:
        told.add(site)
        module, path, p = drawing[0]
        yield AnotherMask(None, site, UncountedRef(module), type(module).__name__, path, p)


def _reads(function: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What a function holds from outside its arguments: closure cells, bound arguments, the module it is or belongs to."""
    if depth > 2:
        return
    if isinstance(function, nn.Module):
        yield type(function).__name__, function
        return
    if isinstance(function, functools.partial):
        for value in function.args:
            yield "argument", unless_loud(value)
        yield from pairs(function.keywords)
        yield from _reads(unless_loud(function.func), depth + 1)
        return
    if isinstance(function, MethodType):
        owner, function = unless_loud(function.__self__), unless_loud(function.__func__)
        if isinstance(owner, nn.Module):
            yield "self", owner
    if not isinstance(function, FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            value = unless_loud(cell.cell_contents)
        except ValueError:
            continue
        yield name, value
        if callable(value) and not isinstance(value, nn.Module):
            yield from _reads(value, depth + 1)
