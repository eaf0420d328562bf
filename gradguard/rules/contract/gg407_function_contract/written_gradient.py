"""A custom backward that writes into the gradient it is given, while another branch gets the very same tensor. Part of GG407.

An addition, for one, hands its gradient on to both operands as it is, not as copies. What the backward of one writes, the other sees, if it
runs later; autograd's order is that of the sequence numbers, the newest first. No version check guards gradients.

Nothing is read from the source: in the first traced backward calls, nodes that hand a gradient on to one of the user's Functions and to
another node carry a hook, which compares the two, and the Function's node has hooks before and after it. The op probe sees the writes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradguard.analysis.graph.walk import is_accumulate, walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, user_functions, view_of
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.notes import Notes
from gradguard.fixes.edits import inserted
from gradguard.instrumentation.journal import Journal
from gradguard.torch_compat.private_api import node_sequence, quiet, storage_key, version_of

_MOST_LOOKS = 6  # the same Functions stand in the graph of every step
_MOST_NODES = 20_000


class _Incoming(NamedTuple):
    """A gradient that a custom backward is given: its memory, and the state of it before."""

    position: int
    memory: tuple[int, int]
    version: int | None
    clock: int


class _Written(NamedTuple):
    """A gradient that a custom backward has written into, before somebody else was given it."""

    cls: type
    seq: int  # of its node
    position: int  # among the gradients that it is given
    site: CallSite | None  # of the write, where the op probe saw it
    giver: int  # the node that gave it to both


class _Watch:
    """The hooks of one backward call. Holds no node and no tensor."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.shared: dict[tuple[int, tuple[int, int]], tuple[int, StorageWeakRef]] = {}  # by custom node and memory: who gave it
        self.spoilt: _Written | None = None
        self._handles: list[Any] = []

    def giver(self, node: Any, pairs: list[tuple[int, int, int]]) -> None:
        """Notes which gradients a node hands on twice.

        Args:
            pairs: the positions of two of its edges, and the number of the custom node at the first.
        """
        seq = node_sequence(node)

        def has_run(made: Any, grads: Any) -> None:
            for mine, other, custom in pairs:
                memory = _memory(made[mine])
                if memory is not None and memory == _memory(made[other]) and made[mine].shape == made[other].shape:
                    self.shared[custom, memory] = seq, StorageWeakRef(made[mine].untyped_storage())  # type: ignore[no-untyped-call]

        self._add(node.register_hook, has_run)

    def custom(self, node: Any) -> None:
        """Notes what the backward of a user's Function writes."""
        cls, seq, incoming = node._forward_cls, node_sequence(node), list[_Incoming]()

        def comes(grads: Any) -> None:
            for position, grad in enumerate(grads):
                memory = _memory(grad)
                if memory is not None and (seq, memory) in self.shared:
                    incoming.append(_Incoming(position, memory, version_of(grad), self.journal.tick()))

        def has_run(made: Any, grads: Any) -> None:
            for position, memory, version, clock in incoming:
                writes = self.journal.writes_to(memory[0], clock)
                if self.spoilt is None and (writes or (version is not None and version_of(grads[position]) != version)):
                    self.spoilt = _Written(cls, seq, position, writes[0].site if writes else None, self.shared[seq, memory][0])
            incoming.clear()

        self._add(node.register_prehook, comes)
        self._add(node.register_hook, has_run)

    def _add(self, register: Callable[[Any], Any], hook: Callable[..., None]) -> None:
        def guarded(*gradients: Any) -> None:
            try:
                with quiet():
                    hook(*gradients)
            except internal_error():
                return

        try:
            self._handles.append(register(guarded))
        except internal_error():  # a kind of node that takes no hooks
            return

    def remove(self) -> None:
        """Takes the hooks off: a retained graph must not keep them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.shared.clear()


def _memory(grad: Any) -> tuple[int, int] | None:
    """What tells a gradient's memory from another's: its storage and where in it the elements begin."""
    key = storage_key(grad) if isinstance(grad, torch.Tensor) else None
    return None if key is None else (key, int(grad.storage_offset()))


@dataclass
class _Looks:
    """How many graphs were looked at."""

    count: int = 0


def wanted(notes: Notes, moment: str, traced: bool) -> bool:
    """Whether to look: in the first traced steps, where the user has Functions of their own."""
    if moment == "after_backward":
        return _Watch in notes
    return moment == "before_backward" and traced and notes[_Looks].count < _MOST_LOOKS and next(user_functions(), None) is not None


def look(incident: Incident) -> Diagnosis | None:
    """Before a backward call, puts hooks on; after it, says what they have seen."""
    watch = incident.notes.pop(_Watch)
    if watch is not None:  # also one whose backward call raised
        watch.remove()
    if incident.moment == "after_backward":
        return _told(incident, watch.spoilt) if watch is not None and watch.spoilt is not None else None
    if incident.call is None or incident.call.nested:
        return None
    incident.notes[_Looks].count += 1
    consumers: dict[Any, list[int]] = {}
    nodes = []
    for node, out in walk(incident.root_nodes, limit=_MOST_NODES):
        nodes.append(node)
        for edge in out:
            consumers.setdefault(edge.source, []).append(node_sequence(node))
    found: dict[Any, list[tuple[int, int, int]]] = {}
    custom: dict[Any, None] = {}
    for node in nodes:
        edges = [source for source, _ in node.next_functions]
        for mine, source in enumerate(edges):
            if isinstance(getattr(source, "_forward_cls", None), type):
                for other, sharer in enumerate(edges):
                    if _comes_later(sharer, source, node, consumers):
                        found.setdefault(node, []).append((mine, other, node_sequence(source)))
                        custom[source] = None
    if found:
        watch = _Watch(incident.journal)
        incident.notes.put(watch)
        for node, pairs in found.items():
            watch.giver(node, pairs)
        for node in custom:
            watch.custom(node)
    return None


def _comes_later(sharer: Any, node: Any, giver: Any, consumers: dict[Any, list[int]]) -> bool:
    """Whether a node still has what the giver gave it when a custom node's backward runs: what came together with another gradient
    before is a sum, and a tensor of its own."""
    if sharer is None or sharer is node or is_accumulate(sharer) or not node_sequence(sharer) < node_sequence(node):
        return False
    others = list(consumers.get(sharer, ()))
    others.remove(node_sequence(giver))
    return not any(seq > node_sequence(node) for seq in others)


def _told(incident: Incident, written: _Written) -> Diagnosis:
    incident.notes[_Looks].count = _MOST_LOOKS
    view = view_of(written.cls)
    place = incident.place_of_node(written.giver)
    related: list[SourceSpan] = []
    if place is not None:
        related.append(place.span("one and the same gradient tensor goes from here to both operands", "made"))
    elif (used := incident.place_of_node(written.seq)) is not None:
        related.append(used.span(f"`{view.name}` is used here", "context"))
    names = [] if view.backward is None else view.backward.parameters()[1:]
    name = names[written.position] if written.position < len(names) else None
    first = None if name is None else _first_mention(view, name)
    patch = None
    if first is not None and view.backward is not None:
        patch = inserted(view.backward.source, first.lineno, f"{name} = {name}.clone()")
    where = f" of `{place.source.flat(place.node)}`" if place is not None and place.source is not None and place.node is not None else ""
    gradient = f"`{name}`" if name is not None else "the gradient it is given"
    spot = resolve(written.site)
    culprit = None if spot is None else _shown(spot, f"changes the gradient{f' {gradient}' if name else ''} in place")
    if culprit is None and (header := view.header("backward", "in here")) is not None:
        related.append(header)
    return Diagnosis(
        code="GG407",
        name="function-contract",
        headline=f"The `backward` of `{view.name}` writes into {gradient} in place, and the other operand{where} gets that same tensor",
        culprit=culprit,
        related=related,
        explanation="A backward does not own the gradient it is given: an addition hands the same tensor to both branches. The other "
        f"branch has run its backward later, and found what `{view.name}` left there: its gradient is wrong, without an error.",
        fixes=[
            Fix(title=f"work on a copy: `{name or 'grad'} = {name or 'grad'}.clone()` first", safety="safe", patch=patch),
            Fix(title="compute out of place (`masked_fill`, `torch.where`, `*`)", safety="safe"),
        ],
    )


def _shown(place: ResolvedSite, label: str) -> SourceSpan:
    """The write: a call as it is, else its statement."""
    return place.span(label, "culprit") if isinstance(place.node, ast.Call) else place.statement_span(label, "culprit")


def _first_mention(view: FunctionView, name: str) -> ast.stmt | None:
    function = None if view.backward is None else view.backward.function
    body = [] if function is None else function.body
    return next((each for each in body if any(node.id == name for node in inside(each, ast.Name))), None)
