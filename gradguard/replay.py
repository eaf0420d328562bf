"""Runs a failed step again, fully traced, so that a failure in an untraced step still names its line.

The random state is put back to where it was before the step. Nothing of the second run stays: optimizers do not update
(their steps touch the parameters without changing them, so that what depends on the write still happens), gradients,
buffers and the random state are restored. What the step did to objects of the user's own (lists appended to, a data
iterator advanced) cannot be undone, which is why only functions handed to `guard.step` are run again, never a `with` block.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class RandomState:
    """The state of every random generator a step may draw from (PyTorch's on all devices, Python's, NumPy's)."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Puts every generator back."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _alive(kind: type) -> list[Any]:
    return [item for item in gc.get_objects() if isinstance(type(item), type) and kind in type(item).__mro__]


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
    """Inside, optimizers do not update; afterwards gradients and buffers are what they were before."""
    optimizers = _alive(torch.optim.Optimizer)
    modules = [module for module in _alive(nn.Module) if "_parameters" in module.__dict__]
    parameters = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    parameters.update({id(p): p for module in modules for p in module._parameters.values() if p is not None})
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters.values()]
    buffers = [(b, b.detach().clone()) for module in modules for b in module._buffers.values() if b is not None]
    own_steps = [(o, o.__dict__.get("step")) for o in optimizers]
    post = [_StepHooks(o) for o in optimizers]
    for optimizer, hooks in zip(optimizers, post, strict=True):
        optimizer.step = hooks.wrap(_touching_step(optimizer))
    try:
        yield
    finally:
        for optimizer, own in own_steps:
            if own is None:
                del optimizer.__dict__["step"]
            else:
                optimizer.__dict__["step"] = own
        with torch.no_grad():
            for parameter, gradient, value in gradients:
                parameter.grad = gradient
                if gradient is not None and value is not None:
                    gradient.copy_(value)
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class _StepHooks:
    """Runs the global step hooks around a replaced step, so that the session still learns who stepped, and where."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        from gradguard.probes.hub import listener

        def hooked(*args: Any, **kwargs: Any) -> Any:
            session = listener()
            if session is not None:
                session.before_step(self._optimizer, (self._optimizer, *args), kwargs)
            result = step(*args, **kwargs)
            if session is not None:
                session.after_step(self._optimizer, (self._optimizer, *args), kwargs)
            return result

        return hooked
