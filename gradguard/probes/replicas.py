"""The replicas of DistributedDataParallel: which there are, and whether the ranks still agree.

Ranks compare fingerprints through the store of the default process group, with calls that do not wait: a rank that is missing
is a key that is not there. No collective is added anywhere.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradguard.core.callsite import CallSite, user_frame
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import elements, item_of, named_modules, named_parameters, peek
from gradguard.instrumentation.fault_barrier import say
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.torch_compat.private_api import quiet

Divert = Callable[[Any, str, Callable[[Any], Any]], None]
_MARK = "gradguard"
_PRINTED = 1 << 20  # elements of a tensor that a fingerprint is made of: in float64, three times over, they are 24 MiB
_SAMPLED = 12  # parameters of one replica in a fingerprint
_EARLY = frozenset({2, 3, 4, 5, 8, 16, 32, 64})  # an optimizer's steps at which replicas are compared ...
_ALIKE = 3  # steps at which the ranks' batches are the same, and others at each
_PATIENCE = 64  # steps after which a fingerprint that has found no counterpart is forgotten


@dataclass
class Replica:
    """One DistributedDataParallel module, as it was when it was made.

    Attributes:
        site: the user's line that made it.
        names: its parameters, as the reducer counts them: dotted paths within the wrapped module.
        dtypes: their dtypes and devices.
        identities: their ids, to see which were replaced since.
        marked: whether their AccumulateGrad nodes were marked, which live as long as DDP's hooks on them.
        cast: the first cast or move after which such a mark was gone.
    """

    site: CallSite | None
    names: list[str] = field(default_factory=list)
    dtypes: list[tuple[torch.dtype, torch.device]] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)
    marked: bool = False
    cast: CallSite | None = None


known: weakref.WeakKeyDictionary[Any, Replica] = weakref.WeakKeyDictionary()


def install(divert: Divert) -> None:
    """Diverts the function, and looks for replicas that were made before."""
    divert(DistributedDataParallel, "__init__", _made)
    if dist.is_available() and dist.is_initialized():
        for item in gc.get_objects():
            if type(item) is DistributedDataParallel and item not in known:
                known[item] = describe(item, None)


def _made(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            caller = user_frame(sys._getframe(1))
            made = known[self] = describe(self, None if caller is None else CallSite(caller.f_code, caller.f_lasti))
            made.marked = _mark(self, made)
        except internal_error() as fault:
            say("the record of replicas", "one of them is not known", fault)

    return guarded


def _mark(ddp: Any, made: Replica) -> bool:
    if torch.is_inference_mode_enabled():
        return False
    for _, parameter in _hooked_once(ddp, made):
        metadata = _accumulator(parameter)
        metadata[_MARK] = True
    return True


def hooked(parameter: torch.Tensor) -> bool:
    """Whether a parameter's AccumulateGrad node is one that a replica was made with."""
    return _MARK in _accumulator(parameter)


def _accumulator(parameter: torch.Tensor) -> dict[str, Any]:
    """What is kept with the node that adds to the parameter's gradient: it outlives the Python object that is got here."""
    with quiet(), torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
        metadata: dict[str, Any] = node.next_functions[0][0].metadata
        return metadata


def _hooked_once(ddp: Any, made: Replica) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter) for name, parameter in parameters(ddp) if parameter.requires_grad and name in made.names]


def was_cast(site: CallSite | None) -> None:
    """A module was cast or moved: replicas that have lost hooks by it remember where."""
    for ddp, made in list(known.items()):
        if made.marked and made.cast is None and not all(hooked(parameter) for _, parameter in _hooked_once(ddp, made)):
            made.cast = site


def described(ddp: Any) -> Replica:
    """What is known of a replica, if need be as it is now."""
    return known.get(ddp) or describe(ddp, None)


def describe(ddp: Any, site: CallSite | None) -> Replica:
    """A replica as it is now."""
    found = Replica(site)
    for name, parameter in parameters(ddp):
        if parameter.requires_grad:
            found.names.append(name)
            found.dtypes.append((parameter.dtype, parameter.device))
            found.identities.append(id(parameter))
    return found


def parameters(ddp: Any) -> list[tuple[str, torch.Tensor]]:
    """Named parameters in the order in which the reducer counts them, shared ones once, ignored ones left out."""
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    ignored = getattr(ddp, "parameters_to_ignore", ())
    for path, module in named_modules(ddp.module):
        for name, parameter in named_parameters(module, recurse=False):
            full = f"{path}.{name}" if path else name
            if f"{path}.{name}" not in ignored and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((full, parameter))
    return found


# -- do the ranks agree? ----------------------------------------------------------------------------------------------


@dataclass
class Drift:
    """What two comparisons in a row have found to differ, or what will: gradients that were never averaged.

    Attributes:
        ddp: the replica.
        names: parameters that differ.
        gradients: whether the gradients differ at the optimizer's step, and not just the parameters.
        rank, other: the ranks compared; -1 for no other.
        steps: the optimizer's steps at which they differed.
        told: whether a rule has explained it.
        unhooked: whether parameters have lost DDP's hooks.
        past: lines that ran the wrapped module past DDP, as `gradguard.monitors.unaveraged_gradients.Watch` has them.
        rates: the learning rates of both ranks, where they differ.
    """

    ddp: Any
    names: list[str]
    gradients: bool
    rank: int
    other: int
    steps: tuple[int, ...]
    told: bool = False
    unhooked: bool = False
    past: dict[CallSite, bool] = field(default_factory=dict)
    rates: tuple[list[float], list[float]] | None = None

    @property
    def compared(self) -> bool:
        """Whether fingerprints of two ranks differ."""
        return self.other >= 0

    @property
    def evidence(self) -> str:
        """How it is known."""
        what = "gradients" if self.gradients else "parameters"
        if not self.compared:
            return f"at step {self.steps[0]} the ranks exchanged nothing between the start of `backward()` and the optimizer's step"
        names = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        between = f"compared at the optimizer's steps {self.steps[0]} and {self.steps[-1]}"
        return f"{between}: the {what} of ranks {self.rank} and {self.other} differ in {names}"


@dataclass
class Alike:
    """At several steps in a row all ranks have given their replicas the same new inputs, and got the same losses.

    Attributes:
        ddp: the replica.
        steps: the optimizer's.
        ranks: how many there are.
    """

    ddp: Any
    steps: tuple[int, ...]
    ranks: int


class Exchange:
    """Compares the replicas that one optimizer steps, at some of its steps.

    Args:
        ordinal: which optimizer this is, counted as they first step: the same on all ranks.
        optimizer: held weakly.
        every: steps between two comparisons, after the first ones.
        tolerance: of the mean magnitude; ranks that have had the same updates agree bit for bit on equal devices.
    """

    def __init__(self, ordinal: int, optimizer: Any, every: int, tolerance: float) -> None:
        self._every = every
        self._tolerance = tolerance
        self.prefix = f"gradguard/{ordinal}"
        self.optimizer = UncountedRef(optimizer)
        self.steps = 0
        self.pending: dict[int, tuple[list[Any], float]] = {}
        self.differed: list[int] = []
        self.alike: dict[int, Any] | None = {}  # inputs that were the same on all ranks, by step; None once they were not
        self.over = False
        self.ddp: weakref.ref[Any] | None = None

    def due(self) -> bool:
        """Counts a step; whether there is something to do at it."""
        self.steps += 1
        return not self.over and (bool(self.pending) or self.steps in _EARLY or not self.steps % self._every)

    def look(self, batch: Any = None) -> Drift | Alike | None:
        """Leaves this rank's fingerprint, and compares those left before as far as the others have left theirs.

        Args:
            batch: what the step's batch is told by; None where that is not known.
        """
        optimizer = self.optimizer()
        store, ddp = _store(), None if optimizer is None else self._replica(optimizer)
        if store is None or ddp is None:
            self.over = True
            return None
        own = dist.get_rank()
        peers = [rank for rank in dist.get_process_group_ranks(ddp.process_group) if rank != own]
        try:
            if self.steps in _EARLY or not self.steps % self._every:
                self._leave(store, own, ddp, [batch, _rates(optimizer)])
            return self._compare(store, own, peers, ddp)
        except internal_error():  # the rank that keeps the store has ended
            self.over = True
            return None

    def _replica(self, optimizer: Any) -> Any:
        ddp = None if self.ddp is None else self.ddp()
        if ddp is None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            ddp = next((d for d in list(known) if any(id(p) in stepped for _, p in parameters(d))), None)
            self.ddp = None if ddp is None else UncountedRef(ddp)
        # a communication hook may be meant to let ranks differ for a while, such as PostLocalSGD's
        return None if ddp is None or getattr(ddp, "_comm_hooks", None) else ddp

    def _leave(self, store: Any, own: int, ddp: Any, more: list[Any]) -> None:
        sample = _sample(ddp)
        left = [[_print(parameter.grad) for _, parameter in sample], [_print(parameter) for _, parameter in sample], *more]
        text = json.dumps(left)
        self.pending[self.steps] = (json.loads(text), self.steps)
        store.set(f"{self.prefix}/{self.steps}/{own}", text)

    def _compare(self, store: Any, own: int, peers: list[int], ddp: Any) -> Drift | Alike | None:
        for step, ((gradients, values, batch, rates), since) in list(self.pending.items()):
            keys = [f"{self.prefix}/{step}/{peer}" for peer in peers]
            if not keys or not store.check(keys):
                if self.steps - since > _PATIENCE:
                    del self.pending[step]
                continue
            del self.pending[step]
            left = [json.loads(store.get(key)) for key in keys]
            for peer, theirs in zip(peers, left, strict=True):
                in_gradients, in_values = _differing(gradients, theirs[0], self._tolerance), _differing(values, theirs[1], self._tolerance)
                if in_gradients or in_values:
                    self.differed.append(step)
                    if len(self.differed) < 2:
                        break
                    self.over = True
                    names = [name for name, _ in _sample(ddp)]
                    picked = [names[i] for i in (in_gradients or in_values) if i < len(names)]
                    unequal = (rates, theirs[3]) if rates != theirs[3] else None
                    return Drift(ddp, picked, bool(in_gradients), own, peer, tuple(self.differed), rates=unequal)
            else:
                self.differed.clear()
            if self._same(step, batch, [theirs[2] for theirs in left]):
                return Alike(ddp, tuple(self.alike or ()), 1 + len(peers))
        return None

    def _same(self, step: int, batch: Any, others: list[Any]) -> bool:
        """Whether at the third step in a row all ranks have had the same batch, another one at each step."""
        if self.alike is None:
            return False
        if batch is None or batch[0] in self.alike.values() or any(other != batch for other in others):
            self.alike = None
            return False
        self.alike[step] = batch[0]
        return len(self.alike) == _ALIKE


def _store() -> Any:
    """The default group's store; None where there is none to be had."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    try:
        return dist.distributed_c10d._get_default_store()
    except internal_error():
        return None


def _rates(optimizer: Any) -> list[float]:
    rates = (item_of(group, "lr") for group in elements(peek(optimizer, "param_groups")))
    return [float(rate) if type(rate) in (int, float) else 0.0 for rate in rates]


def inputs_told(inputs: Any) -> list[Any] | None:
    """Prints of the tensors that a replica is given; None where there are none."""
    found: list[Any] = []
    pending = [inputs]
    while pending and len(found) < _SAMPLED:
        value = pending.pop()
        if type(value) in (list, tuple):
            pending += value
        elif type(value) is dict:
            pending += value.values()
        elif type(value) is torch.Tensor and value.layout is torch.strided and not value.dtype.is_complex:
            found.append([list(value.shape), _print(value)])
    return found or None


def batch_told(inputs: list[Any], roots: Any) -> list[Any] | None:
    """With the loss; None where backward was called on something else."""
    loss = roots[0] if len(elements(roots)) == 1 else None
    return [inputs, _print(loss)] if type(loss) is torch.Tensor and loss.numel() == 1 else None


def _sample(ddp: Any) -> list[tuple[str, torch.Tensor]]:
    found = [(name, parameter) for name, parameter in parameters(ddp) if parameter.requires_grad]
    stride = max(1, -(-len(found) // _SAMPLED))
    return found[::stride]


def _print(tensor: torch.Tensor | None) -> list[float] | None:
    """Sums of some elements, spread evenly over the whole of a large tensor; None for what has none."""
    if tensor is None or tensor.is_sparse or tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return None
    values = tensor.detach().flatten()[:: -(-tensor.numel() // _PRINTED)].double()
    # weighed by position: a plain sum cannot tell two neurons that have changed places
    weights = torch.arange(1, values.numel() + 1, device=values.device, dtype=values.dtype) / values.numel()
    return [float((values * weights).sum()), float(values.abs().sum())]


def _differing(mine: list[Any], theirs: list[Any], tolerance: float) -> list[int]:
    found = []
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a is None or b is None or a[1] != a[1] or b[1] != b[1]:
            continue
        if max(abs(a[0] - b[0]), abs(a[1] - b[1])) > tolerance * max(a[1], b[1]):
            found.append(i)
    return found
