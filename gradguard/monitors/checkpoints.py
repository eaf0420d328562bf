"""Activation checkpointing: what a checkpointed function reads must be the same when it runs again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from gradguard.core.callsite import USER_FILES
from gradguard.core.notes import Notes
from gradguard.core.safe_read import attributes, class_attributes, function_code, named_modules, named_parameters, pairs, unless_loud
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.monitors.findings import Finding
from gradguard.torch_compat.private_api import quiet, storage_key, version_of

if TYPE_CHECKING:
    from gradguard.core.callsite import CallSite
    from gradguard.instrumentation.journal import Journal

_MOST_PLAIN = 2_000  # of the plain values of one function
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


State = dict[tuple[str, str], Any]  # (owner, name) -> a number, flag or word, or how much a container has


class Run(NamedTuple):
    """The first run of a checkpointed function: what it was given beside tensors."""

    function: int
    step: int
    state: State


def plain_state(function: Any) -> State:
    """The numbers, flags and words that a function can read from outside of its arguments: of the modules of the user's that it is,
    belongs to or closes over, of closed-over and global variables, and of the objects and dicts that these have."""
    found: State = {}
    named = list(_reads(function))
    plain = unless_loud(function.__func__) if isinstance(function, MethodType) else function
    if isinstance(plain, FunctionType):
        named += [(name, plain.__globals__[name]) for name in plain.__code__.co_names if name in plain.__globals__]
    for name, value in named:
        if isinstance(value, nn.Module):
            for path, module in named_modules(value):
                kind = type(module)
                for attribute in () if kind.__module__.partition(".")[0] == "torch" else _mentioned(kind):
                    _note(found, f"{path}:{kind.__name__}", attribute, attributes(module).get(attribute), 1)
        else:
            _note(found, "", name, value, 1)
        if len(found) > _MOST_PLAIN:
            break
    return found


def _note(found: State, owner: str, name: str, value: Any, deeper: int) -> None:
    kind = type(value)
    if kind in (int, float, bool, str, type(None)):
        found[owner, name] = value
    elif kind in (list, dict, set):
        found[owner, name] = len(value)
    if kind is dict and deeper:
        for key, item in pairs(value, 64):
            if type(key) is str:
                _note(found, name, key, item, deeper - 1)
    elif deeper and not isinstance(value, (torch.Tensor, ModuleType, FunctionType, MethodType, BuiltinFunctionType)):
        held = class_attributes(value) if isinstance(value, type) else attributes(value)
        for attribute, item in islice(held.items(), 64):
            _note(found, name, attribute, item, deeper - 1)


def _mentioned(kind: type) -> frozenset[str]:
    names = _known.get(kind)
    if names is None:
        codes = [code for base in kind.__mro__ for value in class_attributes(base).values() if (code := function_code(value)) is not None]
        names = _known[kind] = frozenset(name for code in codes if USER_FILES[code.co_filename] for name in code.co_names)
    return names


_known: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


@dataclass
class Checkpointed:
    """What is known of the checkpoints of a run.

    Attributes:
        cut_off: parameters that get no gradient since no input of their checkpoint requires grad, by id.
        read: of the last checkpoints: the line, and the tensors that their functions read from outside.
        runs: what the last checkpointed functions had of Python's own values when they ran first.
        at_random: lines of checkpoints that were told to draw other random numbers the second time.
    """

    cut_off: dict[int, TensorRef] = field(default_factory=dict)
    read: list[tuple[CallSite | None, list[tuple[str, TensorRef, int, int | None, int]]]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    at_random: set[CallSite | None] = field(default_factory=set)


def reentrant(notes: Notes, args: tuple[Any, ...], site: CallSite | None) -> Iterator[Finding]:
    """`CheckpointFunction.apply` begins: parameters inside count for nothing if no input requires grad.

    Args:
        notes: the run's.
        args: of `apply`.
        site: the user's line.
    """
    if len(args) > 1 and args[1] is False:
        yield from _random(notes, args[0], site)
    if not torch.is_grad_enabled() or any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args[1:]):
        return
    modules = [module for _, module in _reads(args[0]) if isinstance(module, nn.Module)]
    trained = [(name, p) for module in modules if module.training for name, p in named_parameters(module) if p.requires_grad]
    if not trained:
        return
    names = ", ".join(f"`{name}`" for name, _ in trained[:3]) + (f" and {len(trained) - 3} more" if len(trained) > 3 else "")
    # the rule about parameters without a gradient need not tell of these again
    notes[Checkpointed].cut_off.update((id(p), TensorRef(p)) for _, p in trained)
    yield CutOff(None, site, len(trained), names, type(modules[0]).__name__)


def begins(notes: Notes, journal: Journal, function: Any, preserve: Any, site: CallSite | None) -> Iterator[Finding]:
    """A non-reentrant checkpoint begins: notes the tensors its function reads from outside, with their versions.

    Args:
        preserve: whether the random state is restored for the second run.
    """
    if not torch.is_grad_enabled():
        return
    if preserve is False:
        yield from _random(notes, function, site)
    with quiet():
        held = [
            (name, TensorRef(value), value._version, storage_key(value), journal.tick())
            for name, value in _reads(function)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and version_of(value) is not None
        ]
    if held:
        kept = notes[Checkpointed].read
        kept.append((site, held))
        del kept[:-_MOST]
    states = plain_state(function)
    if states:
        runs = notes[Checkpointed].runs
        runs.append(Run(id(function), journal.step, states))
        del runs[:-_MOST]


def _random(notes: Notes, function: Any, site: CallSite | None) -> Iterator[Finding]:
    """The random state is not restored: dropout will draw another mask in backward."""
    modules = [module for _, module in _reads(function) if isinstance(module, nn.Module)]
    drawing = [
        (module, path, child.p)
        for module in modules
        for path, child in named_modules(module)
        if isinstance(child, _DropoutNd) and child.p > 0 and child.training
    ]
    told = notes[Checkpointed].at_random
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
