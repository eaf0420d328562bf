"""The journal: the bounded record of recent facts of one thread.

It holds no tensor, graph, frame or module alive: tensors appear as storage keys and sequence numbers, objects as weak
references, places as (code object, instruction offset). One journal a thread, because sequence numbers, function modes
and grad mode are per thread; it outlives a single `with gradguard():`, so that state carried over from an earlier step is
still explained.

What it may hold (`Limits`): 16,384 node-making operator calls, 4,096 writes, 1,024 backward calls, 1,024 optimizer steps,
1,024 grad-mode switches, 4,096 escapes to Python or numpy, 16,384 cut-path memories, 16,384 content fingerprints, 4,096 each
of graph nodes fed by a cut value and of switches of requires_grad, 256 of nodes that may have been, 64 of spread differences and of
losses with the wrong kind of input. A full
journal is about 8 MiB; the first two numbers are settings (`journal.ops`, `journal.writes`).
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import CodeType
from typing import Any, NamedTuple

import torch

from gradguard.core.callsite import CallSite
from gradguard.instrumentation.facts import (
    BackwardFact,
    BrokenFact,
    Cut,
    DomainFact,
    EscapeFact,
    ModeFact,
    NonfiniteFact,
    OpFact,
    Prints,
    SavedFact,
    SelfWrite,
    Spread,
    StepFact,
    Stretch,
    WriteFact,
)
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.torch_compat.private_api import storage_key

_MOST_AT_ONCE = 512  # facts of one stretch


class Limits(NamedTuple):
    """How many facts of each kind are kept; the oldest go first."""

    ops: int = 16_384
    writes: int = 4_096
    calls: int = 1_024
    modes: int = 1_024
    escapes: int = 4_096
    cuts: int = 16_384
    prints: int = 16_384


@dataclass
class Journal:
    """All facts of one thread. Lists grow at the right; `clock` orders them across kinds."""

    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        limits = self.limits
        self.tick = count(1).__next__
        self.ops: deque[tuple[int, int, CodeType, int, Any, int]] = deque(maxlen=limits.ops)
        self.writes: deque[WriteFact] = deque(maxlen=limits.writes)
        self._backwards: deque[BackwardFact] = deque(maxlen=limits.calls)
        self._steps: deque[StepFact] = deque(maxlen=limits.calls)
        self._later: deque[BackwardFact | StepFact | Stretch] = deque()  # what has come since anybody asked for one of the two above
        self._waiting = 0  # facts in there
        self.self_writes: deque[SelfWrite] = deque(maxlen=64)
        self.modes: deque[ModeFact] = deque(maxlen=limits.modes)
        self.escapes: deque[EscapeFact] = deque(maxlen=limits.escapes)
        self.prints: deque[Prints] = deque(maxlen=limits.prints)
        self.spread: deque[Spread] = deque(maxlen=64)
        self.domains: deque[DomainFact] = deque(maxlen=64)
        self.partial: OrderedDict[int, tuple[Cut, ...]] = OrderedDict()  # node sequence -> cuts of its gradless summands
        self.fed: OrderedDict[int, tuple[Cut, ...]] = OrderedDict()  # node sequence -> cuts of its other gradless operands
        self.guessed: OrderedDict[int, tuple[Cut, ...]] = OrderedDict()  # node sequence -> cuts that may stand behind an operand
        # who set requires_grad last, how often that changed it, when, and how often it was set to what it was
        self.toggles: OrderedDict[int, tuple[weakref.ref[torch.Tensor], bool, CallSite | None, int, int, int]] = OrderedDict()
        self._cuts: OrderedDict[int, tuple[weakref.ref[torch.Tensor], Cut]] = OrderedDict()
        self.data_aliases: OrderedDict[int, weakref.ref[torch.Tensor]] = OrderedDict()
        self.numpy_storages: OrderedDict[int, int] = OrderedDict()  # storage key -> clock at which numpy got hold of it
        # memory that holds non-finite values -> the call they stem from
        self.nonfinite: OrderedDict[int, NonfiniteFact] = OrderedDict()
        # parameters whose way to the loss is looked for, by id; cuts met that have some of them behind them, and which
        self.wanted: dict[int, weakref.ref[Any]] = {}
        self.severed: list[tuple[Cut, frozenset[int], tuple[Cut, ...]]] = []
        self.unused_results: Callable[[], list[Any]] = list  # what was computed and freed unread since it was called last
        self.saved_facts: Callable[[], list[SavedFact]] = list  # what graphs hold now, as far as the saved-tensor probe saw it saved
        self.data_writes = 0  # writes through `.data` so far
        self.broken: BrokenFact | None = None
        self.step = 0
        self.backward_count = 0
        self.grad_reads = 0  # how often the user's code read a `.grad`, in traced steps

    def resize(self, ops: int, writes: int) -> bool:
        """Changes how much is kept; returns whether anything changed."""
        if self.ops.maxlen == ops and self.writes.maxlen == writes:
            return False
        self.ops = deque(self.ops, maxlen=ops)
        self.writes = deque(self.writes, maxlen=writes)
        return True

    # -- calls and steps ----------------------------------------------------------------------------------------------

    def later(self, happened: BackwardFact | StepFact | Stretch) -> None:
        """Notes a backward call, a step or many of both; they are sorted in when somebody asks for them."""
        self._later.append(happened)
        self._waiting += 1 if isinstance(happened, (BackwardFact, StepFact)) else len(happened)
        while self._waiting > 2 * self.limits.calls + _MOST_AT_ONCE:
            oldest = self._later.popleft()
            self._waiting -= 1 if isinstance(oldest, (BackwardFact, StepFact)) else len(oldest)

    def _sort_in(self) -> None:
        self._waiting = 0
        while self._later:
            happened = self._later.popleft()
            for fact in (happened,) if isinstance(happened, (BackwardFact, StepFact)) else happened.facts():
                if isinstance(fact, BackwardFact):
                    self._backwards.append(fact)
                else:
                    self._steps.append(fact)

    @property
    def backwards(self) -> deque[BackwardFact]:
        """Backward calls, oldest first."""
        if self._later:
            self._sort_in()
        return self._backwards

    @property
    def steps(self) -> deque[StepFact]:
        """Optimizer steps, oldest first."""
        if self._later:
            self._sort_in()
        return self._steps

    # -- non-finite values --------------------------------------------------------------------------------------------

    def nonfinite_of(self, tensor: torch.Tensor) -> NonfiniteFact | None:
        """What is known of the non-finite values in a tensor's memory, if it is still the memory that they were made in."""
        fact = self.nonfinite.get(storage_key(tensor) or 0)
        return None if fact is None or (fact.memory is not None and fact.memory.expired()) else fact

    # -- cut paths ----------------------------------------------------------------------------------------------------

    def remember_cut(self, tensor: torch.Tensor, cut: Cut) -> None:
        """Notes where a tensor lost its path; weakly, so that the tensor dies as it would have."""
        try:
            ref = TensorRef(tensor)
        except TypeError:
            return
        cuts = self._cuts
        cuts[id(tensor)] = (ref, cut)
        if len(cuts) > self.limits.cuts:
            for _ in range(self.limits.cuts // 4):
                cuts.popitem(last=False)

    def cut_of(self, tensor: torch.Tensor) -> Cut | None:
        """Where this very tensor lost its path, if it did while traced."""
        entry = self._cuts.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def cuts(self) -> list[tuple[weakref.ref[torch.Tensor], Cut]]:
        """The tensors that lost their path while traced, and where; some of them may be gone."""
        return list(self._cuts.values())

    @property
    def has_cuts(self) -> bool:
        return bool(self._cuts)

    def remember_partial(self, seq: int, cuts: tuple[Cut, ...]) -> None:
        self.partial[seq] = cuts
        if len(self.partial) > self.limits.escapes:
            self.partial.popitem(last=False)

    def remember_guessed(self, seq: int, cuts: tuple[Cut, ...]) -> None:
        self.guessed[seq] = cuts
        if len(self.guessed) > 256:
            self.guessed.popitem(last=False)

    def remember_fed(self, seq: int, cuts: tuple[Cut, ...]) -> None:
        self.fed[seq] = cuts
        if len(self.fed) > self.limits.escapes:
            self.fed.popitem(last=False)

    def remember_toggle(self, tensor: torch.Tensor, value: bool, site: CallSite | None) -> None:
        """Notes who switched a leaf's requires_grad last."""
        known = self.toggles.get(id(tensor))
        times, again = (
            (1, 0) if known is None or known[0]() is not tensor else (known[3] + (known[1] != value), known[5] + (known[1] == value))
        )
        self.toggles[id(tensor)] = (TensorRef(tensor), value, site, times, self.tick(), again)
        self.toggles.move_to_end(id(tensor))
        if len(self.toggles) > self.limits.escapes:
            self.toggles.popitem(last=False)

    def toggle_of(self, tensor: torch.Tensor) -> tuple[bool, CallSite | None] | None:
        """The last recorded switch of this tensor's requires_grad, and where it was."""
        entry = self.toggles.get(id(tensor))
        return entry[1:3] if entry is not None and entry[0]() is tensor else None

    def times_toggled(self, tensor: torch.Tensor) -> int:
        """How often this tensor's requires_grad was seen to change."""
        entry = self.toggles.get(id(tensor))
        return entry[3] if entry is not None and entry[0]() is tensor else 0

    def toggled_at(self, tensor: torch.Tensor) -> int:
        """The clock when this tensor's requires_grad was last set, be it to what it was; 0 where that was not seen."""
        entry = self.toggles.get(id(tensor))
        return entry[4] if entry is not None and entry[0]() is tensor else 0

    def set_again(self, tensor: torch.Tensor) -> int:
        """How often this tensor's requires_grad was set to what it was."""
        entry = self.toggles.get(id(tensor))
        return entry[5] if entry is not None and entry[0]() is tensor else 0

    # -- look-ups, used by rules only ---------------------------------------------------------------------------------

    def op_at(self, seq: int) -> OpFact | None:
        """The operator call that made the node with this sequence number; None if it was not traced or is forgotten."""
        starts = [op[0] for op in self.ops]
        i = bisect_right(starts, seq) - 1
        # calls nest (an op inside a custom Function's forward): the innermost that covers the number starts last
        for j in range(i, max(-1, i - 64), -1):
            op = self.ops[j]
            if op[0] <= seq < op[1]:
                return OpFact(*op)
        return None

    def writes_to(self, storage: int, after_clock: int = 0) -> list[WriteFact]:
        """The recorded writes to a storage, oldest first, later than a clock reading."""
        return [write for write in self.writes if write.storage == storage and write.clock > after_clock]


class _Local(threading.local):
    journal: Journal | None = None


_local = _Local()


def current_journal() -> Journal:
    """This thread's journal, made on first use."""
    journal = _local.journal
    if journal is None:
        journal = _local.journal = Journal()
    return journal
