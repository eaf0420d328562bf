"""Between the session and activation checkpointing: what a checkpointed function reads must be the same when it runs again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from types import FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from gradguard.core.safe_read import named_modules, named_parameters, pairs, unless_loud
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.optimizer_books import Suspicion
from gradguard.runtime import step_events
from gradguard.torch_compat.private_api import quiet, storage_key, version_of

if TYPE_CHECKING:
    from gradguard.runtime.session import Session

_MOST = 256  # checkpointed calls remembered; a deep model has dozens a step


def reentrant(session: Session, args: tuple[Any, ...], frame: FrameType) -> None:
    """`CheckpointFunction.apply` begins: parameters inside count for nothing if no input requires grad."""
    if len(args) > 1 and args[1] is False:
        _random(session, args[0], frame)
    if not torch.is_grad_enabled() or any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args[1:]):
        return
    modules = [module for _, module in _reads(args[0]) if isinstance(module, nn.Module)]
    trained = [(name, p) for module in modules if module.training for name, p in named_parameters(module) if p.requires_grad]
    if not trained:
        return
    names = ", ".join(f"`{name}`" for name, _ in trained[:3]) + (f" and {len(trained) - 3} more" if len(trained) > 3 else "")
    data = {"site": step_events.site_of(frame), "parameters": len(trained), "names": names, "module": type(modules[0]).__name__}
    # the rule about parameters without a gradient need not tell of these again
    session.run.memory.setdefault("cut off by checkpoints", {}).update((id(p), TensorRef(p)) for _, p in trained)
    step_events.suspect(session, Suspicion("GG711", None, data), frame)


def begins(session: Session, function: Any, preserve: Any, frame: FrameType) -> None:
    """A non-reentrant checkpoint begins: notes the tensors its function reads from outside, with their versions.

    Args:
        preserve: whether the random state is restored for the second run.
    """
    if not torch.is_grad_enabled():
        return
    if preserve is False:
        _random(session, function, frame)
    with quiet():
        held = [
            (name, TensorRef(value), value._version, storage_key(value), session.journal.tick())
            for name, value in _reads(function)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and version_of(value) is not None
        ]
    if held:
        memory = session.run.memory.setdefault("checkpoints", [])
        memory.append((step_events.site_of(frame), held))
        del memory[:-_MOST]


def _random(session: Session, function: Any, frame: FrameType) -> None:
    """The random state is not restored: dropout will draw another mask in backward."""
    modules = [module for _, module in _reads(function) if isinstance(module, nn.Module)]
    drawing = [
        (module, path, child.p)
        for module in modules
        for path, child in named_modules(module)
        if isinstance(child, _DropoutNd) and child.p > 0 and child.training
    ]
    site = step_events.site_of(frame)
    told = session.run.memory.setdefault("checkpoints at random", set())
    if drawing and site not in told:
        told.add(site)
        module, path, p = drawing[0]
        data = {
            "kind": "random",
            "survey": True,
            "site": site,
            "module": type(module).__name__,
            "path": path,
            "p": p,
            "ref": weakref.ref(module),
        }
        step_events.suspect(session, Suspicion("GG712", None, data), frame)


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
