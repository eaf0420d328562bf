"""The functions of torch at which gradguard listens, all of them here.

They are diverted, not replaced, wherever they are Python's (`gradguard.probes.diversions`). Each hands the call through unchanged in
threads without a session and while something compiles.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gradguard.core.foreign_exceptions import internal_error
from gradguard.probes import compilers, step_protocol, warning_attribution
from gradguard.probes.diversions import Diversion, Surrounding, originals
from gradguard.probes.listeners import listener, local, tracer
from gradguard.torch_compat.private_api import functorch, is_compiling, like
from gradguard.torch_compat.saved_tensors import unhooked, within

_lock = threading.Lock()
_installed = False
_diverted: list[Diversion | Surrounding] = []
_replaced: list[tuple[Any, str, Any, Any]] = []  # what is not Python's: owner, attribute, original, replacement
_hooks: list[Any] = []
_not_watched: dict[str, str] = {}
_late: list[Any] = []  # classes that `look_again` has found
_LOGGER = logging.getLogger("gradguard")


def install(*more: Callable[[Callable[..., None]], None]) -> None:
    """Diverts the functions, once a process.

    Args:
        more: divert others; each is called with a function `divert(owner, name, make)`.

    They stay so: putting them in and out at each `with gradguard():` would cost more than they do, and would make Dynamo
    compile again. Without a session each of them costs one look at a thread-local.
    """
    global _installed
    if _installed:
        return
    with _lock:
        if _is_installed():  # another thread was faster
            return
        try:
            _install(more)
        except BaseException:  # from outside: none of it stays, and the next guard begins anew
            _take_back()
            raise
        _installed = True
    look_again()


def _is_installed() -> bool:
    return _installed


def _install(more: tuple[Callable[[Callable[..., None]], None], ...]) -> None:
    compilers.install()
    _divert(torch.autograd, "backward", _backward("backward"))
    _divert(torch.autograd, "grad", _backward("grad"))
    _divert(torch.autograd, "_engine_run_backward", _engine)
    _divert(torch.autograd.Function, "apply", _apply)
    _divert(torch.optim.Optimizer, "zero_grad", _zero_grad)
    _divert(torch.nn.Module, "zero_grad", _zero_grad)
    if functorch is not None:
        _divert(functorch, "vmap_impl", _vmap)
    step_protocol.install(_divert)
    _divert(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint)
    _divert(getattr(torch.utils.checkpoint, "_CheckpointFrame", None), "save_inputs", _save_inputs)
    _divert(TorchDispatchMode, "__enter__", _dispatch_mode_begins)
    _divert(TorchDispatchMode, "__exit__", _dispatch_mode_ends)
    _divert_plain(inspect.unwrap(torch.autograd.graph.disable_saved_tensors_hooks), _without_hooks)
    _set_aside(torch.export, "export")
    for name in ("trace", "trace_module", "_get_trace_graph"):  # the tracer names values after frames, and keeps the stack
        _set_aside(torch.jit._trace, name)
    _replace(torch.nn.functional, "handle_torch_function", _handle_torch_function)
    _replace(torch._tensor, "handle_torch_function", _handle_torch_function)
    for put in more:
        put(_divert)
    # a hook whose handle an exception from outside keeps from the list does nothing any more: its diversion is taken back
    _hooks.append(register_optimizer_step_pre_hook(_hook(_before_step)))
    _hooks.append(register_optimizer_step_post_hook(_hook(_after_step)))
    warning_attribution.install()


def uninstall() -> None:
    """Takes everything back, for tests and for who must; a function somebody else has replaced since is left to them."""
    global _installed
    with _lock:
        _take_back()
        _installed = False


def _take_back() -> None:
    while _hooks:
        _hooks.pop().remove()
    _late.clear()
    while _diverted:
        _diverted.pop().end()
    compilers.remove()
    while _replaced:
        owner, name, original, replacement = _replaced.pop()
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)
    warning_attribution.remove()


def _begin(change: Diversion | Surrounding) -> None:
    _diverted.append(change)  # first: what an exception from outside cuts short is taken back
    change.begin()


def patched() -> list[str]:
    """The functions at which gradguard listens now, by their names."""
    found = [f"{each.function.__module__}.{each.function.__qualname__}" for each in _diverted]
    return found + [f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name, _, _ in _replaced]


def unwatched() -> list[str]:
    """The functions that could not be diverted in this PyTorch, and why."""
    return [f"{name} ({fault})" for name, fault in _not_watched.items()]


def _divert(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    function = None if owner is None else vars(owner).get(name)
    plain = getattr(function, "__func__", function)  # of a class method
    if not isinstance(plain, FunctionType):
        _replace(owner, name, make)
    else:
        _divert_plain(plain, make)


def _divert_plain(function: FunctionType, make: Callable[[Any], Any]) -> None:
    if function.__code__ not in originals:  # it may go by several names
        try:
            _begin(Diversion(function, make))
        except internal_error() as fault:
            _unwatched(function.__name__, fault)


def _set_aside(owner: Any, name: str) -> None:
    """A function of torch's that runs as in a thread without a guard."""
    function = vars(owner).get(name)
    if isinstance(function, FunctionType):
        try:
            _begin(Surrounding(function, compilers.Aside))
            return
        except internal_error():  # no source, say: with a frame more on the stack
            pass
    _divert(owner, name, compilers.unguarded)


def look_again() -> None:
    """Sets aside what the program has imported since, and torch does not import by itself.

    A pipeline's stages find out shapes by a forward and a backward call on memory that nothing has written to.
    """
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    with _lock:
        if stage is not None and stage not in _late:
            _late.append(stage)
            for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
                if name in vars(stage):
                    _set_aside(stage, name)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = vars(owner).get(name)
    if original is None:  # this torch keeps it elsewhere: do without
        return
    bound = hasattr(original, "__get__") and isinstance(owner, type) and not isinstance(original, FunctionType)
    try:
        # in torch 2.14 and later `Function.apply` is a class method of C's
        replacement = (
            classmethod(make(lambda cls, *args, **kwargs: original.__get__(None, cls)(*args, **kwargs))) if bound else make(original)
        )
        _replaced.append((owner, name, original, replacement))
        setattr(owner, name, replacement)
    except internal_error() as fault:
        _unwatched(name, fault)


def _unwatched(name: str, fault: Exception) -> None:
    """A torch that is built otherwise: what hangs on this one function is not seen, and the rest is."""
    _not_watched[name] = str(fault)
    _LOGGER.error("gradguard cannot watch %s in this PyTorch; what else it watches goes on (%s)", name, fault)


def _backward(kind: str) -> Callable[[Any], Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            coast = local.coast
            if coast is None or kind != "backward" or not coast.backward(sys._getframe(1), args):
                session = listener()
                if session is None:
                    return original(*args, **kwargs)
                return session.run_backward(kind, original, sys._getframe(1), args, kwargs)
            # a call of a calm step, of which nothing more is of interest as long as it does not fail
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                coast.session.coasted_failed(error, sys._getframe(1), args, kwargs)
                raise
            if coast.inside:
                coast.inside = False
            else:
                coast.session.coasted_returned(sys._getframe(1), args)
            return result

        return guarded

    return make


def _engine(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        session = None if local.coast is not None else tracer()
        return original(*args, **kwargs) if session is None else session.run_engine(original, args, kwargs)

    return guarded


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        session = tracer()
        call = original
        saving = local.saving
        if saving is not None:
            frame = sys._getframe(1)

            def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
                return saving.apply(original, frame, cls, args, kwargs)

        if session is None:
            return call(cls, *args, **kwargs)
        return session.run_function(call, cls, sys._getframe(1), args, kwargs)

    return guarded


def _checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(fn: Any, *args: Any, **kwargs: Any) -> Any:
        session = tracer()
        if session is not None:
            session.run_checkpoint(fn, sys._getframe(1), args, kwargs)
        return original(fn, *args, **kwargs)

    return guarded


def _vmap(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
        session = tracer()
        if session is not None:
            session.mapped(sys._getframe(1), (args, kwargs), result)
        return result

    return guarded


def _save_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpointing keeps the inputs of a function, from which it will be computed again."""

    def guarded(self: Any, *args: Any) -> Any:
        saving = local.saving
        return original(self, *args) if saving is None else saving.keep_inputs(original, sys._getframe(1), self, args)

    return guarded


def _dispatch_mode_begins(original: Callable[..., Any]) -> Callable[..., Any]:
    """Under a dispatch mode of the program's no hooks of gradguard's: PyTorch detaches what they give back, and the mode would see it."""

    def guarded(self: Any) -> Any:
        saving = local.saving
        if saving is not None:
            saving.pause()
        return original(self)

    return guarded


def _dispatch_mode_ends(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, *error: Any) -> Any:
        result = original(self, *error)
        saving = local.saving
        if saving is not None and not local.compiled:
            saving.resume()
        return result

    return guarded


def _without_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    """A stretch in which torch takes no saved-tensor hooks: `torch.func` differentiates there."""

    def guarded(error_message: str) -> Any:
        return original(error_message) if local.saving is None else within(unhooked(), original(error_message))

    return guarded


def _zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        coast = local.coast
        if coast is not None and not coast.inside:
            return original(self, *args, **kwargs)
        session = listener()
        if session is None:
            return original(self, *args, **kwargs)
        # its own torch calls, two a parameter, are no clue to anything
        result = session.unwatched(original, self, *args, **kwargs) if session.tracing else original(self, *args, **kwargs)
        session.protocol("zeroed", sys._getframe(1), self)
        return result

    return guarded


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def _handle_torch_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(public_api: Callable[..., Any], relevant_args: Any, *args: Any, **kwargs: Any) -> Any:
        """Functions of torch written in Python (`F.relu`, `Tensor.backward`) come by here: the common case by a shorter way."""
        if is_compiling():
            return original(public_api, relevant_args, *args, **kwargs)
        session = tracer()
        if session is None:
            return original(public_api, relevant_args, *args, **kwargs)
        for arg in relevant_args:
            if type(arg) not in _PLAIN_TYPES:
                return original(public_api, relevant_args, *args, **kwargs)
        return session.run_python(original, public_api, relevant_args, args, kwargs)

    return guarded


def _hook(target: Callable[..., Any]) -> Callable[..., Any]:
    """A hook on optimizers that Dynamo, which traces them together with the step, takes for one of torch's that does nothing."""
    hook = like(register_optimizer_step_pre_hook, "def hook(optimizer, args, kwargs): pass")
    _begin(Diversion(hook, lambda original: target))
    return hook


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    coast = local.coast
    if coast is not None and not coast.inside:
        return
    session = listener()
    if session is not None:
        session.before_step(optimizer, args, kwargs)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    coast = local.coast
    if coast is not None and coast.step(optimizer, sys._getframe(1)):
        return
    session = listener()
    if session is not None:
        session.after_step(optimizer, args, kwargs)
