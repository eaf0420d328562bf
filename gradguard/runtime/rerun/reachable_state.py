"""What a step can reach, and whether it can be put back to what it was: asked before a step is run a second time.

From the step's function on, everything that its code can get at is visited without running any of it: variables of enclosing
functions, the module-level names that it and the user's functions it calls read, attributes, items. Containers, attributes, tensors,
arrays and random generators are remembered. Where something is met that keeps its state elsewhere (an iterator, a file, a thread, an
object of an unknown library), a second run would leave its mark there, and the step is not run again.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import io
import logging
import queue
import random
import re
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import attributes, class_attributes, in_class, is_quiet, own_dict, store_of, unwrapped

_MOST = 200_000  # objects
_BYTES = 1 << 30  # of tensors and arrays that are copied
_IMMUTABLE = (
    str, int, float, complex, bool, bytes, type(None), type(...), type(NotImplemented), range, slice, Enum, PurePath, date, time, timedelta,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, CodeType, MethodDescriptorType,
    WrapperDescriptorType, MethodWrapperType, MemberDescriptorType, GetSetDescriptorType, property, re.Pattern, re.Match,
    weakref.ref, type(threading.Lock()), type(threading.RLock()),
    logging.Logger, logging.Handler, type(sys.version_info), type(torch.__version__),
)  # fmt: skip
_IMMUTABLE_IDS = frozenset(map(id, _IMMUTABLE))
# Modules whose functions and classes do nothing outside of their arguments, or whose state is put back by other means.
_KNOWN = frozenset({
    "torch", "numpy", "math", "cmath", "random", "functools", "itertools", "collections", "operator", "typing", "typing_extensions",
    "types", "dataclasses", "enum", "copy", "abc", "re", "contextlib", "warnings", "time", "string", "numbers", "statistics", "bisect",
    "heapq", "logging", "builtins", "__future__", "einops", "torchvision", "torchmetrics", "gradguard", "lightning", "pytorch_lightning",
    "lightning_fabric", "lightning_utilities", "transformers", "accelerate",
})  # fmt: skip
# Their objects belong to who runs the step: what stands in them is put back, and what they hold besides is their own business.
_FRAMEWORKS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "transformers", "accelerate"})
_REACHING_OUT = frozenset({"open", "input", "exec", "eval", "__import__", "breakpoint", "next"})
_WRITING = frozenset({
    "save", "savez", "savez_compressed", "savetxt", "tofile", "memmap", "logger", "loggers", "experiment", "save_checkpoint",
})  # fmt: skip


class UnrestorableError(Exception):
    """Something that a second run would change for good."""


class Reach:
    """Everything that a function can get at, remembered as it is now.

    Args:
        function: what is to be run again.

    Raises:
        UnrestorableError: part of it cannot be put back.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}  # keeps what is visited alive, so that no id is used twice
        self._pending: list[tuple[Any, bool]] = [(function, False)]
        self._bytes = 0
        self._modules: set[int] = set()  # tensors that modules hold
        while self._pending:
            value, foreign = self._pending.pop()
            if id(value) in self._seen or id(type(value)) in _IMMUTABLE_IDS:
                continue
            if len(self._seen) > _MOST:
                raise UnrestorableError("it reaches too many objects")
            self._seen[id(value)] = value
            self._visit(value, foreign)

    def put_back(self) -> list[Exception]:
        """Puts everything back that has changed since; gives what went wrong in doing so."""
        faults: list[Exception] = []
        with torch.no_grad():
            for undo in self._undo:
                try:
                    undo()
                except Exception as fault:
                    faults.append(fault)
        return faults

    def _add(self, *values: Any, foreign: bool = False) -> None:
        self._pending += [(value, foreign) for value in values]

    def _visit(self, value: Any, foreign: bool) -> None:
        kind = type(value)
        if not is_quiet(value):
            self._refuse(value, foreign)
        elif any(base.__module__.partition(".")[0] == "gradguard" for base in kind.__mro__):
            return
        elif isinstance(value, type):
            self._class(value, foreign)
        elif isinstance(value, ModuleType):
            if not _is_known(value.__name__) and not USER_FILES[attributes(value).get("__file__") or "<frozen >"]:
                self._refuse(value, foreign, f"the module `{value.__name__}`")
        elif isinstance(value, FunctionType):
            self._function(value, foreign)
        elif isinstance(value, MethodType):
            self._add(value.__self__, value.__func__, foreign=foreign)
        elif isinstance(value, BuiltinFunctionType):
            if not isinstance(value.__self__, (ModuleType, type(None))):
                self._add(value.__self__, foreign=foreign)
        elif isinstance(value, partial):
            self._add(value.func, value.args, value.keywords, foreign=foreign)
        elif isinstance(value, (torch.Tensor, torch.Generator)):
            self._tensor(value, foreign) if isinstance(value, torch.Tensor) else self._generator(value)
        elif kind is random.Random:
            self._state(value.getstate, value.setstate)
        elif kind.__module__.partition(".")[0] == "numpy":
            self._numpy(value, foreign)
        elif isinstance(value, (list, dict, set, deque, bytearray)):
            self._container(value, foreign)
        elif isinstance(value, (tuple, frozenset)):
            self._add(*(tuple.__iter__(value) if isinstance(value, tuple) else frozenset.__iter__(value)), foreign=foreign)
        elif isinstance(value, CellType):
            self._cell(value, foreign)
        elif not isinstance(value, _IMMUTABLE) and not _is_output(value):
            self._instance(value, foreign)

    def _refuse(self, value: Any, foreign: bool, name: str | None = None) -> None:
        if not foreign:
            raise UnrestorableError(f"it reaches {name or f'an object of the class `{type(value).__name__}`'}, which cannot be put back")

    # -- code ---------------------------------------------------------------------------------------------------------

    def _function(self, function: FunctionType, foreign: bool) -> None:
        self._add(*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, function.__dict__, foreign=foreign)
        if not USER_FILES[function.__code__.co_filename]:
            if not _is_known(function.__module__ or ""):
                self._refuse(function, foreign, f"`{function.__module__}.{function.__name__}`")
            return
        for code in _codes(function.__code__):
            self._code(code, function.__globals__, foreign)

    def _code(self, code: CodeType, names: dict[str, Any], foreign: bool) -> None:
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME" and not _is_known(str(step.argval)):
                self._refuse(None, foreign, f"the module `{step.argval}`")
            elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self._names(names, str(step.argval))
        read = set(code.co_names)
        for name in read & (_REACHING_OUT | _WRITING):
            if name in _WRITING or (name not in names and hasattr(builtins, name)):
                self._refuse(None, foreign, f"`{name}`")
        for name in read & names.keys():
            found = names[name]
            self._add(found, foreign=foreign)
            if isinstance(found, ModuleType) and USER_FILES[attributes(found).get("__file__") or "<frozen >"]:
                inner = vars(found)
                self._add(*(inner[each] for each in read & inner.keys()), foreign=foreign)
                for each in read & inner.keys():
                    self._names(inner, each)

    def _names(self, scope: dict[str, Any], name: str) -> None:
        before, had = scope.get(name), name in scope

        def undo() -> None:
            if had:
                scope[name] = before
            else:
                scope.pop(name, None)

        self._undo.append(undo)

    def _class(self, kind: type, foreign: bool) -> None:
        if not _is_users(kind):
            if not _is_known(kind.__module__) and in_class(kind, "__new__") is not object.__new__:
                self._refuse(kind, foreign, f"the class `{kind.__name__}`")
            return
        for base in kind.__mro__:
            held = class_attributes(base)
            if _is_users(base):
                for value in held.values():
                    if isinstance(value, property):
                        self._add(value.fget, value.fset, foreign=foreign)
                    else:
                        self._add(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value, foreign=foreign)
                self._attributes_of_class(base, held)

    def _attributes_of_class(self, kind: type, held: dict[str, Any]) -> None:
        plain = {name: value for name, value in held.items() if not name.startswith("__")}

        def undo() -> None:
            now = class_attributes(kind)
            for name in now.keys() - held.keys():
                type.__delattr__(kind, name)
            for name, value in plain.items():
                if now.get(name, self) is not value:
                    type.__setattr__(kind, name, value)

        self._undo.append(undo)

    # -- values -------------------------------------------------------------------------------------------------------

    def _cell(self, cell: CellType, foreign: bool) -> None:
        try:
            before = cell.cell_contents
        except ValueError:
            return

        def undo() -> None:
            cell.cell_contents = before

        self._undo.append(undo)
        self._add(before, foreign=foreign)

    def _state(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        before = read()
        self._undo.append(lambda: write(before))

    def _generator(self, generator: torch.Generator) -> None:
        self._state(generator.get_state, generator.set_state)

    def _tensor(self, tensor: torch.Tensor, foreign: bool) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided or tensor.is_inference():
            self._refuse(tensor, foreign)
            return
        whole = dict(tensor.__dict__)
        self._add(tensor._backward_hooks, foreign=foreign)
        alias, before = tensor.detach(), None
        if not (tensor.requires_grad and tensor.is_leaf) and id(tensor) not in self._modules:  # `replay.nothing_stays` has those
            self._copied(tensor.untyped_storage().nbytes())
            before = alias.clone()

        def undo() -> None:
            if before is not None:
                if not _same(alias, before):
                    alias.copy_(before)
                if tensor.shape != alias.shape or tensor.dtype != alias.dtype or tensor.data_ptr() != alias.data_ptr():
                    tensor.data = alias
            if not _same_items(tensor.__dict__, whole):
                tensor.__dict__.clear()
                tensor.__dict__.update(whole)

        self._undo.append(undo)
        self._add(*whole.values(), foreign=foreign)

    def _numpy(self, value: Any, foreign: bool) -> None:
        numpy: Any = sys.modules["numpy"]
        if isinstance(value, (numpy.generic, numpy.dtype, numpy.ufunc)):
            return
        if type(value) is numpy.ndarray and not value.dtype.hasobject:
            self._copied(value.nbytes)
            before = value.copy()
            self._undo.append(lambda: None if value.tobytes() == before.tobytes() else numpy.copyto(value, before))
        elif type(value) is numpy.random.Generator:
            source = value.bit_generator
            self._state(lambda: source.state, lambda state: setattr(source, "state", state))
        elif isinstance(value, numpy.random.BitGenerator):
            self._state(lambda: value.state, lambda state: setattr(value, "state", state))
        elif type(value) is numpy.random.RandomState:
            self._state(value.get_state, value.set_state)
        else:
            self._refuse(value, foreign)

    def _copied(self, size: int) -> None:
        self._bytes += size
        if self._bytes > _BYTES:
            raise UnrestorableError("it reaches too much data to keep a copy of")

    def _container(self, held: Any, foreign: bool) -> None:
        base: Any = next(kind for kind in (list, OrderedDict, dict, set, deque, bytearray) if isinstance(held, kind))
        if isinstance(held, dict):
            before: Any = list(dict.items(held))
            self._add(*(part for pair in before for part in pair), foreign=foreign)
        else:
            before = bytes(held) if base is bytearray else list(base.__iter__(held))
            self._add(*(() if base is bytearray else before), foreign=foreign)

        def undo() -> None:
            now: Any = list(dict.items(held)) if isinstance(held, dict) else list(base.__iter__(held))
            flat = [part for pair in now for part in pair] if isinstance(held, dict) else now
            then = [part for pair in before for part in pair] if isinstance(held, dict) else list(before)
            if len(flat) == len(then) and all(a is b for a, b in zip(flat, then, strict=True)):
                return
            base.clear(held)
            if isinstance(held, dict):
                for key, value in before:
                    base.__setitem__(held, key, value)
            else:
                (base.update if base is set else base.extend)(held, before)

        self._undo.append(undo)

    def _instance(self, value: Any, foreign: bool) -> None:
        kind = type(value)
        root = kind.__module__.partition(".")[0]
        held, made = own_dict(value), in_class(kind, "__new__")
        written = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        slots = [slot for names in written for slot in names.values() if isinstance(slot, MemberDescriptorType)]
        plain = made is object.__new__ or isinstance(made, (staticmethod, FunctionType)) or isinstance(value, BaseException)
        if not plain or (held is None and not written) or isinstance(value, (io.IOBase, queue.Queue, threading.Thread)):
            self._refuse(value, foreign)
            return
        own = foreign or (root in _FRAMEWORKS and not isinstance(value, (nn.Module, torch.optim.Optimizer)))
        if isinstance(value, nn.Module):
            self._modules |= {id(each) for which in ("_parameters", "_buffers") for each in store_of(value, which).values()}
        if held is not None:
            skipped = ("state",) if isinstance(value, torch.optim.Optimizer) else ()  # which no second run updates
            self._seen.setdefault(id(held), held)
            self._container_of(held, own, skipped)
        for slot in slots:
            self._slot(slot, value, own)
        self._add(kind, foreign=own)

    def _container_of(self, held: dict[str, Any], foreign: bool, skipped: tuple[str, ...]) -> None:
        before = dict(held)

        def undo() -> None:
            if not _same_items(held, before):
                held.clear()
                held.update(before)

        self._undo.append(undo)
        self._add(*(value for name, value in before.items() if name not in skipped), foreign=foreign)

    def _slot(self, slot: Any, value: Any, foreign: bool) -> None:
        try:
            before = slot.__get__(value)
        except AttributeError:
            return
        try:
            slot.__set__(value, before)
        except (AttributeError, TypeError):  # a C struct's, which nobody sets
            return
        self._undo.append(lambda: slot.__set__(value, before))
        self._add(before, foreign=foreign)


def _is_output(value: Any) -> bool:
    return any(value is each for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


def _same(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return torch.equal(tensor, before) or (
        tensor.is_floating_point() and torch.allclose(tensor, before, rtol=0.0, atol=0.0, equal_nan=True)
    )


def _same_items(held: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(held) == len(before) and all(held.get(name, _same) is value for name, value in before.items())


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _is_users(kind: type) -> bool:
    """Whether a class is written in the user's files."""
    codes = list(_methods(kind))
    file = attributes(sys.modules.get(kind.__module__)).get("__file__")
    return USER_FILES[codes[0].co_filename] if codes else kind.__module__ == "__main__" or (isinstance(file, str) and USER_FILES[file])


def _methods(kind: type) -> Iterator[CodeType]:
    for value in class_attributes(kind).values():
        function = unwrapped(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)
        if isinstance(function, FunctionType):
            yield function.__code__


_silent: set[int] = set()  # threads


class _Hushed:
    """An output stream to which silent threads write nothing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        return len(text) if threading.get_ident() in _silent else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_hushing: set[int] = set()  # threads, those included that are just being heard
_replaced: list[Any] = []
_lock = threading.Lock()


def _install() -> None:
    handle = logging.Logger.handle

    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() not in _silent:
            handle(logger, record)

    ours: list[Any] = [_Hushed(sys.stdout), _Hushed(sys.stderr), handled]
    places: list[tuple[Any, str]] = [(sys, "stdout"), (sys, "stderr"), (logging.Logger, "handle")]
    _replaced.extend((owner, name, getattr(owner, name), mine) for (owner, name), mine in zip(places, ours, strict=True))
    for owner, name, _, mine in _replaced:
        setattr(owner, name, mine)


def _remove() -> None:
    for owner, name, before, mine in _replaced:
        if getattr(owner, name) is mine:
            setattr(owner, name, before)
    _replaced.clear()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Inside, this thread prints and logs nothing: the first run has said it."""
    own = threading.get_ident()
    with _lock:
        if not _hushing:
            _install()
        _hushing.add(own)
        _silent.add(own)
    try:
        yield
    finally:
        with _lock:
            _silent.discard(own)
            _hushing.discard(own)
            if not _hushing:
                _remove()


@contextlib.contextmanager
def aloud() -> Iterator[None]:
    """Inside, this thread is heard even in a second run: what gradguard itself has to say."""
    was = threading.get_ident() in _silent
    _silent.discard(threading.get_ident())
    try:
        yield
    finally:
        if was:
            _silent.add(threading.get_ident())
