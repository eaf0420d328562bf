"""Makes an account of memory from the live graph and the live objects, at any moment; nothing is unpacked, run or kept alive."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import nn

from gradguard.analysis.graph.walk import is_accumulate, op_name, root_nodes, walk
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.core.account import Account, Held, Kind, Saved
from gradguard.core.callsite import CallSite
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import attributes, is_quiet, named_modules, pairs, store_of
from gradguard.instrumentation.facts import SavedFact, Saver, StepFact
from gradguard.instrumentation.journal import Journal
from gradguard.torch_compat.private_api import (
    grad_fn_of,
    has_memory,
    is_a,
    kept_by_hook,
    memory_of,
    node_sequence,
    quiet,
    saved_data,
    saved_slots,
    unpacking_hook,
)

_DEEPEST = 4  # an optimizer's state: dictionaries and lists in each other
_NEAR = 3  # nodes between an operation and its parameter: `F.linear` transposes its weight


def account(
    roots: Iterable[Any],
    modules: Iterable[tuple[str | None, nn.Module]] = (),
    optimizers: Iterable[Any] = (),
    journal: Journal | None = None,
    facts: Sequence[SavedFact] | None = None,
) -> Account:
    """What memory is held, every storage counted once.

    Args:
        roots: tensors, or graph nodes, under which graphs are read.
        modules: root modules with the variable that holds each, as `Names.modules` has them.
        optimizers: whose state counts, and whose parameters that are in no module.
        journal: tells where the nodes were made and which of them are of older steps, and what the saved-tensor probe knows.
        facts: of that probe, where they are not those of this moment.
    """
    with quiet():
        journal = Journal() if journal is None else journal
        found = _Accounting(journal, journal.saved_facts() if facts is None else facts)
        found.modules(list(modules))
        found.optimizers(list(optimizers))
        found.graphs(roots)
        found.elsewhere()
        return found.account()


class _Accounting:
    def __init__(self, journal: Journal, facts: Sequence[SavedFact]) -> None:
        self._facts = facts
        self._savers = {fact.saver.seq: fact.saver for fact in facts}
        self._nodes = Nodes(journal)
        self._begin = step_began(journal)
        self._modules: dict[int, str] = {}  # the path of a module, by its id
        self._rows: dict[int, Held] = {}
        self._owners: dict[int, str] = {}  # path of the module that has a parameter, by the parameter's id
        self._paths: dict[int, str] = {}  # of parameters, by id
        self._hidden = 0

    def account(self) -> Account:
        return Account(tuple(sorted(self._rows.values(), key=lambda row: -row.nbytes)), self._hidden)

    def _add(self, kind: Kind, tensor: Any, name: str | None = None, saved: Saved | None = None) -> None:
        if not is_a(tensor, torch.Tensor) or not has_memory(tensor):
            return
        for storage, nbytes in memory_of(tensor):
            known = self._rows.get(storage)
            if known is None:
                shape = tuple(tensor.shape) if not tensor.is_nested else ()
                self._rows[storage] = Held(kind, storage, nbytes, tensor.dtype, shape, str(tensor.device), name, saved)
            elif saved is not None:
                before = known.saved
                # nodes come newest first: the last that is met has saved it first, and the first says which step's graph holds it
                self._rows[storage] = replace(known, saved=saved if before is None else before.and_older(saved))

    # -- what the program holds ---------------------------------------------------------------------------------------

    def modules(self, roots: Sequence[tuple[str | None, nn.Module]]) -> None:
        gradients: list[tuple[Any, str]] = []
        buffers: list[tuple[Any, str]] = []
        for variable, root in roots:
            for path, module in named_modules(root):
                owner = ".".join(part for part in (variable, path) if part)
                self._modules.setdefault(id(module), owner or type(module).__name__)
                for name, tensor in store_of(module, "_parameters").items():
                    full = f"{owner}.{name}" if owner else name
                    self._owners.setdefault(id(tensor), owner or type(module).__name__)
                    self._paths.setdefault(id(tensor), full)
                    self._add("parameters", tensor, full)
                    gradients.append((tensor, full))
                buffers += [(tensor, f"{owner}.{name}" if owner else name) for name, tensor in store_of(module, "_buffers").items()]
        for tensor, name in buffers:
            self._add("buffers", tensor, name)
        for tensor, name in gradients:
            self._add("gradients", _gradient(tensor), name)

    def optimizers(self, optimizers: Sequence[Any]) -> None:
        states: list[tuple[Any, str | None]] = []
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                name = self._paths.get(id(parameter))
                self._add("parameters", parameter, name)
                self._add("gradients", _gradient(parameter), name)
            state = attributes(optimizer).get("state")
            for parameter, held in pairs(state):
                states += [(tensor, self._paths.get(id(parameter))) for tensor in _tensors(held)]
        for tensor, name in states:
            self._add("optimizer state", tensor, name)

    # -- what graphs hold ---------------------------------------------------------------------------------------------

    def graphs(self, roots: Iterable[Any]) -> None:
        given = list(roots)
        nodes = root_nodes(given) + [each for each in given if isinstance(each, torch.autograd.graph.Node)]
        found = list(walk(nodes))
        takers = Counter((edge.source, edge.output) for _, edges in found for edge in edges)
        for node, edges in found:
            tensors: list[tuple[torch.Tensor, bool]] = []
            for name, slot in saved_slots(node):
                value = saved_data(slot)
                kept = [value] if value is not None else kept_by_hook(slot)
                self._hidden += not kept and unpacking_hook(slot) is not None
                tensors += [(each, name.startswith("result")) for each in kept]
            if not tensors:
                continue
            seq, saver = node_sequence(node), self._savers.get(node_sequence(node))
            site = self._nodes.site(seq) if saver is None or saver.site is None else saver.site
            module = self._called(saver) or self._owner(node)
            alone = {node_sequence(edge.source) for edge in edges if takers[edge.source, edge.output] == 1}
            for tensor, is_result in tensors:
                maker = grad_fn_of(tensor)
                made = seq if is_result else -1 if maker is None else node_sequence(maker)
                step = None if saver is None else saver.step
                saved = Saved(seq, op_name(node), site, module, 1, (module,), made, made in alone and made != seq, step)
                self._add(self._kind(seq), tensor, saved=saved)

    def elsewhere(self) -> None:
        """What the saved-tensor probe knows of other graphs than those that were read."""
        for fact in sorted(self._facts, key=lambda fact: -fact.born):
            if fact.storage in self._rows or fact.leaf:
                continue
            saver = fact.saver
            module = self._called(saver)
            saved = Saved(saver.seq, self._nodes.op(saver.seq), saver.site, module, 1, (module,), fact.made, False, saver.step)
            device = str(fact.device)
            row = Held(self._kind(saver.seq), fact.storage, fact.nbytes, fact.dtype, fact.shape, device, None, saved)
            self._rows[fact.storage] = row

    def _kind(self, seq: int) -> Kind:
        return "older graphs" if 0 <= seq < self._begin else "saved"

    def _called(self, saver: Saver | None) -> str | None:
        """The module that was being called."""
        module = None if saver is None or saver.module is None else saver.module()
        return None if module is None else self._modules.get(id(module), type(module).__name__)

    def _owner(self, node: Any) -> str | None:
        """The module whose parameter an operation takes, directly or through views of it."""
        for source, _ in node.next_functions:
            for _ in range(_NEAR):
                if source is None:
                    break
                if is_accumulate(source):
                    owner = self._owners.get(id(source.variable))
                    if owner is not None:
                        return owner
                    break
                following = source.next_functions
                source = following[0][0] if len(following) == 1 else None
        return None


class Nodes:
    """Where nodes were made: `Journal.op_at` for many of them.

    Args:
        journal: as it is now.
    """

    def __init__(self, journal: Journal) -> None:
        self._ops = list(journal.ops)
        self._starts = [op[0] for op in self._ops]

    def site(self, seq: int) -> CallSite | None:
        """The user's call."""
        op = self._op(seq)
        return None if op is None else CallSite(op[2], op[3])

    def op(self, seq: int) -> str:
        """The function that was called; empty where that is not known."""
        op = self._op(seq)
        return "" if op is None else str(getattr(op[4], "__name__", "")).rstrip("_")

    def _op(self, seq: int) -> tuple[int, int, CodeType, int, Any, int] | None:
        last = bisect_right(self._starts, seq) - 1
        for i in range(last, max(-1, last - 64), -1):
            op = self._ops[i]
            if op[0] <= seq < op[1]:
                return op
        return None


def step_began(journal: Journal) -> int:
    """The sequence number before which every node is of an older step; 0 where that is not known.

    Where several optimizers take turns (a GAN's), what was made since the last step of each that still steps is of this one.
    """
    steps = list(journal.steps)
    if not steps:
        return 0
    last = steps[-1].optimizer()
    before = next((i for i in range(len(steps) - 2, -1, -1) if last is not None and steps[i].optimizer() is last), None)
    if before is None:
        return 0
    newest: dict[int, StepFact] = {id(step.optimizer()): step for step in steps[before:]}
    return min(step.seq for step in newest.values())


def _gradient(parameter: Any) -> Any:
    try:
        return parameter.grad if is_a(parameter, torch.Tensor) and parameter.is_leaf else None
    except internal_error():
        return None


def _tensors(held: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors in the state of a parameter, which may be in lists and dictionaries (L-BFGS, Shampoo)."""
    if not is_quiet(held):
        return
    if is_a(held, torch.Tensor):
        yield held
    elif depth < _DEEPEST and type(held) in (list, tuple, dict):
        for each in held.values() if type(held) is dict else held:
            yield from _tensors(each, depth + 1)
