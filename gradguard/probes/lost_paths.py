"""Where values lose their path to the graph: calls that make no node, and what is made of their results.

A value without a graph remembers, as long as it lives, where the path of what it was made from ended (`Cut`); what is made from
it inherits that memory. Nothing is kept alive by it.
"""

from __future__ import annotations

import sys
import weakref
from itertools import islice
from types import FrameType
from typing import Any

import torch

from gradguard.core.callsite import CallSite, user_frame, user_stack
from gradguard.core.safe_read import peek
from gradguard.instrumentation.facts import Cut, EscapeFact
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.probes.call_arguments import call_name, is_flat, is_one_of, numbers_in, tensors_in, tensors_within
from gradguard.probes.distributions import is_scoring, sampled_distribution
from gradguard.probes.op_table import ADDEND, AFFINE, ALIKE, DETACH, FRESH, GATHER, LESSER, MAPS, REWRAP, REWRAPS, WRITE
from gradguard.probes.saved_contents import Contents
from gradguard.torch_compat.collectives import GATHERING
from gradguard.torch_compat.private_api import (
    grad_fn_of,
    is_a,
    is_a_loss,
    leaves_behind,
    numpy_reachable,
    only_leaf,
    sequence_number,
    storage_key,
)

_grad_enabled = torch.is_grad_enabled
_Tensor = torch.Tensor
_MOST_AT_ONE_LINE, _MOST_SEARCHED = 8, 64
_MOST_SUMS = 256  # that values of one random sample go into
_MOST_SEVERED, _MOST_BEHIND = 64, 4_096  # cuts noted, graph nodes searched for each
_TELLING, _ARRAYS_SEARCHED = 4, 32  # values of an array by which it is known again, arrays compared
_ESCAPES_SEARCHED = 256  # for the number a new tensor is made of; all 4,096 would take milliseconds


def _of_graph(tensor: Any) -> Any:
    """The tensor itself; the base of a view made under no_grad, which still says that it requires grad."""
    return tensor._base if tensor.requires_grad and grad_fn_of(tensor) is None and tensor._base is not None else tensor


class LostPaths:
    """Writes to a journal where paths end, and what has lost its path goes into.

    Args:
        journal: where facts go.
        prints: notes the contents of memory that numpy gets.
    """

    PART = "record of cut paths"

    def __init__(self, journal: Journal, prints: Contents) -> None:
        self.journal = journal
        self.prints = prints
        self._searched: dict[
            int, tuple[frozenset[int], tuple[Cut, ...]]
        ] = {}  # of this step: sequence numbers, and the parameters wanted that are behind them
        self._searched_in = -1
        self.escaped_in = -1  # the step in which a value with a lost path last left for Python or numpy

    def cut(self, kind: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """Remembers on a gradless result where its inputs' path ended, or inherits their memories."""
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [out for out in outputs if isinstance(out, _Tensor) and (not out.requires_grad or kind & REWRAP)]
        if len(tensors) < len(outputs) and len(outputs) > 1:  # each result from an input of its own (broadcast_tensors): nothing was cut
            tensors = [out for out in tensors if not out.is_floating_point()]
        name = call_name(func)
        if name in FRESH or kind & GATHER:  # of another's shape only; told by itself
            return
        if kind & WRITE and result is None and args and isinstance(args[0], _Tensor) and not args[0].requires_grad:
            tensors = [args[0]]  # `buffer[i] = value` gives nothing back
        if not tensors:
            if kind & WRITE and self.journal.wanted and not _grad_enabled():
                self._written(name, args, kwargs)
            return
        if name in ALIKE:
            args, kwargs = args[:1], None
        attached, origins, leaves, guess = self._inputs(args, kwargs)
        journal = self.journal
        if guess and attached:
            origins, guess = [], False
        if kind & REWRAP and not attached and not origins:
            origins, guess = self._recovered(args[REWRAPS.get(name, 0) :])
        if not attached and not origins:
            return
        frame = user_frame(sys._getframe(1))
        site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
        if attached:
            live = _grad_enabled()
            cause = _cut_kind(kind, live)
            mode = journal.modes[-1] if cause in ("no_grad", "inference") and journal.modes else None
            drawn_from = sampled_distribution(sys._getframe(1)) if cause in ("no_grad", "nondiff") else None
            if cause == "no_grad" and peek(drawn_from, "has_rsample", False) is True:
                cause = "sample"
            outer = user_frame(frame.f_back) if frame is not None else None
            cut = Cut(
                cause,
                self.journal.tick(),
                site,
                name,
                sequence_number(),
                tuple(attached),
                mode,
                (),
                None if outer is None else CallSite(outer.f_code, outer.f_lasti),
                tuple(leaves),
                user_stack(outer, 6) if cause == "inference" else (),
            )
            cut.drawn = drawn_from is not None and cause != "sample"
            cut.flat = cause == "rewrap" and tensors[0].dim() == 1 and tensors[0].numel() == len(attached)
            if journal.wanted:
                self._sever(cut, tensors_in(args, kwargs))
            if origins:
                cut = Cut("rewrap", cut.clock, site, name, cut.seq, (), None, _merge([(cut,), *origins]))
        else:
            cut = Cut("rewrap", self.journal.tick(), site, name, sequence_number(), (), None, _merge(origins), guess=guess)
            cut.given = any(origin.kind == "sample" for origin in cut.origins) and self._is_given(name, tensors_in(args, kwargs))
        for out in tensors:
            journal.remember_cut(out, cut)

    def _is_given(self, name: str, inputs: list[Any]) -> bool:
        """Whether a call that was given a value made of a random sample is a network's last one, or shifts and scales what it gives.

        Where the sample is on both sides (`d @ precision * d`) the result is no linear map of it.
        """
        made = [cut for cut in map(self.journal.cut_of, inputs) if cut is not None and any(each.kind == "sample" for each in cut.roots())]
        if name in LESSER:
            return bool(made) and all(cut.given for cut in made)
        return len(made) == 1 and (name in MAPS or (name in AFFINE and made[0].given))

    def _written(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """With grad mode off a value with a graph is written where a graph begins or goes on: no gradient comes back to the value."""
        if not args or not isinstance(args[0], _Tensor):
            return
        attached, _, leaves, _ = self._inputs(args[1:], kwargs)
        leaf = grad_fn_of(args[0]) is None
        if not attached or (leaf and max(attached) < 0):  # updates of parameters by others are written so
            return
        journal = self.journal
        frame = user_frame(sys._getframe(1))
        site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
        mode = journal.modes[-1] if journal.modes else None
        cut = Cut("no_grad", journal.tick(), site, name, sequence_number(), tuple(attached), mode, leaves=tuple(leaves))
        cut.into_graph, cut.into_leaf = True, leaf
        self._sever(cut, tensors_in(args[1:], kwargs))

    def mapped(self, frame: FrameType, given: Any, result: Any) -> None:
        """What `vmap` gives without a graph inherits from what it was given, as of one operation."""
        journal = self.journal
        outputs = [out for out in tensors_within(result) if not out.requires_grad]
        if not journal.has_cuts or not outputs:
            return
        attached, origins, _, guess = self._inputs((tensors_within(given),), None)
        if attached or guess or not origins:
            return
        caller = user_frame(frame)
        site = None if caller is None else CallSite(caller.f_code, caller.f_lasti)
        cut = Cut("rewrap", journal.tick(), site, "vmap", sequence_number(), (), None, _merge(origins))
        for out in outputs:
            journal.remember_cut(out, cut)

    def side_results(self, before: int, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """The indices that `x.max(dim=1)` gives beside the values: no derivative leads through them."""
        for position, out in enumerate(result):
            if isinstance(out, _Tensor) and not out.requires_grad and not out.is_floating_point():
                frame = user_frame(sys._getframe(1))
                site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
                cut = Cut("nondiff", self.journal.tick(), site, call_name(func), before, (before,))
                cut.output = position
                if self.journal.wanted:
                    self._sever(cut, tensors_in(args, kwargs))
                self.journal.remember_cut(out, cut)

    def escape(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """A value leaves torch, as a number or an array."""
        source = args[0] if args else None
        if not isinstance(source, _Tensor):
            return
        name = call_name(func)
        journal = self.journal
        storage = None
        if name in ("numpy", "__array__"):
            storage = storage_key(source)
            if storage is not None:
                self.prints.note_quietly(source, 0, sequence_number())
                journal.numpy_storages[storage] = journal.tick()
                if len(journal.numpy_storages) > journal.limits.calls:
                    journal.numpy_storages.popitem(last=False)
        if name == "__bool__":
            return
        frame = user_frame(sys._getframe(1))
        site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
        cut = journal.cut_of(source)
        if source.requires_grad:
            node = grad_fn_of(source)
            leaf = source if node is None else only_leaf(node, 5)
            mode = journal.modes[-1] if not _grad_enabled() and journal.modes else None
            cut = Cut(
                "escape",
                self.journal.tick(),
                site,
                name,
                sequence_number(),
                (-1 if node is None else node._sequence_nr(),),
                mode,
                leaves=() if leaf is None else (TensorRef(leaf),),
            )
            if journal.wanted:
                self._sever(cut, [source])
        if cut is not None:
            self.escaped_in = journal.step
        value = result if isinstance(result, (int, float, complex)) else (tuple(result) if name == "tolist" and is_flat(result) else None)
        if storage is not None and journal.wanted and cut is not None and source.is_floating_point():
            value = tuple(source.detach().flatten()[:_TELLING].tolist())  # to know them again in a tensor made of arrays
        array = None if storage is None or not type(result).__weakrefoffset__ else UncountedRef(result)  # a subclass gives what it likes
        frame_id = 0 if frame is None else id(frame)
        journal.escapes.append(EscapeFact(self.journal.tick(), name, site, value, cut, storage, frame_id, journal.step, array))

    def data(self, source: Any, result: Any) -> None:
        """`source.data` was read: the result shares its memory and not its graph."""
        if not is_a(result, _Tensor):  # of a subclass
            return
        journal = self.journal
        aliases = journal.data_aliases
        aliases[id(result)] = TensorRef(result)
        if len(aliases) > journal.limits.writes:
            aliases.popitem(last=False)
        if source.requires_grad:
            frame = user_frame(sys._getframe(1))
            site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
            node = grad_fn_of(source)
            outer = None if frame is None else user_frame(frame.f_back)
            cut = Cut(
                "data",
                self.journal.tick(),
                site,
                "data",
                sequence_number(),
                (-1 if node is None else node._sequence_nr(),),
                outer=None if outer is None else CallSite(outer.f_code, outer.f_lasti),
                leaves=(TensorRef(source),) if node is None else (),
            )
            journal.remember_cut(result, cut)
            if journal.wanted:
                self._sever(cut, [source])
        elif (inherited := journal.cut_of(source)) is not None:
            journal.remember_cut(result, inherited)

    def gathered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A collective call has filled tensors with copies of a value that has a path, and of other ranks' values."""
        name = call_name(func)
        filled, reads = [_tensors(args[position] if position < len(args) else kwargs.get(keyword)) for position, keyword in GATHERING[name]]
        reads = [each for each in reads if each.requires_grad]
        if not reads:
            return
        frame = user_frame(sys._getframe(1))
        site = None if frame is None else CallSite(frame.f_code, frame.f_lasti)
        nodes = [-1 if (node := grad_fn_of(each)) is None else node._sequence_nr() for each in reads]
        cut = Cut("nondiff", self.journal.tick(), site, name, sequence_number(), tuple(nodes))
        if self.journal.wanted:
            self._sever(cut, reads)
        for each in filled:
            if not each.requires_grad:
                self.journal.remember_cut(each, cut)

    def _sever(self, cut: Cut, inputs: list[Any]) -> None:
        """Notes which of the parameters looked for stand behind what was cut off here."""
        journal = self.journal
        inputs = [_of_graph(each) for each in inputs]
        if self._searched_in != journal.step:
            self._searched_in, self._searched = journal.step, {}
        nodes = [-1 if (node := grad_fn_of(each)) is None else node._sequence_nr() for each in inputs]
        key = nodes[0] if len(nodes) == 1 else -1  # the items of one tensor have the same node
        behind = self._searched.get(key) if key >= 0 else None
        if behind is None:
            if len(self._searched) >= _MOST_SEARCHED:
                return
            found, way = leaves_behind(inputs, _MOST_BEHIND)
            behind = frozenset(id(leaf) for leaf in found if id(leaf) in journal.wanted), self._below(way)
            self._searched[key if key >= 0 else -len(self._searched) - 2] = behind
        if behind == (frozenset(), ()):
            return
        same = [i for i, (known, *rest) in enumerate(journal.severed) if known.site == cut.site and tuple(rest) == behind]
        if len(same) >= _MOST_AT_ONE_LINE:  # one of very many numbers: the last ones are those that a tensor is made of
            del journal.severed[same[0]]
        if len(journal.severed) < _MOST_SEVERED:
            cut.of_loss = bool(behind[0]) and len(inputs) == 1 and is_a_loss(inputs[0], _MOST_BEHIND)
            journal.severed.append((cut, *behind))

    def _below(self, way: list[Any]) -> tuple[Cut, ...]:
        """The cuts noted before whose results went into these graph nodes: they are cut off from the loss twice."""
        journal = self.journal
        if not journal.severed:
            return ()
        noted = {id(cut) for cut, *_ in journal.severed}
        return tuple(cut for node in way for cut in journal.fed.get(node._sequence_nr(), ()) if id(cut) in noted)[:8]

    def number(self, before: int, value: float) -> None:
        """A Python number is added to a tensor: it may be a loss term that left torch, which its value tells, or else the source."""
        journal = self.journal
        if round(value, 3) != value:  # 0.5 and 1e-3 are anybody's
            recent = islice(reversed(journal.escapes), _ESCAPES_SEARCHED)
            fact = next((fact for fact in recent if fact.value == value and fact.step == journal.step and fact.cut is not None), None)
            if fact is not None and fact.cut is not None:
                journal.remember_partial(before, _merge([journal.partial.get(before, ()), fact.cut.roots()]))
                return
        if before not in journal.partial:
            journal.remember_partial(before, ())

    def operand(self, kind: int, before: int, after: int, tensor: Any) -> None:
        """A gradless tensor goes into a differentiable call, which made the nodes from `before` up to `after`."""
        journal = self.journal
        if journal.has_cuts:
            cut = journal.cut_of(tensor)
            if cut is not None:
                self._fed(kind, before, cut)
        if journal.wanted and self.escaped_in == journal.step and numpy_reachable(tensor) and tensor.is_floating_point():
            self._came_back(before, tensor)
        if kind & ADDEND and before not in journal.partial and self.escaped_in == journal.step and not tensor.dim():
            journal.remember_partial(before, ())  # it may have been made of numbers or arrays, which carry no memory
        if self.prints.whose == "numpy" and numpy_reachable(tensor):
            self.prints.note_quietly(tensor, before, after)

    def _came_back(self, seq: int, tensor: torch.Tensor) -> None:
        """A tensor on numpy's memory goes into a differentiable call: arrays carry no memory, but values of one that left are in it."""
        journal = self.journal
        if journal.cut_of(tensor) is not None:
            return
        found: list[tuple[Cut, ...]] = []
        for fact in islice(reversed(journal.escapes), _ARRAYS_SEARCHED):
            telling = {value for value in fact.value if round(value, 2) != value} if isinstance(fact.value, tuple) else set()
            if fact.step == journal.step and fact.cut is not None and len(telling) > 1:
                wanted = torch.tensor(sorted(telling), dtype=tensor.dtype)
                if bool(torch.isin(wanted, tensor.detach().flatten()).all()):
                    found.append(fact.cut.roots())
        if found:
            journal.remember_guessed(seq, _merge(found))

    def _fed(self, kind: int, seq: int, cut: Cut) -> None:
        """A value that had lost its path goes into a differentiable call."""
        journal = self.journal
        roots = cut.roots()
        if cut.guess:  # what left torch shortly before, and may have nothing to do with it: the source has to tell
            journal.remember_guessed(seq, roots)
            if kind & ADDEND and seq not in journal.partial:
                journal.remember_partial(seq, ())
            return
        if kind & ADDEND:
            journal.remember_partial(seq, _merge([journal.partial.get(seq, ()), roots]))
        else:
            journal.remember_fed(seq, _merge([journal.fed.get(seq, ()), roots]))
        for origin in roots:
            if origin.kind == "sample" and not origin.scored and is_scoring(sys._getframe(1)):
                origin.scored = True
            if cut.given and kind & ADDEND and len(origin.valued) < _MOST_SUMS:
                origin.valued = (*origin.valued, seq)

    def _inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[list[int], list[tuple[Cut, ...]], list[weakref.ref[torch.Tensor]], bool]:
        """The graph nodes behind the inputs that have one (-1 for a leaf), the memories of those that had, and the leaves.

        The last is True where the memories are guesses.
        """
        attached: list[int] = []
        origins: list[tuple[Cut, ...]] = []
        guessed: list[tuple[Cut, ...]] = []
        leaves: list[weakref.ref[torch.Tensor]] = []
        cut_of = self.journal.cut_of
        for tensor in tensors_in(args, kwargs):
            if tensor.requires_grad:
                tensor = _of_graph(tensor)
                node = grad_fn_of(tensor)
                attached.append(-1 if node is None else node._sequence_nr())
                leaf = tensor if node is None else only_leaf(node, 5)
                if leaf is not None:
                    leaves.append(TensorRef(leaf))
            else:
                cut = cut_of(tensor)
                if cut is not None:
                    (guessed if cut.guess else origins).append(cut.roots())
        return attached, origins or guessed, leaves, not origins and bool(guessed)

    def _recovered(self, args: tuple[Any, ...]) -> tuple[list[tuple[Cut, ...]], bool]:
        """Memories of Python numbers and arrays that a new tensor is made of: they left through item(), numpy() ...

        The second is True where the values themselves prove nothing: then it is only what left last, in this step.
        """
        escapes = self.journal.escapes
        if not escapes or not args:
            return [], False
        numbers = numbers_in(args[0])
        telling = {number for number in numbers if round(number, 2) != number}  # 0.5 and 2.0 are anybody's
        if telling:
            recent = islice(reversed(escapes), _ESCAPES_SEARCHED)
            found = list(islice((fact.cut.roots() for fact in recent if fact.cut is not None and is_one_of(fact.value, telling)), 4))
            if found:
                return found, False
        elif not numbers and type(args[0]).__module__ != "numpy":
            return [], False
        return [fact.cut.roots() for fact in list(escapes)[-8:] if fact.cut is not None and fact.step == self.journal.step], True


def _cut_kind(kind: int, live: bool) -> Any:
    if torch.is_inference_mode_enabled():  # records nothing, whether grad mode is on or off
        return "inference"
    if not live:
        return "no_grad"
    if kind & DETACH:
        return "detach"
    if kind & REWRAP:
        return "rewrap"
    return "nondiff"


def _merge(origins: list[tuple[Cut, ...]]) -> tuple[Cut, ...]:
    """Distinct origins in argument order, at most eight: a running average must not grow a history."""
    seen: dict[int, Cut] = {}
    for group in origins:
        for cut in group:
            seen.setdefault(id(cut), cut)
    merged = list(seen.values())
    if len(merged) > 8:
        keep = sorted(merged, key=lambda cut: cut.clock)[-8:]
        merged = [cut for cut in merged if cut in keep]
    return tuple(merged)


def _tensors(argument: Any) -> list[torch.Tensor]:
    """Of an argument that is a tensor or a list of them."""
    items = argument if isinstance(argument, (list, tuple)) else (argument,)
    return [each for each in items if isinstance(each, _Tensor)]
