"""The functions of torch that tell the ledger of the step protocol what is done to optimizers, schedulers, gradients and modes.

None of them is called for every operation: each costs one look at a thread-local where it stands, and nothing where no
guard is open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch.nn.modules import module as _module

from gradguard.core.callsite import USER_FILES
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import UNKNOWN, elements, in_class, in_training, parameters_in
from gradguard.instrumentation.event_buffer import Coast
from gradguard.instrumentation.fault_barrier import say
from gradguard.probes import replicas
from gradguard.probes.listeners import compiling, idle_listener, listener, local
from gradguard.torch_compat.private_api import is_compiling

Original = Callable[..., Any]
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_state: dict[str, Any] = {"depth": 0, "hook": None}
_standing: dict[int, tuple[Any, Any]] = {}  # the hooks on all modules that are in place, by number, each with its handle


def install(divert: Callable[..., None]) -> None:
    """Diverts the functions; `divert(owner, name, make)` keeps book of them."""
    schedulers = torch.optim.lr_scheduler
    divert(torch.optim.Optimizer, "__init__", _after("made", lambda args, kwargs: (args[0],)))
    divert(torch.optim.Optimizer, "load_state_dict", _after("loaded_optimizer", lambda args, kwargs: (args[0],)))
    divert(schedulers.LRScheduler, "__init__", _after("scheduler_made", lambda args, kwargs: (args[0],)))
    for name in ("LRScheduler", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts", "SequentialLR", "ChainedScheduler"):
        divert(getattr(schedulers, name, object), "step", _after("scheduler_stepped", lambda args, kwargs: (args[0],), user_only=True))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        divert(torch.nn.utils, name, _clip)
    scaler = torch.amp.GradScaler
    divert(scaler, "scale", _after("scaled", lambda args, kwargs: (args[0],)))
    divert(scaler, "update", _after("scaler_updated", lambda args, kwargs: (args[0],)))
    divert(torch.nn.Module, "train", _train)
    divert(_module, "_has_any_global_hook", _others_hook)
    divert(
        torch.nn.Module,
        "load_state_dict",
        _after("loaded_state", _loaded),
    )
    divert(torch.nn.Module, "state_dict", _state_dict)
    for name in ("to", "half", "bfloat16", "type", "float", "double", "cpu", "cuda"):
        divert(torch.nn.Module, name, _after("cast", _cast))
    divert(torch.no_grad, "__enter__", _enter)
    divert(torch.no_grad, "__exit__", _exit)
    divert(torch.inference_mode, "__enter__", _enter)
    divert(torch.inference_mode, "__exit__", _exit)


def _after(happening: str, facts: Callable[[Any, Any], tuple[Any, ...] | None], user_only: bool = False) -> Callable[[Original], Original]:
    """Reports a call after it has returned."""

    def make(original: Original) -> Original:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if user_only and (coast := local.coast) is not None and _turned(coast, args[0], _caller()):
                return result
            session = listener()
            if session is not None:
                frame = _caller()
                with session.lookout:
                    if not user_only or not _of_torch(frame):
                        said = facts(args, kwargs)
                        if said is not None:
                            session.protocol(happening, frame, *said)
            return result

        return guarded

    return make


def _caller() -> FrameType:
    """The frame that called the diverted function which asks this."""
    return sys._getframe(3)  # this one, the function's new code, and what that calls


_TORCH_OPTIM = torch.optim.__file__.rpartition("__init__")[0]


def _of_torch(frame: FrameType) -> bool:
    """Whether a scheduler is stepped by another."""
    return frame.f_code.co_filename.startswith(_TORCH_OPTIM)


def _turned(coast: Coast, scheduler: Any, frame: FrameType) -> bool:
    """Whether a scheduler's step in a calm step was written down, or is none of the user's."""
    return _of_torch(frame) or coast.turn(scheduler, frame)


def _loaded(args: Any, kwargs: Any) -> tuple[Any, ...]:
    assign = kwargs["assign"] if "assign" in kwargs else args[3] if len(args) > 3 else False
    return args[0], assign is True, args[1] if len(args) > 1 else kwargs.get("state_dict")


def _state_dict(original: Original) -> Original:
    def guarded(self: Any, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        result = original(self, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if args or destination is not None or prefix or keep_vars:  # a child's, in the course of its parent's
            return result
        session = listener()
        if session is not None:
            session.protocol("took_state", _caller(), self, result)
        return result

    return guarded


def _cast(args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    module = args[0]
    first = next(iter(parameters_in(module)), None)
    low = first is not None and first.dtype in _LOW_PRECISION
    return (module, low) if low or replicas.known else None


def _clip(original: Original) -> Original:
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        coast = local.coast
        if coast is not None and not coast.inside:
            return original(parameters, *args, **kwargs)
        session = listener()
        if session is not None:
            kind = type(parameters)
            if kind is GeneratorType:  # walked once, as torch would, and handed on as what it is
                walked: list[Any] | None = list(parameters)
                parameters = (item for item in walked or ())
            elif in_class(kind, "__next__") is not UNKNOWN and in_class(kind, "__iter__") is not UNKNOWN:
                walked = parameters = list(parameters)
            elif issubclass(kind, torch.Tensor):
                walked = [parameters]
            else:  # of iterables of the program's own nothing is known before torch walks them
                walked = elements(parameters) if issubclass(kind, (list, tuple, set, dict)) else None
            frame = _caller()
            with session.lookout:
                limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value", 1.0))
                if walked is not None and type(limit) in (int, float):
                    session.protocol("clipping", frame, walked, float(limit))
        return original(parameters, *args, **kwargs)

    return guarded


def _train(original: Original) -> Original:
    code = original.__code__

    def guarded(self: Any, mode: bool = True) -> Any:
        frame = _caller()
        if frame.f_code is code:  # a child, in the course of its parent's
            return original(self, mode)
        try:
            was = in_training(self)
        except internal_error():
            return original(self, mode)
        result = original(self, mode)
        if was == bool(mode) and local.coast is not None:
            return result  # which changes nothing
        session = listener()
        if session is not None:
            session.protocol("switched", frame, self, bool(mode), was, frame)
        return result

    return guarded


class ModuleHook:
    """A hook on all modules. None stands while anything compiled is under way in any thread: Dynamo guards on them.

    Args:
        register: torch's function for hooks of the kind.
        hook: the hook.
    """

    def __init__(self, register: Callable[[Any], Any], hook: Callable[..., None]) -> None:
        self._id = -1
        if not compiling:
            handle = register(hook)
            self._id = handle.id
            _standing[self._id] = handle, hook
            if compiling:  # by now
                self.remove()

    @property
    def stands(self) -> bool:
        return self._id in _standing

    def remove(self) -> None:
        handle, _ = _standing.pop(self._id, (None, None))
        if handle is not None:
            handle.remove()


def lift_module_hooks() -> None:
    """Takes all hooks on modules away."""
    while _standing:
        _, (handle, _) = _standing.popitem()
        handle.remove()
    _state["hook"] = None


def _others_hook(original: Callable[[], bool]) -> Callable[[], bool]:
    """Modules compiled by Dynamo warn of hooks on all modules: of those that are not gradguard's."""

    def guarded() -> bool:
        ours = dict(_standing)
        for handle, _ in ours.values():
            handle.remove()
        try:
            return original()
        finally:
            for number, (handle, hook) in ours.items():
                if number in _standing:
                    handle.hooks_dict_ref()[number] = hook

    return guarded


def take_census(report: Callable[[Any, FrameType], None]) -> ModuleHook:
    """Reports every module call until the hook returned is removed."""

    def called(module: Any, arguments: Any) -> None:
        if not is_compiling() and listener() is not None:
            report(module, sys._getframe(1))

    return ModuleHook(_module.register_module_forward_pre_hook, called)


def watch_registrations(report: Callable[[Any, str, Any, FrameType], None]) -> ModuleHook | None:
    """Reports every parameter that a module gets until the hook returned is removed; None where that cannot be seen."""
    register = getattr(_module, "register_module_parameter_registration_hook", None)
    if register is None:
        return None

    def registered(module: Any, name: str, parameter: Any) -> None:
        if not is_compiling() and listener() is not None:
            report(module, name, parameter, sys._getframe(1))

    return ModuleHook(register, registered)


def _enter(original: Original) -> Original:
    def guarded(self: Any) -> Any:
        session, watched = idle_listener(), False
        if session is not None:
            caller = _caller()
            with session.lookout:
                watched = _is_users(caller) and session.wants_forwards()
                if watched:
                    watch_forwards(entering=True)
        result = original(self)
        if watched:  # no call from here on: an exception from outside would leave grad mode off
            _state["depth"] += 1
            self._gradguard = getattr(self, "_gradguard", 0) + 1  # one object may be entered again within its own block
        return result

    return guarded


def _exit(original: Original) -> Original:
    def guarded(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        entered = getattr(self, "_gradguard", 0)
        if entered:
            self._gradguard = entered - 1
            _state["depth"] -= 1
            if _state["depth"] <= 0:
                _state["depth"] = 0
                try:
                    forget_forwards()
                except internal_error() as fault:
                    say("the watch of forwards without grad", "it goes on looking", fault)
        return result

    return guarded


def forget_blocks() -> None:
    """The guard is left: blocks without grad that are still open, or were never closed, count no more."""
    _state["depth"] = 0


def watch_forwards(entering: bool = False) -> None:
    """Reports forwards without grad while a block of the user's without grad is open, or about to be."""
    if (entering or _state["depth"]) and (_state["hook"] is None or not _state["hook"].stands):
        _state["hook"] = ModuleHook(_module.register_module_forward_pre_hook, _forward)


def forget_forwards() -> None:
    """Forwards without grad are reported no more."""
    if _state["hook"] is not None:
        _state["hook"].remove()
        _state["hook"] = None


def _is_users(frame: FrameType) -> bool:
    """Whether the block, or the function decorated with it, is the user's."""
    if frame.f_code.co_filename.endswith("_contextlib.py") and frame.f_back is not None:
        frame = frame.f_back
    return USER_FILES[frame.f_code.co_filename]


def _forward(module: Any, arguments: Any) -> None:
    if is_compiling() or torch.is_grad_enabled():
        return
    session = listener()
    if session is not None:
        frame = sys._getframe(1)
        session.protocol("forward", frame, module, arguments, frame)
