"""Stepping aside for Dynamo and export.

Dynamo guards on the function modes of the thread, and compiles whatever Python runs while its callback is set, hooks included. So
while the callback is set in a thread, the op probe is off its stack, and gradguard's own functions run with the callback taken out
(`gradguard.instrumentation.fault_barrier`). What a compiled function computes is recorded no more than what a C++ library does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import function_code, variables_of
from gradguard.instrumentation.fault_barrier import Compiler, say
from gradguard.probes.diversions import prepare_for_dynamo
from gradguard.probes.listeners import compiling, local
from gradguard.probes.step_protocol import lift_module_hooks
from gradguard.torch_compat.private_api import eval_frame, never_compile, register_builtin, unpack_in_graphs, users_mode, users_modes

_state: dict[str, Any] = {"original": None, "wrapper": None, "known": None}
# who calls it by a name of its own, once it is imported
_IMPORTERS = (
    ("torch._dynamo.eval_frame", "set_eval_frame"),
    ("torch._dynamo.eval_frame", "_maybe_set_eval_frame"),
    ("torch._dynamo.decorators", "set_eval_frame"),
)
_CONVERTING = os.path.join("torch", "_dynamo", "convert_frame.py")
_COMPILED = tuple(os.path.join("torch", package, "") for package in ("_dynamo", "_functorch", "_inductor", "fx"))


def install() -> None:
    """Notes when the callback of Dynamo is set and taken out; once a process."""
    original = getattr(eval_frame, "set_eval_frame", None)
    if original is None or _state["original"] is not None:
        return

    def set_eval_frame(callback: Any) -> Any:
        if callback is None:
            prior = original(None)  # first: Dynamo compiles whatever runs before
            if not local.compiled or _runs_compiled(sys._getframe(1)):
                return prior
            if prior is None or local.compiled > 1:
                # Dynamo has taken it out itself: to compile, or because it failed to and gives up what is under way
                if _compiles(sys._getframe(1)):
                    local.compiled -= prior is not None
                    return prior
                local.compiled = 1
            _leave()
            return prior
        if local.compiled and _runs_compiled(sys._getframe(1)):  # nothing had ended
            return original(callback)
        _enter()
        prior = original(callback)
        if prior is not None:  # one within another
            local.compiled -= 1
        return prior

    never_compile(set_eval_frame.__code__)
    _state.update(original=original, wrapper=set_eval_frame)
    Compiler.running, Compiler.swap = (lambda: local.compiled), swap_callback
    _exchange(original, set_eval_frame)


def _compiles(frame: FrameType | None) -> bool:
    """Whether Dynamo is compiling something: a frame of its entry from C is on the stack."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CONVERTING):
            return True
        frame = frame.f_back
    return False


def _runs_compiled(frame: FrameType) -> bool:
    """Whether what Dynamo is kept from compiling is what it has compiled: the graph itself, or what a backend has made of it."""
    variables = variables_of(frame)
    if type(variables.get("self")).__name__ != "DisableContext":
        return False
    code = function_code(variables.get("fn"))
    return code is not None and (code.co_filename.startswith("<eval_with_key>") or any(part in code.co_filename for part in _COMPILED))


def remove() -> None:
    """Notes it no more."""
    original, wrapper = _state["original"], _state["wrapper"]
    if original is not None:
        _exchange(wrapper, original)
        _state.update(original=None, wrapper=None)


def _exchange(old: Any, new: Any) -> None:
    places = [(eval_frame, "set_eval_frame"), *((sys.modules.get(module), name) for module, name in _IMPORTERS)]
    for owner, name in places:
        if owner is not None and getattr(owner, name, None) is old:
            setattr(owner, name, new)


def _lift_hooks() -> None:
    try:
        lift_module_hooks()
    except internal_error() as fault:
        say("the watch of module calls", "what is compiled sees its hooks", fault)


def _enter() -> None:
    local.compiled += 1
    if local.compiled == 1:
        compiling.add(threading.get_ident())
        _lift_hooks()
        rules = sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None and rules is not _state["known"]:
            _state["known"] = rules
            try:
                for package in ("gradguard", "gradguard.integrations"):
                    rules.add(package)
                prepare_for_dynamo()
                unpack_in_graphs()
            except internal_error() as fault:
                say("the watch of compilers", "torch.compile may compile more than without a guard", fault)
        session = local.listener
        if session is not None:
            session.compiled_begins()


def _leave() -> None:
    local.compiled -= 1
    if not local.compiled:
        compiling.discard(threading.get_ident())
        session = local.listener
        if session is not None:
            session.compiled_ends()


def swap_callback(callback: Any) -> Any:
    """Exchanges Dynamo's callback of this thread without being noticed; returns the one before."""
    original = _state["original"]
    return None if original is None else original(callback)


class Aside:
    """A block that runs as in a thread without a guard, such as the body of `torch.export.export`."""

    def __enter__(self) -> None:
        self._before = session, _, compiled = local.listener, local.coast, local.compiled
        if session is not None:
            local.compiled = compiled + 1
            compiling.add(threading.get_ident())
            _lift_hooks()
            session.compiled_begins()
            local.listener = local.coast = None

    def __exit__(self, *_: object) -> None:
        session, coast, compiled = self._before
        if session is not None:
            local.listener, local.coast, local.compiled = session, coast, compiled
            if not compiled:
                compiling.discard(threading.get_ident())
                session.compiled_ends()


def unguarded(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function into which no such block can be put."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with Aside():
            return original(*args, **kwargs)

    return guarded


# -- what asks which modes there are ----------------------------------------------------------------------------------------


class Unseen:
    """While an op probe stands on some thread's stack, what asks torch about function modes is answered as if it did not stand there.

    nn.TransformerEncoder and nn.MultiheadAttention ask `torch.overrides.has_torch_function` before they take their native fast path,
    whose numbers differ in the last bits: a mode that only watches must not turn it off. Who counts the modes, to
    check that each was taken off or to take them all off, must not count one that comes and goes between two steps.

    These are functions of C's and have to be replaced; that they are only while a probe stands.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing: set[int] = set()
        has = torch.overrides.has_torch_function
        guarded = _has_torch_function(has)
        register_builtin(guarded, "aten::has_torch_function")
        self._answers: list[tuple[str, str, Any, Any]] = [("torch.overrides", "has_torch_function", has, guarded)]
        for name, answer in (("_len_torch_function_stack", users_modes), ("_get_function_stack_at", users_mode)):
            original = getattr(torch._C, name, None)
            if original is not None:  # `torch.utils._device` is imported when it is first needed
                self._answers += [(owner, name, original, answer) for owner in ("torch._C", "torch.overrides", "torch.utils._device")]

    def keep(self, probe: Any, standing: bool) -> None:
        """An op probe is put on a stack, or taken off it."""
        with self._lock:
            (self._standing.add if standing else self._standing.discard)(id(probe))
            for module, name, original, guarded in self._answers:
                old, new = (original, guarded) if self._standing else (guarded, original)
                owner = sys.modules.get(module)
                if owner is not None and getattr(owner, name, None) is old:
                    setattr(owner, name, new)


def _has_torch_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(relevant_args: Any) -> bool:
        session = local.listener
        if session is None or not session.tracing:
            return bool(original(relevant_args))
        return bool(session.unwatched(original, relevant_args))

    return guarded


unseen = Unseen()
