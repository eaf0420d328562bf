"""Gradients that an optimizer steps with though DistributedDataParallel never averaged them, as each rank sees it by itself.

Gloo and NCCL number the collectives of a process group: a backward call during which the number stays was none that DDP took part in.
Why is told by what ran: a forward of the wrapped module that began outside of DDP's own, or parameters whose AccumulateGrad nodes are
no longer those that DDP put its hooks on. No collective is added, and every rank comes to the same result.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradguard.core.callsite import USER_FILES, CallSite
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import function_code, in_class, modules_in, variables_of
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.tensor_state import version_of
from gradguard.probes import replicas
from gradguard.torch_compat.private_api import in_backward

_WATCHED = 8  # steps on a replica's parameters in which it is watched ...
_MOST = 24  # and steps of any optimizer
_COUNTING = ("gloo", "nccl")  # backends that number their collectives
_FORWARD = DistributedDataParallel.forward.__code__


@dataclass
class Watch:
    """What one replica did since its last step.

    Attributes:
        modules: the wrapped module and those within, by id.
        steps, others: of optimizers that have its parameters, and of any.
        before: number of the last collective, and the gradients, when the backward call under way began.
        began: number of the last collective when the last backward call began that gave it gradient; None where there was none.
        silent: whether that call ended with the same number.
        through: whether its forward ever ran; held: whether it ran under `no_sync` since the last step.
        past: lines that have run the wrapped module past it since the last step; the flag tells those that hand it to a function.
        blamed: such lines of steps on gradients that were not averaged.
        inputs: what tells its last batch, as far as forward was given it; batch: with the loss that backward was called on since.
    """

    modules: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    steps: int = 0
    others: int = 0
    before: tuple[int, list[tuple[int, int]]] | None = None
    began: int | None = None
    silent: bool = False
    through: bool = False
    held: bool = False
    past: dict[CallSite, bool] = field(default_factory=dict)
    blamed: dict[CallSite, bool] = field(default_factory=dict)
    batch: list[Any] | None = None
    inputs: list[Any] | None = None

    @property
    def on(self) -> bool:
        return self.steps < _WATCHED and self.others < _MOST


_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def watching() -> bool:
    """Whether forwards are to be reported."""
    return bool(replicas.known) and any(_watch(ddp).on for ddp in list(replicas.known))


def _watch(ddp: Any) -> Watch:
    found = _watches.get(ddp)
    if found is None:
        found = _watches[ddp] = Watch({id(module): UncountedRef(module) for module in modules_in(ddp.module)})
    return found


def forward(module: Any, caller: FrameType) -> None:
    """A module is called."""
    if not torch.is_grad_enabled() or in_backward():  # nor is it checkpointing's second run
        return
    for ddp in list(replicas.known):
        watch = _watch(ddp)
        known = watch.modules.get(id(module))
        if known is not None and known() is module:
            _note(ddp, watch, caller, module is ddp.module)


def _note(ddp: Any, watch: Watch, caller: FrameType, whole: bool) -> None:
    frame: FrameType | None = caller
    while frame is not None:
        names = variables_of(frame) if frame.f_code is _FORWARD else {}
        owner: Any = names.get("self")
        if owner is not None and owner is ddp:
            watch.through = True
            if whole:
                watch.inputs = replicas.inputs_told([names.get("inputs"), names.get("kwargs")])
            watch.held = watch.held or not ddp.require_backward_grad_sync
            return
        frame = frame.f_back
    found = _line(ddp, watch, caller)
    if found is not None:
        watch.past.setdefault(*found)


def _line(ddp: Any, watch: Watch, caller: FrameType) -> tuple[CallSite, bool] | None:
    """The user's line from which the wrapped module is run, outside of its own methods; and whether it hands the module to a function
    that knows of no other."""
    frame: FrameType | None = caller
    site: CallSite | None = None
    handed = False
    while frame is not None:
        code = frame.f_code
        names = variables_of(frame)
        if code.co_argcount and _within(watch, names.get(code.co_varnames[0]), frame):
            site = None
        elif site is None and USER_FILES[code.co_filename]:
            site = CallSite(code, frame.f_lasti)
            given = [names.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
            if not any(value is ddp.module for value in given) or any(value is ddp for value in names.values()):
                return site, handed
            site, handed = None, True
        frame = frame.f_back
    return None if site is None else (site, handed)


def _within(watch: Watch, owner: Any, frame: FrameType) -> bool:
    """Whether a frame runs a method of one of the modules."""
    known = watch.modules.get(id(owner))
    return known is not None and known() is owner and function_code(in_class(type(owner), frame.f_code.co_name)) is frame.f_code


# -- backward and step --------------------------------------------------------------------------------------------------


def before_backward(roots: Any) -> None:
    """A backward call begins."""
    for ddp in list(replicas.known):
        watch = _watch(ddp)
        if watch.on:
            watch.batch = None if watch.inputs is None else replicas.batch_told(watch.inputs, roots)
            number = _number(ddp)
            watch.before = None if number is None else (number, _gradients(ddp))


def after_backward() -> None:
    """It has ended."""
    for ddp in list(replicas.known):
        watch = _watch(ddp)
        if watch.before is not None:
            number, gradients = watch.before
            watch.before = None
            if gradients != _gradients(ddp):
                watch.began, watch.silent = number, number == _number(ddp)


def before_step(optimizer: Any) -> replicas.Drift | None:
    """An optimizer is about to step: whether it does so with gradients that the ranks have not averaged."""
    stepped: set[int] | None = None
    found = None
    for ddp in list(replicas.known):
        watch = _watch(ddp)
        if not watch.on:
            continue
        watch.others += 1
        if stepped is None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        held = [(name, p) for name, p in replicas.parameters(ddp) if p.requires_grad and id(p) in stepped]
        if held:
            watch.steps += 1
            found = found or _judged(ddp, watch, held)
            watch.began, watch.silent, watch.held, watch.past = None, False, False, {}
    return found


def _judged(ddp: Any, watch: Watch, held: list[tuple[str, torch.Tensor]]) -> replicas.Drift | None:
    if not watch.silent or watch.held or getattr(ddp, "_comm_hooks", None) or dist.get_world_size(ddp.process_group) < 2:
        return None
    names = set(replicas.described(ddp).names)
    filled = [(name, p) for name, p in held if p.grad is not None and name in names]
    lost = [name for name, p in filled if not replicas.hooked(p)]
    if not lost:
        watch.blamed |= watch.past
    elif len(lost) < len(filled) or not watch.through:
        return None
    if watch.began != _number(ddp) or not (lost or watch.past):  # the program may have averaged them itself
        return None
    step = (watch.steps,)
    return replicas.Drift(ddp, lost or [name for name, _ in filled], True, dist.get_rank(), -1, step, unhooked=bool(lost), past=watch.past)


def explain(drift: replicas.Drift) -> None:
    """Adds to what a comparison has found what was seen to run."""
    watch = _watch(drift.ddp)
    drift.past = dict(watch.blamed)
    held = [p for name, p in replicas.parameters(drift.ddp) if p.requires_grad and name in replicas.described(drift.ddp).names]
    drift.unhooked = any(p.grad is not None and not replicas.hooked(p) for p in held)


def batch(optimizer: Any) -> list[Any] | None:
    """What tells the batch of the step that an optimizer is about to take; None where it steps no replica, or none alone."""
    told = [watch.batch for ddp in list(replicas.known) if (watch := _watch(ddp)).on]
    return told[0] if len(told) == 1 else None


def ran(ddp: Any) -> bool:
    """Whether a replica's own forward was seen to run."""
    return _watch(ddp).through


def _number(ddp: Any) -> int | None:
    """The number of collectives that a replica's group has begun; None where it does not count them."""
    group = ddp.process_group
    try:
        return int(group._get_sequence_number_for_group()) or None if dist.get_backend(group) in _COUNTING else None
    except internal_error():
        return None


def _gradients(ddp: Any) -> list[tuple[int, int]]:
    grads = [p.grad for _, p in replicas.parameters(ddp)]
    return [(0, 0) if grad is None else (id(grad), version_of(grad)) for grad in grads]
