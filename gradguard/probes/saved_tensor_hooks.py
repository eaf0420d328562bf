"""The saved-tensor probe: notes each tensor that autograd saves for backward, on `torch.autograd.graph.saved_tensors_hooks`.

It is on where memory is accounted for and at level forensic; every other step reads the live graph instead. It writes facts and keeps no
tensor alive that PyTorch would not: what the graph holds in place of the tensor (`Packed`) dies when the graph lets the value go, and that
is how the probe learns of it.

The hooks are off where they would be in the way: while `torch.func` differentiates, while `Function.apply` runs, while something
compiles, under dispatch modes of the program's, which would see PyTorch detach what the hooks give back, and for the inputs that
checkpointing keeps. What is saved there by a custom Function or by checkpointing is read afterwards, from the node or the frame that
holds it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from gradguard.core.callsite import USER_FILES
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import own_variable
from gradguard.instrumentation.facts import SavedFact, Saver
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.probes.call_arguments import call_name
from gradguard.probes.listeners import local
from gradguard.torch_compat.private_api import (
    compiles_backward,
    dispatch_modes,
    function_modes,
    grad_fn_of,
    has_own_dispatch,
    is_a,
    memory_of,
    node_sequence,
    quiet,
    saved_data,
    saved_slots,
    saved_state,
    sequence_number,
    under_dispatch_modes,
    version_of,
    waits_for_its_result,
)
from gradguard.torch_compat.saved_tensors import Packed, can_hook, hook_below, hooks_allowed, is_hooked, look_up_with, unhook, unhooked

_CALL = torch.nn.Module._call_impl.__code__
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_NO_SHAPE = torch.Size(())
_dict_of = torch.nn.Module.__dict__["__dict__"].__get__  # whatever a module's class makes of `__dict__`

_MOST_FACTS = 20_000  # in one step: asked for its number, a node gets a Python object, and freeing a chain of 50,000 overflows the stack


class Evaluations:
    """What graphs of modules in eval mode hold, in one run.

    Attributes:
        most: bytes, each storage counted once, as long as no backward was run through one of the graphs.
    """

    def __init__(self) -> None:
        self.most = 0
        self._held = 0
        self._users: dict[int, int] = {}  # storage -> how many live facts it has
        self._trained = False

    def saved(self, fact: SavedFact) -> None:
        """A graph holds something more."""
        if self._trained:
            return
        fact.evaluations = self
        users = self._users.get(fact.storage, 0)
        self._users[fact.storage] = users + 1
        if not users:
            self._held += fact.nbytes
            self.most = max(self.most, self._held)

    def gone(self, fact: SavedFact) -> None:
        """A graph has let it go."""
        if fact.used:  # a network with frozen statistics is trained in eval mode
            self._trained, self.most = True, 0
        if _leaves(self._users, fact.storage):
            self._held -= fact.nbytes


class SavedTensors:
    """See the module's docstring.

    Args:
        journal: where facts can be asked for.
        fault: told of an exception of gradguard's own.

    Attributes:
        on: whether the hooks are wanted in this thread.
        held: bytes that are saved for backward now, every storage counted once and leaves that require grad left out.
        peak: the most that `held` has been since `begin_step`.
        evaluations: the account of the run under way of what graphs of modules in eval mode hold; None where nobody keeps it.
    """

    PART = "saved-tensor probe"
    GOES_ON = ("switch", "pause", "resume", "_pack", "_noted", "apply", "keep_inputs", "facts", "_packed_of")

    def __init__(self, journal: Journal, fault: Callable[[BaseException], None]) -> None:
        self.on = False
        self.held = self.peak = 0
        self._peak_at = 0
        self._journal = journal
        self._tick = journal.tick
        self._fault = fault
        self._thread = get_ident()
        self._facts: list[SavedFact] = []
        self._ended: deque[SavedFact] = deque()  # written by whichever thread lets a graph go
        self._users: dict[int, int] = {}  # storage -> how many live facts it has
        self.evaluations: Evaluations | None = None
        self._saver = Saver(-1, None, -1, None, 0, True)
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._functions: dict[weakref.ref[Any], list[SavedFact]] = {}  # saved by what holds its values itself: the holder -> facts
        self._by_seq: tuple[int, dict[int, list[SavedFact]]] = (0, {})
        journal.saved_facts = self.facts
        look_up_with(self._packed_of)
        # the thread's stack of hooks keeps this one function, and nothing of the session's
        ref = weakref.ref(self)

        def pack(tensor: torch.Tensor) -> Any:
            probe = ref()
            return tensor if probe is None else probe._pack(tensor)

        self._hook = pack

    # -- on and off ---------------------------------------------------------------------------------------------------

    def switch(self, on: bool) -> None:
        """Puts the hooks on this thread's stack, or takes them off."""
        self.on = on = on and can_hook() and not compiles_backward()
        local.saving = self if on else None
        if not hooks_allowed():
            return
        if not self.on:
            unhook()
        elif not under_dispatch_modes() and not is_hooked():
            hook_below(self._hook)

    def pause(self) -> None:
        """Something compiles, or runs compiled."""
        if self.on:
            unhook()

    def resume(self) -> None:
        """It has ended."""
        if self.on:
            self.switch(True)

    # -- what is saved ------------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Packed:
        seq = sequence_number() - 1
        if type(tensor) in _PLAIN and not function_modes() and not dispatch_modes():
            return self._noted(tensor, seq)
        with quiet():
            return self._noted(tensor, seq)

    def _noted(self, tensor: torch.Tensor, seq: int) -> Packed:
        packed = _packed(tensor, seq)
        if self.on:  # else the guard was left in another thread, out of whose reach this one's hooks are
            try:
                self._note(packed, tensor, seq)
            except internal_error() as error:
                self._fault(error)
        return packed

    def _note(self, packed: Packed, tensor: torch.Tensor, seq: int) -> None:
        if get_ident() != self._thread:
            seq = -1
        if packed.name is not None and tensor._is_view():
            packed.in_place = self._named(tensor.grad_fn, packed.name, seq)
        if seq != self._saver.seq or seq < 0:
            self._saver = self._place(seq, sys._getframe(3))
        fact = self._fact(tensor, self._saver, packed.version, packed.made)
        if fact is not None:
            packed.fact, packed.gone = fact, self._gone
            fact.packed = weakref.ref(packed)
        if len(self._facts) > _MOST_FACTS:
            unhook()  # for the rest of the step

    def _named(self, node: Any, name: str, seq: int) -> Callable[[], str | None]:
        """What names a view written in place as PyTorch does: by the view's own node as long as that lives, else by the operation."""
        tag = _Tag()
        node.metadata[_Tag] = tag
        alive, journal = weakref.ref(tag), self._journal

        def named() -> str | None:
            fact = None if alive() is not None else journal.op_at(seq)
            return name if fact is None else "".join(part.title() for part in call_name(fact.func).split("_")) + "Backward0"

        return named

    def _fact(self, tensor: torch.Tensor, saver: Saver, version: int, made: int) -> SavedFact | None:
        if self._ended:
            self._settle()
        if type(tensor) in _PLAIN and tensor.layout is _STRIDED:
            try:
                memory = tensor.untyped_storage()
            except internal_error(NotImplementedError):  # a wrapper of `torch.func`
                return None
            storage, nbytes, shape = memory._cdata, memory.nbytes(), tensor.shape if not tensor.is_nested else _NO_SHAPE
        else:
            parts = [] if has_own_dispatch(tensor) else memory_of(tensor)
            if not parts:
                return None
            (storage, nbytes), shape = parts[0], _NO_SHAPE
        owner = tensor if tensor._base is None else tensor._base  # `F.linear` saves its weight transposed
        leaf = owner.requires_grad and owner.is_leaf
        fact = SavedFact(saver, storage, nbytes, tensor.dtype, shape, tensor.device, version, made, leaf, self._tick())
        self._facts.append(fact)
        if leaf:
            return fact
        users = self._users.get(storage, 0)
        self._users[storage] = users + 1
        if not users:
            self.held += nbytes
            if self.held > self.peak:
                self.peak, self._peak_at = self.held, fact.born
        if not saver.training and self.evaluations is not None:
            self.evaluations.saved(fact)
        return fact

    def _gone(self, fact: SavedFact) -> None:
        fact.died = self._tick()
        self._ended.append(fact)

    def _settle(self) -> None:
        """Takes account of what graphs have let go."""
        while self._ended:
            fact = self._ended.popleft()
            if fact.leaf:
                continue
            if _leaves(self._users, fact.storage):
                self.held -= fact.nbytes
            if fact.evaluations is not None:
                fact.evaluations.gone(fact)

    def _place(self, seq: int, frame: FrameType | None) -> Saver:
        """The user's innermost frame, and the module that is being called."""
        files = USER_FILES
        code, lasti, module = None, -1, None
        while frame is not None and (code is None or module is None):
            running = frame.f_code
            if running is _CALL:
                if module is None:
                    module = own_variable(frame, "self")
            elif code is None and files[running.co_filename]:
                code, lasti = running, frame.f_lasti
            frame = frame.f_back
        ref = None
        if module is not None:
            ref = self._modules.get(id(module))
            if ref is None or ref() is not module:
                ref = self._modules[id(module)] = UncountedRef(module)
        return Saver(seq, code, lasti, ref, self._journal.step, module is None or _dict_of(module).get("training") is not False)

    # -- what is not seen being saved ---------------------------------------------------------------------------------

    def apply(self, original: Callable[..., Any], frame: FrameType, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`Function.apply` with the hooks off: under them `ctx.saved_tensors` are other objects."""
        before = sequence_number()
        with unhooked():
            result = original(cls, *args, **kwargs)
        if self.on and sequence_number() != before:
            try:
                with quiet():
                    self._applied(result, before, frame)
            except internal_error() as error:
                self._fault(error)
        return result

    def _applied(self, result: Any, before: int, frame: FrameType) -> None:
        for output in result if isinstance(result, tuple) else (result,):
            node = grad_fn_of(output)
            seq = -1 if node is None else node_sequence(node)
            if seq >= before:
                tensors = [value for _, slot in saved_slots(node) if (value := saved_data(slot)) is not None]
                self._kept(node, self._place(seq, frame), tensors)
                return

    def keep_inputs(self, original: Callable[..., Any], frame: FrameType, holder: Any, inputs: tuple[Any, ...]) -> Any:
        """Checkpointing keeps the inputs of a function, with the hooks off: it must get back the objects that it kept."""
        with unhooked():
            result = original(holder, *inputs)
        if self.on:
            try:
                with quiet():
                    self._kept(holder, self._place(-1, frame), [each for each in inputs if is_a(each, torch.Tensor)])
            except internal_error() as error:
                self._fault(error)
        return result

    def _kept(self, holder: Any, saver: Saver, tensors: list[torch.Tensor]) -> None:
        made = [(each, version_of(each) or 0, node_sequence(grad_fn_of(each))) for each in tensors]
        facts = [fact for each, version, seq in made if (fact := self._fact(each, saver, version, seq)) is not None]
        if facts:
            self._functions[UncountedRef(holder, self._holder_gone)] = facts

    def _holder_gone(self, ref: weakref.ref[Any]) -> None:
        for fact in self._functions.pop(ref, ()):
            self._gone(fact)

    def backward_ended(self) -> None:
        """A backward call has returned: custom Functions may have let their values go."""
        for ref in [ref for ref in self._functions if (node := ref()) is None or saved_state(node) == "freed"]:
            self._holder_gone(ref)

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """What has ended is forgotten."""
        self._settle()
        self._facts = [fact for fact in self._facts if not fact.died]
        self.peak, self._peak_at = self.held, self._tick()

    def facts(self) -> list[SavedFact]:
        """What is saved now."""
        self._settle()
        return [fact for fact in self._facts if not fact.died]

    def _packed_of(self, node: Any) -> list[Packed]:
        if not self._facts:
            return []
        if self._by_seq[0] != self._facts[-1].born:
            found: dict[int, list[SavedFact]] = {}
            for fact in self._facts:
                found.setdefault(fact.saver.seq, []).append(fact)
            self._by_seq = (self._facts[-1].born, found)
        seq, known = node_sequence(node), self._by_seq[1]
        # what a view was written with has become part of the node that copies the view back, whose number comes before the view's new one
        held = [(fact, False) for fact in known.get(seq, ())] + [(fact, True) for fact in known.get(seq + 1, ())]
        packed = [(fact.packed(), copied) for fact, copied in held if fact.packed is not None]
        return [each for each, copied in packed if each is not None and (each.in_place is not None) == copied]

    def at_peak(self) -> list[SavedFact]:
        """What was saved when most was, since `begin_step`."""
        return [fact for fact in self._facts if fact.born <= self._peak_at and not 0 < fact.died < self._peak_at]


class _Tag:
    """Dies with the graph node on which it hangs."""

    __slots__ = ("__weakref__",)


def _leaves(users: dict[int, int], storage: int) -> bool:
    """One user of a storage less: whether it was the last."""
    left = users[storage] - 1
    if left:
        users[storage] = left
    else:
        del users[storage]
    return not left


def _packed(tensor: torch.Tensor, seq: int) -> Packed:
    node = tensor.grad_fn
    if node is None:
        return Packed(tensor, tensor._version, None, 0, -1)
    made = node._sequence_nr()
    if made >= seq or waits_for_its_result(node):
        return Packed(tensor.detach(), tensor._version, node.name(), tensor.output_nr, made)
    return Packed(tensor, tensor._version, None, 0, made)  # PyTorch's words call every input the output 0 of its operation
