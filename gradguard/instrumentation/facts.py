"""The facts of a journal: what is written down of an operator call, a write, a cut, a backward call, a step.

None of them holds a tensor, graph, frame or module alive: tensors appear as storage keys and sequence numbers, objects as weak
references, places as (code object, instruction offset).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple, Protocol

import torch

from gradguard.core.callsite import CallSite
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.torch_compat.private_api import node_sequence


class CallableRef:
    """A function or class of the user's that was called, by its name: it may capture a whole step, and is not kept alive."""

    __slots__ = ("__name__", "_ref")

    def __init__(self, called: Any) -> None:
        name = getattr(called, "__name__", None) if isinstance(called, (type, FunctionType, MethodType)) else None
        self.__name__ = name if isinstance(name, str) else ""
        try:
            self._ref: weakref.ref[Any] | None = UncountedRef(called)
        except TypeError:  # an object with slots
            self._ref = None

    def __call__(self) -> Any:
        """The function or class, or None where it is gone."""
        return None if self._ref is None else self._ref()


class OpFact(NamedTuple):
    """An operator call that made autograd nodes `seq_from` to `seq_to - 1`."""

    seq_from: int
    seq_to: int
    code: CodeType
    lasti: int
    func: Any  # a function of torch's, or a `CallableRef`
    clock: int

    @property
    def site(self) -> CallSite:
        return CallSite(self.code, self.lasti)


WriteVia = Literal["op", "data", "numpy", "step"]


class WriteFact(NamedTuple):
    """An in-place write, as an operator call that raised the version of a tensor (or wrote behind its counter)."""

    clock: int
    seq: int
    storage: int
    version: int  # after the write
    site: CallSite | None
    func: str
    via: WriteVia
    module: weakref.ref[Any] | None  # the nn.Module of torch's own that did it, such as nn.ReLU(inplace=True)
    grad_enabled: bool
    caller: CallSite | None  # the user frame one further out, when the write stands in a helper of the user's
    region: Region | None = None  # of a write through `.data`: the elements written, where they are known
    before: tuple[Region, int] | None = None  # of a write through `.data`: the written tensor's fingerprint before it
    memory: Any = None  # a weak reference to the storage: as long as it is there, no other storage gets the same key


class SelfWrite(NamedTuple):
    """An in-place call whose operand is another tensor on the very memory that it writes: `shadow.lerp_(p, 0.1)` where shadow is `p.data`.

    Attributes:
        target: the tensor that is written.
        previous: the function that wrote the memory before, in the steps that were traced.
    """

    target: weakref.ref[Any]
    storage: int
    site: CallSite | None
    func: str
    previous: str | None


class Region(NamedTuple):
    """Elements of a memory, as a strided tensor over it: counted in elements of one dtype."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """Those that a strided tensor has of its memory."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class BackwardFact(NamedTuple):
    """One call of backward() or autograd.grad()."""

    index: int  # type: ignore[assignment]  # counts backward calls of the thread; tuple.index is of no use here
    clock: int
    step: int
    site: CallSite | None
    kind: Literal["backward", "grad"]
    root_seqs: tuple[int, ...]
    seq: int  # this thread's next sequence number when the call began
    retain_graph: bool
    create_graph: bool
    traced: bool
    nested: bool  # called from within another backward
    stack: tuple[CallSite, ...] = ()  # the user's frames around the call, innermost (`site`) first: tells iterations and helpers apart
    roots: tuple[TensorRef, ...] = ()  # as far as they are tensors: sequence numbers are a thread's own, others have the same

    def live_roots(self) -> list[torch.Tensor]:
        """The tensors that the call began at, as far as they are alive and still what they were."""
        alive = [tensor for ref in self.roots if (tensor := ref()) is not None and tensor.grad_fn is not None]
        return [tensor for tensor in alive if node_sequence(tensor.grad_fn) in self.root_seqs]


class StepFact(NamedTuple):
    """One optimizer step."""

    clock: int
    seq: int
    step: int
    site: CallSite | None
    optimizer: weakref.ref[Any]
    type_name: str


class Stretch(Protocol):
    """Calls and steps that were only written down so far (`gradguard.runtime.fast_path`)."""

    def __len__(self) -> int: ...

    def facts(self) -> Iterator[BackwardFact | StepFact]:
        """In the order of what happened."""


class ModeFact(NamedTuple):
    """A switch of grad mode (or entering inference mode): `enabled` is the new state."""

    clock: int
    enabled: bool
    site: CallSite | None
    decorated: CodeType | None  # the function whose decorator switched it
    via: str  # "no_grad", "inference_mode", "set_grad_enabled", "enable_grad"


CutKind = Literal["no_grad", "inference", "detach", "data", "nondiff", "cast", "escape", "rewrap", "frozen", "sample"]


class Cut:
    """Where a value lost its path to the graph; what is made from it remembers it (`origins`)."""

    __slots__ = (
        "arguments",
        "around",
        "clock",
        "drawn",
        "flat",
        "func",
        "given",
        "guess",
        "into_graph",
        "into_leaf",
        "kind",
        "leaves",
        "mode",
        "of_loss",
        "origins",
        "outer",
        "output",
        "scored",
        "seq",
        "site",
        "sources",
        "valued",
    )

    def __init__(
        self,
        kind: CutKind,
        clock: int,
        site: CallSite | None,
        func: str,
        seq: int,
        sources: tuple[int, ...] = (),
        mode: ModeFact | None = None,
        origins: tuple[Cut, ...] = (),
        outer: CallSite | None = None,
        leaves: tuple[weakref.ref[torch.Tensor], ...] = (),
        around: tuple[CallSite, ...] = (),
        guess: bool = False,
    ) -> None:
        self.kind = kind
        self.clock = clock
        self.site = site
        self.func = func
        self.seq = seq
        self.of_loss = (
            False  # what was cut off is a single number that a loss function of torch's went into (looked at where it is asked for)
        )
        self.drawn = False  # a random sample of torch.distributions that has no path it could have had: on purpose, always
        self.sources = sources  # sequence numbers of the graph nodes whose outputs were cut off
        self.mode = mode
        self.origins = origins  # empty for an origin itself
        self.outer = outer  # the next user frame out
        self.leaves = leaves  # the leaves among what was cut off
        self.around = around  # for inference mode, which no probe sees being entered: the user frames further out
        self.guess = guess  # the origins are only what left shortly before (numpy arrays carry no memory): to be verified
        self.output = 0  # which of several results
        self.into_graph = False  # written, with grad mode off, into a tensor that has a graph of its own, or into a leaf
        self.into_leaf = False
        self.flat = False  # a new tensor made of a list of single numbers, each of which had a graph
        self.scored = False  # of a random sample: its probability was taken, as score-function estimators do
        # of a value made of a random sample: it is what a network gives of it, shifted and scaled at most; of the sample itself: the
        # sequence numbers of the sums that such a value went into
        self.given = False
        self.valued: tuple[int, ...] = ()

    def roots(self) -> tuple[Cut, ...]:
        return self.origins or (self,)


class EscapeFact(NamedTuple):
    """A value that left for Python or numpy: what came back later may have been made from it."""

    clock: int
    kind: str  # item, tolist, numpy, float ...
    site: CallSite | None
    value: Any  # a Python number (never a tensor or an array), or None
    cut: Cut | None  # where the value had lost its path, None if it had none to lose
    storage: int | None  # for numpy: the memory shared with the array
    frame: int  # id of the user's frame, to relate places of one call
    step: int = 0
    array: weakref.ref[Any] | None = None  # for numpy: while it lives, `storage` is this memory and no later tensor's


class Spread(NamedTuple):
    """A loss, difference or product of an [n, 1] and an [n] tensor: broadcasting makes it [n, n]."""

    seq: int  # the node's
    step: int
    size: int  # n
    column: int  # which operand is the column, as written: 0 is the left one
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # of both operands, as written
    made: str  # "difference", "product" or the loss function's name
    direct: bool = True  # whether the user's line calls the function itself, or a module of torch's that does


Domain = Literal[
    "probabilities", "log-probabilities", "logits", "rates", "log-rates", "numbers outside [0, 1]", "numbers below 0"
]  # kinds of numbers that losses tell apart


class DomainFact(NamedTuple):
    """A loss function was given another kind of numbers than it expects."""

    seq_from: int  # the nodes that the call made
    seq_to: int
    step: int
    name: str  # of the function
    argument: Literal["input", "target"]
    found: Domain
    expected: Domain
    way: tuple[int, ...]  # the graph nodes that the argument was made by, newest first
    maker: int | None  # the one among them that gave it its kind
    plain: bool  # whether the others only reshape it


@dataclass(slots=True)
class Prints:
    """Content fingerprint of a saved tensor."""

    storage: int
    seq_from: int
    seq_to: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int
    mark: int
    clock: int
    sampled: bool = False  # of a large tensor only some pieces were read


class Saver(NamedTuple):
    """The call that made a graph node which saved something."""

    seq: int  # the node's; -1 of what is no node of this thread
    code: CodeType | None  # the user's innermost frame: its code and the instruction in it
    lasti: int
    module: weakref.ref[Any] | None  # the innermost nn.Module that was being called
    step: int
    training: bool  # whether that module was in training mode

    @property
    def site(self) -> CallSite | None:
        return None if self.code is None else CallSite(self.code, self.lasti)


class SavedFact:
    """A tensor that a graph node has saved for backward."""

    __slots__ = (
        "born",
        "device",
        "died",
        "dtype",
        "evaluations",
        "leaf",
        "made",
        "nbytes",
        "packed",
        "saver",
        "shape",
        "storage",
        "used",
        "version",
    )

    def __init__(
        self,
        saver: Saver,
        storage: int,
        nbytes: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        version: int,
        made: int,
        leaf: bool,
        born: int,
    ) -> None:
        self.saver = saver
        self.storage = storage
        self.nbytes = nbytes  # of the whole storage
        self.dtype = dtype
        self.shape = shape
        self.device = device
        self.version = version
        self.made = made  # the number of the node that had made it; -1 of what has none
        self.leaf = leaf  # a parameter, say, which is held without any graph
        self.born = born  # clock readings
        self.died = 0  # 0 as long as the graph holds it
        self.packed: weakref.ref[Any] | None = None  # what the graph holds in its place
        self.used = False  # whether backward has asked for it
        self.evaluations: Any = None  # the account of evaluations that it counts in


class NonfiniteFact(NamedTuple):
    """A torch call that made a non-finite value of finite operands (level forensic)."""

    clock: int
    step: int
    site: CallSite | None
    func: str
    nan: int  # elements
    inf: int
    total: int
    memory: Any = None  # a weak reference to the storage, which is asked whether its memory is another tensor's by now


class BrokenFact(NamedTuple):
    """The first node of a backward call that made non-finite gradients of finite ones (level forensic)."""

    call: int  # the backward call's index
    seq: int  # the node's
    name: str
    bad: int  # elements
    total: int
