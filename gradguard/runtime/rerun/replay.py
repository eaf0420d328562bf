"""Runs a failed step again, fully traced, so that a failure in an untraced step still names its line.

The random state is put back to where it was before the step. Nothing of the second run stays: optimizers do not update
(their steps touch the parameters without changing them, so that what depends on the write still happens), gradients,
buffers and the random state are restored. The rest of what the step can reach is put back by `rerun.reachable_state`, which also
says whether a step can be run again at all; a `with` block never is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed
from torch import nn

from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import attributes, is_quiet
from gradguard.instrumentation.refusals import is_refusal

_KINDS = (torch.Tensor, nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


def can_run_again(error: BaseException) -> bool:
    """Whether a second run may tell more: an error of PyTorch's or Python's own, in a run whose ranks do not wait for each other.

    What a program raises to steer itself (a pruned trial, say) says all it has to say, and a rank that repeats a step calls its
    collectives once more than the others do.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return False
    if is_refusal(error) or isinstance(error, StopIteration):
        return False
    return type(error).__module__.partition(".")[0] in ("builtins", "torch")


def _alive() -> tuple[list[torch.optim.Optimizer], list[nn.Module], list[torch.Tensor], list[Any]]:
    """Optimizers, modules, leaves that collect gradient, and schedulers."""
    optimizers, modules, leaves, schedulers = [], [], [], []
    for item in gc.get_objects():
        kind = type(item)  # not isinstance(), which asks proxies for their `__class__`
        if not issubclass(kind, _KINDS) or not is_quiet(item):
            continue
        if issubclass(kind, torch.Tensor):
            if _is_leaf(item):
                leaves.append(item)
        elif issubclass(kind, nn.Module):
            if "_parameters" in item.__dict__:
                modules.append(item)
        elif issubclass(kind, torch.optim.Optimizer):
            # frameworks wrap optimizers in optimizers; the innermost is the one that updates
            if not any(isinstance(value, torch.optim.Optimizer) for value in attributes(item).values()):
                optimizers.append(item)
        elif issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            schedulers.append(item)
    return optimizers, modules, leaves, schedulers


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.requires_grad and tensor.is_leaf
    except internal_error():  # half-made subclasses
        return False


def _touching_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """A step that writes every parameter with a gradient and changes none: versions move on, values stay."""

    def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and parameter.layout == torch.strided:
                        parameter.mul_(1)
        return loss

    return step


@contextmanager
def nothing_stays() -> Iterator[None]:
    """Inside, optimizers do not update; afterwards parameters, gradients, buffers, modes and learning rates are what they were before."""
    optimizers, modules, leaves, schedulers = _alive()
    tensors = {id(leaf): leaf for leaf in leaves}
    for module in modules:
        tensors |= {id(value): value for held in (module._parameters, module._buffers) for value in held.values() if value is not None}
    values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
    gradients = [(tensor, tensor.grad, None if tensor.grad is None else tensor.grad.detach().clone()) for tensor in leaves]
    required = [(tensor, tensor.requires_grad) for tensor in tensors.values() if tensor.is_leaf]
    training = [(module, module.training) for module in modules if "training" in module.__dict__]
    groups = [(group, {key: value for key, value in group.items() if key != "params"}) for o in optimizers for group in o.param_groups]
    schedules = [(scheduler, _with_lists_copied(vars(scheduler))) for scheduler in schedulers]
    own_steps = [(o, o.__dict__.get("step")) for o in optimizers]
    grad_mode = torch.is_grad_enabled()
    for optimizer in optimizers:
        optimizer.__dict__["step"] = _StepHooks(optimizer).wrap(_touching_step(optimizer))
    try:
        yield
    finally:
        torch.set_grad_enabled(grad_mode)
        for optimizer, own in own_steps:
            if own is None:
                del optimizer.__dict__["step"]
            else:
                optimizer.__dict__["step"] = own
        for group, before in groups:
            group.update(before)
        for scheduler, state in schedules:
            scheduler.__dict__.update(state)
        for module, mode in training:
            module.__dict__["training"] = mode
        with torch.no_grad():
            for tensor, value in values:
                _put_back(tensor, value)
            for tensor, gradient, value_then in gradients:
                tensor.grad = gradient
                if gradient is not None and value_then is not None:
                    _put_back(gradient, value_then)
        for tensor, flag in required:
            if tensor.requires_grad is not flag and tensor.is_leaf:
                tensor.requires_grad_(flag)


def _with_lists_copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: copy(value) if isinstance(value, list) else value for key, value in state.items()}


def _put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Writes a value back where it changed (an unchanged tensor keeps its version)."""
    if tensor.layout != torch.strided or not _same(tensor, value):
        tensor.copy_(value)


def _same(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    try:
        return torch.equal(tensor, value)
    except internal_error():  # kinds of tensors that cannot be compared
        return False


class _StepHooks:
    """Runs the global step hooks around a replaced step, so that the session still learns who stepped, and where."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        from gradguard.probes.listeners import listener

        def hooked(*args: Any, **kwargs: Any) -> Any:
            session = listener()
            if session is not None:
                session.before_step(self._optimizer, (self._optimizer, *args), kwargs)
            result = step(*args, **kwargs)
            if session is not None:
                session.after_step(self._optimizer, (self._optimizer, *args), kwargs)
            return result

        return hooked
