"""Train and eval mode: forwards without grad of modules that act differently in training, and switches between the modes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradguard.core.callsite import USER_FILES, CallSite, user_stack
from gradguard.core.safe_read import (
    attributes,
    elements,
    function_code,
    in_class,
    in_training,
    modules_in,
    named_children,
    namespace,
    parameters_in,
    store_of,
    variables_of,
)
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.fingerprints import fingerprint
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.findings import Finding
from gradguard.monitors.initial_statistics import Statistics
from gradguard.monitors.monitor import Monitor, Step

if TYPE_CHECKING:
    from gradguard.monitors.optimizer_books import Book
    from gradguard.monitors.view import View

ACTING = (_BatchNorm, _DropoutNd)
ENOUGH = 3  # forwards of one module without grad and without a backward between
_EVAL_STEPS = 5
_MOST_LOOKS = 40  # at steps of any optimizer, for one switch
_MOST_WATCHED = 16
_FRAMES = 32


class Switch:
    """One call of train() or eval() on a module, by the user."""

    __slots__ = ("entered", "kept", "looks", "mode", "names", "ref", "run", "site", "stack", "step", "stepped", "was")

    def __init__(self, module: nn.Module, mode: bool, was: bool, step: int, site: CallSite | None) -> None:
        self.ref = UncountedRef(module)
        self.mode = mode
        self.was = was
        self.step = step
        self.site = site
        self.kept: CallSite | None = None  # where the module was last given the mode that it had from here
        self.stack: tuple[CallSite, ...] = ()  # of the call, innermost first, where steps are watched for
        self.names: tuple[str | None, ...] = ()  # what the module is called in each of these frames
        self.run: tuple[CallSite, ...] = ()  # the last forward without grad before a step
        self.entered: int | None = None  # the `id` of the module that this forward was of: the switched one or a part
        self.stepped = self.looks = 0  # steps of an optimizer that trains it; of any

    def called_from(self, frame: FrameType | None, module: nn.Module) -> None:
        """Keeps the places of the call, with the module's names there."""
        places: list[CallSite] = []
        names: list[str | None] = []
        while frame is not None and len(places) < _FRAMES:
            if USER_FILES[frame.f_code.co_filename]:
                places.append(CallSite(frame.f_code, frame.f_lasti))
                names.append(_name_in(frame, module))
            frame = frame.f_back
        self.stack, self.names = tuple(places), tuple(names)

    def ran(self, module: nn.Module, frame: FrameType | None) -> None:
        """A module runs without grad: the one that was switched, or a part of it?"""
        if not self.stepped and (self.entered == id(module) or (self.entered is None and _holds(self.ref(), module))):
            self.entered, self.run = id(module), user_stack(frame, _FRAMES)


@dataclass(frozen=True, eq=False)
class LeftInEval(Finding):
    """Steps go on while what they train is in eval mode."""

    CODE = "GG609"

    switches: tuple[Switch, ...]


@dataclass(frozen=True, eq=False)
class EvalOfOwnForward(Finding):
    """A trained module whose forward is the user's runs in eval mode for the first time."""

    CODE = "GG609"
    ROUTINE = True

    module: weakref.ref[nn.Module]


@dataclass(frozen=True, eq=False)
class OutOfReach(Finding):
    """A part acts as in training inside a module in eval mode that does not hold it."""

    CODE = "GG609"

    root: weakref.ref[nn.Module]
    part: weakref.ref[nn.Module]
    type_name: str
    site: CallSite


@dataclass(frozen=True, eq=False)
class ForwardsWithoutGrad(Finding):
    """Forwards with grad mode off, on different inputs, of a trained module that acts as in training."""

    CODE = "GG609"

    root: weakref.ref[nn.Module]
    part: weakref.ref[nn.Module]
    site: CallSite
    bare: bool


class Modes(Monitor):
    """What is known of the modes of a run's modules."""

    PART = "watch of train and eval modes"

    def __init__(self) -> None:
        self.switches: list[Switch] = []
        self.watching: list[Switch] = []  # trained modules that were put into eval mode: do steps follow?
        self._counts: dict[int, Forwards] = {}
        self.off = False
        self.norms: dict[int, tuple[Any, ...]] = {}  # frozen batch norms, for the rule
        self.statistics = Statistics()
        self._kinds: set[type] = set()  # that ran in eval mode
        self._strays: set[CallSite] = set()  # places that were looked at
        self.looks = 0  # at single module calls, in all

    @barred
    def switched(self, module: nn.Module, mode: bool, was: bool, view: View, frame: FrameType | None, site: CallSite | None) -> None:
        """train(mode) was called."""
        switch = Switch(module, mode, was, view.steps, site)
        self.switches = [*self.switches[-31:], switch]
        begins = not mode and was and view.steps and any(isinstance(m, ACTING) for m in modules_in(module))
        if begins:
            switch.called_from(frame, module)
        elif not mode:
            for known in self.watching:
                if known.ref() is module:
                    known.kept = site
        if mode or begins:
            others = [known for known in self.watching if known.ref() is not module]
            self.watching = [*others[1 - _MOST_WATCHED :], switch] if begins else others

    def on_step(self, event: Step, view: View) -> Sequence[Finding]:
        return self.look(event.book) if self.watching else ()

    @barred
    def look(self, book: Book) -> list[Finding]:
        """A step was taken while trained modules stand in eval mode."""
        trained = {id(p) for p in book.parameters() if p.requires_grad}
        left, due = list[Switch](), list[Switch]()
        for switch in self.watching:
            module = switch.ref()
            if module is None or in_training(module):
                continue
            switch.looks += 1
            if any(id(p) in trained for p in parameters_in(module)):
                switch.stepped += 1
                if switch.stepped == _EVAL_STEPS:
                    due.append(switch)
                if not switch.run or switch.stepped >= _EVAL_STEPS:
                    continue  # in eval mode for the steps themselves, or told
            if switch.looks < _MOST_LOOKS:
                left.append(switch)
        self.watching = left
        outer = [switch for switch in due if not any(other is not switch and _holds(other.ref(), switch.ref()) for other in due)]
        return [LeftInEval(book, tuple(outer))] if outer and book.steps > _EVAL_STEPS else []

    @barred
    def wants_forwards(self, view: View) -> bool:
        """Whether forwards without grad are worth looking at."""
        return not self.off and view.steps > 0

    @barred
    def forward_without_grad(self, module: nn.Module, arguments: Any, frame: FrameType | None, view: View) -> list[Finding]:
        """A module runs with grad mode off; called for every module while forwards are watched."""
        found: list[Finding] = []
        if (compiled := compiled_module(module)) is not None:
            return list(self._compiled(module, compiled, arguments, frame, view))
        if not module.training:
            if type(module) not in self._kinds:
                found += self._evaluated(module, view)
            found += self.statistics.runs(module, frame, view)
        known = self._counts.get(id(module))
        if known is not None and known.ref() is module:
            if module.training or known.bare:
                found += self._again(known, arguments, frame, view)
        elif module.training and isinstance(module, ACTING):
            found += self._first(module, frame, view)
        for switch in self.watching:
            switch.ran(module, frame)
        return found

    @barred
    def called(self, module: nn.Module, frame: FrameType | None, view: View) -> list[Finding]:
        """A module runs, while calls of modules are counted."""
        return list(self.statistics.runs(module, frame, view)) if not in_training(module) else []

    def _evaluated(self, module: nn.Module, view: View) -> Iterator[Finding]:
        """A kind of module runs in eval mode for the first time: what its forward calls may not know of the mode."""
        code = function_code(in_class(type(module), "forward"))
        if len(self._kinds) > 256:
            return
        self._kinds.add(type(module))
        if code is not None and USER_FILES[code.co_filename]:
            ids = view.trained_ids()
            if any(id(p) in ids for p in parameters_in(module)):
                yield EvalOfOwnForward(None, UncountedRef(module))

    def _compiled(self, module: nn.Module, inner: nn.Module, arguments: Any, frame: FrameType | None, view: View) -> Iterator[Finding]:
        """A module compiled by Dynamo runs: the modules within it are not seen running."""
        part = next((each for each in modules_in(inner) if isinstance(each, ACTING) and in_training(each)), None)
        known = self._counts.get(id(module))
        if part is None or not in_training(inner):
            return
        if known is not None and known.ref() is module:
            yield from self._again(known, arguments, frame, view)
        else:
            yield from self._first(part, frame, view)

    def _first(self, module: nn.Module, frame: FrameType | None, view: View) -> Iterator[Finding]:
        """A dropout or batch norm acts in train mode: in which root module's forward?"""
        self.looks += 1
        if self.looks > 2000:
            self.off = True
        root, argument, caller = outermost(frame)
        root, argument, caller = (module, None, frame) if root is None else (root, argument, caller)
        if caller is None:
            return
        mixed = not root.training  # the whole is in eval mode, and this part of it is not
        if mixed:
            yield from self._stray(root, module, frame, view)
        if id(root) in self._counts:
            return
        if len(self._counts) > 64:
            self._counts.clear()
        known = self._counts[id(root)] = Forwards(root, module, view.backwards, _mark(argument))
        known.bare = mixed and not any(not switch.mode and _holds(switch.ref(), root) for switch in self.switches)

    def _stray(self, root: nn.Module, module: nn.Module, frame: FrameType | None, view: View) -> Iterator[Finding]:
        """A dropout or batch norm acts in train mode inside a module in eval mode: does eval() reach it?"""
        while frame is not None and not USER_FILES[frame.f_code.co_filename]:
            frame = frame.f_back
        if frame is None or (place := CallSite(frame.f_code, frame.f_lasti)) in self._strays or len(self._strays) > 256:
            return
        self._strays.add(place)
        ids = view.trained_ids()
        if not _holds(root, module) and any(id(p) in ids for p in parameters_in(root)):
            yield OutOfReach(None, UncountedRef(root), UncountedRef(module), type(module).__name__, place)

    def _again(self, known: Forwards, arguments: Any, frame: FrameType | None, view: View) -> Iterator[Finding]:
        begun = known.backwards != view.backwards
        if not begun and (known.said or not 0 < known.number < ENOUGH):
            return
        argument = _mark(arguments[0]) if arguments else None
        if begun:
            known.backwards, known.number, known.argument = view.backwards, 1, argument
            return
        if known.argument == argument:
            known.number = -1_000_000  # the same input again and again: Monte Carlo dropout
            return
        known.number += 1
        known.argument = argument
        if known.number != ENOUGH:
            return
        root, _, caller = outermost(frame)
        own: nn.Module | None = known.ref()
        if own is None or root is not own or caller is None or not USER_FILES[caller.f_code.co_filename]:
            return
        ids = view.trained_ids()
        if any(id(p) in ids for p in parameters_in(own)):
            known.said = True
            site = CallSite(caller.f_code, caller.f_lasti)
            yield ForwardsWithoutGrad(None, known.ref, known.module, site, bare=not own.training)


class Forwards:
    """Forwards of one root module without grad, in train mode, since the last backward."""

    __slots__ = ("argument", "backwards", "bare", "module", "number", "ref", "said")

    def __init__(self, root: nn.Module, module: nn.Module, backwards: int, argument: Any) -> None:
        self.ref: weakref.ref[nn.Module] = UncountedRef(root)
        self.module = UncountedRef(module)
        self.backwards = backwards
        self.argument = argument
        self.number = 1
        self.said = False
        self.bare = False  # its flag says eval mode, and nobody has called eval()


def _name_in(frame: FrameType, module: nn.Module) -> str | None:
    """What a module is called in a frame: a variable, or an attribute of one."""
    for scope in (variables_of(frame), namespace(frame.f_globals)):
        name = next((name for name, value in scope.items() if value is module), None)
        if name is not None:
            return name
        for name, value in scope.items():
            if not isinstance(value, (ModuleType, type)):
                held = {**attributes(value), **dict(named_children(value))} if isinstance(value, nn.Module) else attributes(value)
                attribute = next((attribute for attribute, each in held.items() if each is module), None)
                if attribute is not None and attribute.isidentifier():
                    return f"{name}.{attribute}"
    return None


def _holds(module: nn.Module | None, part: nn.Module | None) -> bool:
    return module is not None and any(each is part for each in modules_in(module))


def compiled_module(module: nn.Module) -> nn.Module | None:
    """What `torch.compile(module)` has wrapped in this one; None of any other module."""
    inner = store_of(module, "_modules").get("_orig_mod") if type(module).__module__ == "torch._dynamo.eval_frame" else None
    return inner if isinstance(inner, nn.Module) else None


def _mark(argument: Any) -> Any:
    """What tells whether two arguments are the same input: their contents, since one tensor may come to lie where another has lain."""
    if isinstance(argument, torch.Tensor) and argument.is_cpu:
        contents = fingerprint(argument, sampled=True)
        if contents is not None:
            return argument.shape, contents
    return id(argument)


def outermost(frame: FrameType | None) -> tuple[nn.Module | None, Any, FrameType | None]:
    """The outermost module whose call we are in, its first argument, and the frame that called it."""
    root: nn.Module | None = None
    argument: Any = None
    caller: FrameType | None = None
    depth = 0
    while frame is not None and depth < 200:
        if frame.f_code is _CALL and frame.f_back is not None:
            outer = frame.f_back
            given = variables_of(frame)
            owner = given.get("self")
            if isinstance(owner, nn.Module):
                root = owner
                arguments = elements(given.get("args"))
                argument = arguments[0] if arguments else None
                caller = outer
                while (
                    caller is not None
                    and caller.f_code.co_name in ("_wrapped_call_impl", "__call__")
                    and not USER_FILES[caller.f_code.co_filename]
                ):
                    caller = caller.f_back
        frame = frame.f_back
        depth += 1
    return root, argument, caller


_CALL = getattr(nn.Module._call_impl, "__code__", None)
