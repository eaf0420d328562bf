"""The part of a live autograd graph between the loss and the culprit, as plain facts for a picture and a table.

Asked when a diagnosis is made, and only where an HTML report is wanted. What is marked are nodes that the failure itself points at (a
saved value with another version than it was saved at, a freed node, a recorded cut), and nodes made at the lines that the diagnosis names.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from gradguard.analysis.graph.consumed import consumed
from gradguard.analysis.graph.earlier_steps import Lines, lines_of
from gradguard.analysis.graph.folding import Label, fold
from gradguard.analysis.graph.module_paths import RESHAPED, ModulePaths, leaf_behind
from gradguard.analysis.graph.walk import DEEPEST, is_accumulate, op_name, walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.alive_tensors import Alive
from gradguard.analysis.places.source import ResolvedSite, at_line, resolve
from gradguard.analysis.run_facts.footprint import Footprint
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, SourceSpan
from gradguard.core.evidence import GraphEdge, GraphNode, GraphPart, Mark
from gradguard.instrumentation.facts import Cut, OpFact
from gradguard.torch_compat.private_api import (
    grad_fn_of,
    node_sequence,
    output_dtype,
    output_metadata,
    saved_data,
    saved_slots,
    storage_key,
    version_of,
)

_DRAWN, _LISTED = 22, 120  # nodes of the picture, rows of the table
_MOST_MARKED = 4  # nodes of one line: a loop makes many
_CUTS = {
    "no_grad": "made while gradients were off",
    "inference": "made in inference mode",
    "detach": "cut off here",
    "data": "read through .data",
    "nondiff": "has no derivative",
    "cast": "made a type without gradients",
    "escape": "left for Python or NumPy",
    "rewrap": "made anew from plain values",
    "frozen": "its inputs do not require grad",
    "sample": "a random sample has no path",
}


@dataclass
class _Marks:
    """What is marked: nodes, and tensors that have no node of their own."""

    of: dict[Any, tuple[Mark, str]] = field(default_factory=dict)
    pins: list[Any] = field(default_factory=list)
    grey: set[Any] = field(default_factory=set)  # freed or detached
    broken: set[tuple[Any, Any]] = field(default_factory=set)
    extra: list[tuple[GraphNode, list[Any], list[Any]]] = field(default_factory=list)  # a tensor, nodes that use it, nodes it was made by

    def add(self, node: Any, mark: Mark, note: str = "") -> None:
        if node not in self.of or mark in ("written", "freed"):
            self.of[node] = (mark, note)
            self.pins.append(node)


class LiveGraph:
    """The graph under an incident's roots.

    Args:
        roots: the tensors backward was called on, or the last ones that it was.
        footprints: of traced graphs, which tell the lines of an untraced one like them.
    """

    def __init__(
        self, incident: Incident, diagnosis: Diagnosis, roots: Sequence[torch.Tensor], footprints: Sequence[Footprint] = ()
    ) -> None:
        self._footprints = footprints
        self.incident = incident
        self.diagnosis = diagnosis
        self.roots = list(roots)
        self._marks = _Marks()
        tops = list(dict.fromkeys(node for root in roots if (node := grad_fn_of(root)) is not None))
        self._tops = tuple(tops)
        self._mark_saved()
        self._mark_freed(tops)
        self.leaves: set[int] = set()  # ids of the leaves that backward reaches
        self.whole = True  # whether all of the graph was walked
        self.nodes = self._forward_order(tops)
        behind = [node for node in self._mark_cuts() if node not in tops]
        if behind:
            self.nodes = self._forward_order([*tops, *behind])
            for name in ("lines", "sites", "_results"):
                self.__dict__.pop(name, None)
        self._mark_inputs()
        self._mark_lines()
        for node in self._tops:
            self._marks.of.setdefault(node, ("root", "backward() begins here"))

    # -- what is known of nodes -----------------------------------------------------------------------------------------

    @cached_property
    def lines(self) -> Lines:
        """The calls that made the nodes, of this step or an earlier one like it."""
        return lines_of(self.nodes, self.incident.journal, self._footprints)

    @cached_property
    def _results(self) -> dict[OpFact, Any]:
        """By call, the last node that it made."""
        return {fact: node for node, fact in self.lines.calls.items()}

    @cached_property
    def sites(self) -> dict[Any, CallSite]:
        """The lines that made the nodes, as far as they are known."""
        return {node: fact.site for node, fact in self.lines.calls.items()}

    @cached_property
    def _named(self) -> dict[Any, tuple[str, torch.Tensor]]:
        found: dict[Any, tuple[str, torch.Tensor]] = {}
        for name, tensor in self.incident.names.tensor_bindings():
            node = grad_fn_of(tensor)
            if node is not None:
                found.setdefault(node, (name, tensor))
        return found

    @cached_property
    def _modules(self) -> tuple[dict[Any, tuple[str, ...]], dict[Any, tuple[str, ...]]]:
        return ModulePaths(self.incident.names).of(self.nodes, self.sites)

    def _facts(self, node: Any) -> GraphNode:
        mark, note = self._marks.of.get(node, ("", ""))
        grey: Mark = "freed" if self.diagnosis.code.startswith("GG2") else "detached"
        name, tensor = self._named.get(node, (None, None))
        dtype = output_dtype(node)
        operands = [leaf for source, _ in node.next_functions if (leaf := leaf_behind(source)) is not None]
        return GraphNode(
            op_name(node).removeprefix("native_"),
            name=name,
            module=".".join(self._modules[0].get(node, ())) or None,
            shape=output_metadata(node) if tensor is None else tuple(tensor.shape),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            version=None if tensor is None else version_of(tensor),
            requires_grad=True,
            **_at(resolve(self.sites.get(node))),
            leaves=tuple(self.incident.names.leaf(leaf) or "a leaf" for leaf in operands),
            mark=mark or (grey if node in self._marks.grey else ""),
            note=note,
        )

    # -- what is marked -------------------------------------------------------------------------------------------------

    def _mark_saved(self) -> None:
        """Saved values with another version than they were saved at; only where a rule has looked for them."""
        found = self.incident.__dict__.get("mismatches", []) if self.diagnosis.code.startswith("GG1") else []
        for item in found[:64]:
            self._marks.of[item.node] = ("written", f"saved version {item.expected}, found {item.found}")
        for item in found[:1]:  # the one that backward failed at
            self._marks.pins.append(item.node)
            if item.tensor is None:
                continue
            tensor = item.tensor
            write = next((span for span in _spans(self.diagnosis) if span.role == "changed"), None)
            if write is None and self.diagnosis.code in ("GG101", "GG102"):
                write = self.diagnosis.culprit
            names = self.incident.names
            versions = (item.expected, item.found)
            told = next((each.name for each in self.diagnosis.tensors if (each.version_saved, each.version_found) == versions), None)
            maker = grad_fn_of(tensor)
            self._marks.extra.append((
                GraphNode(
                    "the saved tensor",
                    name=told if told is not None else names.tensor(tensor) or next(iter(names.of_storage(item.storage)), None),
                    shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), version=item.found,
                    requires_grad=tensor.requires_grad, mark="written",
                    note=f"version {item.expected} → {item.found}" + (", written here" if write else ""), **_at(write),
                ),
                [item.node],
                [] if maker is None or maker is item.node else [maker],
            ))  # fmt: skip

    def _mark_freed(self, tops: list[Any]) -> None:
        """The part that an earlier backward call has used up, and the edges into it."""
        if not self.diagnosis.code.startswith("GG2"):
            return
        state = consumed(tops, self.incident.journal, self.incident.call)
        self._marks.grey = state.used
        for link in state.links[:3]:
            self._marks.add(link.source, "freed", "used up by an earlier backward()")
            if link.user is not None:
                self._marks.broken.add((link.user, link.source))
        if not state.links:
            for node in state.freed[:1]:
                self._marks.add(node, "freed", "its saved values are gone")

    def _mark_cuts(self) -> list[Any]:
        """Where values lost their path; returns the nodes that are behind, as far as they are alive."""
        journal, found = self.incident.journal, list[tuple[Cut, list[Any]]]()
        losses = [root for root in self.roots if grad_fn_of(root) is None]
        lines = {(span.file, span.line) for span in _spans(self.diagnosis)}
        for root in losses:
            cut = journal.cut_of(root)
            found += [(each, []) for each in (() if cut is None else cut.roots())]
        if not losses and self.diagnosis.code.startswith(("GG3", "GG6")):
            fed = {**journal.guessed, **journal.fed, **journal.partial}
            for fact, node in self._results.items() if fed else ():
                for cut in (each for number in range(fact.seq_from, fact.seq_to) for each in fed.get(number, ())):
                    found += [(each, [node]) for each in cut.roots() if each.site and (each.site.code.co_filename, each.site.line) in lines]
        behind: list[Any] = []
        alive = Alive()
        drawn: dict[Cut, int] = {}
        for cut, users in found:
            if cut in drawn:
                self._marks.extra[drawn[cut]][1].extend(users)
                continue
            if len(drawn) >= 3:
                continue
            gone = next((op for seq in cut.sources if (op := journal.op_at(seq)) is not None), None)
            made = list(dict.fromkeys(grad_fn_of(tensor) for tensor in alive.made_at(cut.sources))) if cut.sources else []
            behind += made
            drawn[cut] = len(self._marks.extra)
            self._marks.extra.append((
                GraphNode(
                    cut.func or cut.kind, requires_grad=False, mark="cut", note=_CUTS[cut.kind], **_at(resolve(cut.site))
                ),
                list(users), made if made or gone is None else [_gone(gone)],
            ))  # fmt: skip
        for root in losses[:2]:
            names = self.incident.names
            self._marks.extra.append((
                GraphNode(
                    "the loss", name=names.tensor(root), shape=tuple(root.shape), dtype=str(root.dtype).removeprefix("torch."),
                    version=version_of(root), requires_grad=root.requires_grad, mark="root", note="has no graph: backward() can go nowhere",
                ),
                [], list(drawn.values()),
            ))  # fmt: skip
        if behind:
            reached = {node for node, _ in walk(self._tops, DEEPEST)}
            self._marks.grey = {node for node, _ in walk(behind, DEEPEST)} - reached
        return behind

    def _mark_lines(self) -> None:
        """The newest nodes made at the lines that the diagnosis names. Where the failure itself points at nodes, the culprit's line is
        enough: another turn of a loop has passed the other lines as well, and what is said of them is not true of its nodes."""
        pointed_at = bool(self._marks.pins)
        for i, span in enumerate(_spans(self.diagnosis)):
            is_culprit = i == 0 and span is self.diagnosis.culprit
            if pointed_at and not is_culprit:
                continue
            fits = {site: _fit(span, site) for site in set(self.sites.values())}
            at = [(node, fit) for fact, node in self._results.items() if (fit := fits[fact.site])]
            if not self.sites:
                at = [(node, 1) for node in self._named_at(span)]
            best = max((fit for _, fit in at), default=0)
            chosen = [node for node, fit in at if fit == best]
            note = (span.label or "") if len(chosen) == 1 else ""
            for node in chosen[-_MOST_MARKED:]:
                if node not in self._marks.of:
                    self._marks.add(node, "culprit" if is_culprit else "named", note)

    def _named_at(self, span: SourceSpan) -> list[Any]:
        """The node whose result is in a variable that the line assigns, and whose operation is written there: of an untraced step."""
        place = at_line(span.file, span.line)
        text = span.text or ""
        found = [node for node, (name, _) in self._named.items() if place is not None and name in place.targets and op_name(node) in text]
        return found if len(found) == 1 else []

    def _mark_inputs(self) -> None:
        """Named tensors without a graph that the first operations saved: the data."""
        names, known = self.incident.names, set[int]()
        for node in self.nodes[:8]:
            for _, slot in saved_slots(node):
                tensor = saved_data(slot)
                if (
                    tensor is None
                    or tensor.requires_grad
                    or (key := storage_key(tensor)) is None
                    or key in known
                    or names.state(storage=key)
                ):
                    continue
                known.add(key)
                name = next(iter(names.of_storage(key)), None)
                if name is not None:
                    facts = GraphNode(
                        "an input", name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
                        version=version_of(tensor), requires_grad=False,
                    )  # fmt: skip
                    self._marks.extra.append((facts, [node], []))

    # -- the part that is shown -----------------------------------------------------------------------------------------

    def parts(self) -> tuple[GraphPart, GraphPart]:
        """For the picture and, folded less, for the table."""
        members = set(self.nodes)
        pinned = {node for node in self._marks.pins if node in members}
        chosen = self.nodes
        if len(chosen) > _DRAWN:
            near = self._related(pinned)
            chosen = [node for node in self.nodes if node in near]
        left_out = len(self.nodes) - len(chosen)
        reshaped = {node for node in chosen if type(node).__name__ in RESHAPED and leaf_behind(node) is not None}
        chosen = [node for node in chosen if node not in reshaped or node in pinned]
        groups = self._modules[1]
        labels: list[Label] = [(*groups[node], ("line", site) if (site := self.sites.get(node)) else None) for node in chosen]
        pins = [i for i, node in enumerate(chosen) if node in pinned]
        roots = [i for i, node in enumerate(chosen) if node in self._tops]
        return tuple(self._part(chosen, fold(labels, pins, room, roots), left_out) for room in (_DRAWN, _LISTED))  # type: ignore[return-value]

    def _forward_order(self, tops: list[Any]) -> list[Any]:
        """Every node reachable from the tops but leaves', each after those that it was made from: of several, the older first."""
        users: Counter[Any] = Counter()
        reached: list[Any] = []
        for node, edges in walk(tops, DEEPEST):
            if is_accumulate(node):
                self.leaves.add(id(getattr(node, "variable", None)))
                continue
            reached.append(node)
            users.update(edge.source for edge in edges)
        self.whole = len(users) + len(tops) < DEEPEST
        ready = [(-node_sequence(node), i, node) for i, node in enumerate(reached) if not users[node]]
        heapq.heapify(ready)
        found: list[Any] = []
        members = set(reached)
        number = len(reached)
        while ready:
            node = heapq.heappop(ready)[2]
            found.append(node)
            for source, _ in node.next_functions:
                if source in members:
                    users[source] -= 1
                    if not users[source]:
                        number += 1
                        heapq.heappush(ready, (-node_sequence(source), number, source))
        return found[::-1]

    def _related(self, pins: set[Any]) -> set[Any]:
        """The nodes from which a pin is reached, the pins, and what they were made from; all where there is no pin."""
        if not pins:
            return set(self.nodes)
        above = set(pins)
        for node in self.nodes:
            if any(source in above for source, _ in node.next_functions):
                above.add(node)
        return above.union(node for node, _ in walk(pins, DEEPEST))

    def _part(self, chosen: list[Any], stretches: list[range], left_out: int) -> GraphPart:
        nodes: list[GraphNode] = []
        index: dict[Any, int] = {}
        for stretch in stretches:
            members = [chosen[i] for i in stretch]
            index.update(dict.fromkeys(members, len(nodes)))
            nodes.append(self._facts(members[0]) if len(members) == 1 else self._folded(members))
        edges: dict[tuple[int, int], GraphEdge] = {}
        for node in chosen:
            for source, _ in node.next_functions:
                if source in index and index[source] != index[node]:
                    key = (index[node], index[source])
                    known = edges.get(key)
                    broken = (node, source) in self._marks.broken
                    edges[key] = GraphEdge(*key, broken=broken or (known is not None and known.broken))
        added: list[int] = []
        for extra, users, sources in self._marks.extra:
            at = len(nodes)
            added.append(at)
            behind: list[GraphNode] = []
            for user in users:
                if user in index:
                    edges[index[user], at] = GraphEdge(index[user], at, broken=bool(extra.mark))
            for source in sources:
                if isinstance(source, GraphNode):
                    edges[at, len(nodes) + 1] = GraphEdge(at, len(nodes) + 1, broken=True)
                    behind.append(source)
                elif isinstance(source, int):  # the loss, whose way ends at a cut
                    edges[at, added[source]] = GraphEdge(at, added[source], broken=True)
                elif source in index and (not users or extra.mark != "written" or index[source] not in [index.get(user) for user in users]):
                    edges[at, index[source]] = GraphEdge(at, index[source], broken=extra.mark == "cut")
            nodes += [extra, *behind]
        return replace(_in_order(nodes, list(edges.values()), len(self.nodes), left_out), whole=self.whole)

    def _folded(self, members: list[Any]) -> GraphNode:
        groups = {self._modules[1][node] for node in members}
        module = _shared(sorted(groups)) if groups else ()
        kinds = Counter(op_name(node).removeprefix("native_") for node in members)
        lines = sorted({(site.code.co_filename, site.line) for node in members if (site := self.sites.get(node)) is not None})
        last = self._facts(members[-1])
        grey = all(node in self._marks.grey for node in members)
        first, final = self._modules[1][members[0]], self._modules[1][members[-1]]
        here = ".".join(module)
        if module and len(module) < min(len(first), len(final)) and first[: len(module) + 1] != final[: len(module) + 1]:
            here += f".{first[len(module)]} … {final[len(module)]}"
        return GraphNode(
            ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3)) + (" …" if len(kinds) > 3 else ""),
            module=here or None,
            shape=last.shape,
            dtype=last.dtype,
            requires_grad=True,
            file=lines[0][0] if lines else None,
            line=lines[0][1] if lines else None,
            last_line=lines[-1][1] if lines and lines[0][0] == lines[-1][0] and lines[0] != lines[-1] else None,
            mark=("freed" if self.diagnosis.code.startswith("GG2") else "detached") if grey else "",
            count=len(members),
        )


def _gone(op: OpFact) -> GraphNode:
    """What stands for a node that has been freed."""
    name = str(getattr(op.func, "__name__", None) or "an operation")
    return GraphNode(name, requires_grad=True, mark="detached", note="nothing holds this graph any more", **_at(resolve(op.site)))


def _at(place: ResolvedSite | SourceSpan | None) -> dict[str, Any]:
    return {} if place is None else {"file": place.file, "line": place.line, "text": place.text}


def _spans(diagnosis: Diagnosis) -> list[SourceSpan]:
    return [span for span in (diagnosis.culprit, *diagnosis.related) if span is not None]


def _fit(span: SourceSpan, site: CallSite) -> int:
    """How well a place fits a span: 2 where it is this very expression, 1 for one within it or on its line, 0 for none."""
    if site.code.co_filename != span.file or not span.line <= site.line <= span.end_line:
        return 0
    place = resolve(site)
    if place is None or span.line != span.end_line or None in (span.column, span.end_column, place.column, place.end_column):
        return 1
    if (span.column, span.end_column) == (place.column, place.end_column):
        return 2
    return int(span.column <= place.column and place.end_column <= span.end_column)  # type: ignore[operator]


def _shared(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    first, last = paths[0], paths[-1]  # of sorted paths, what these share all of them do
    most = min(len(first), len(last))
    return first[: next((i for i in range(most) if first[i] != last[i]), most)]


def _in_order(nodes: list[GraphNode], edges: list[GraphEdge], total: int, left_out: int) -> GraphPart:
    """The nodes each after those that it was made from, tensors without a node among them."""
    users = Counter(edge.source for edge in edges)
    sources: dict[int, list[int]] = {}
    for edge in edges:
        sources.setdefault(edge.user, []).append(edge.source)
    ready = sorted(i for i in range(len(nodes)) if not users[i])
    order: list[int] = []
    while ready:
        i = ready.pop()  # the newest
        order.append(i)
        for source in sources.get(i, ()):
            users[source] -= 1
            if not users[source]:
                ready.append(source)
        ready.sort()
    place = {i: at for at, i in enumerate(reversed(order))}
    return GraphPart(
        tuple(nodes[i] for i in reversed(order)),
        tuple(
            replace(edge, user=place[edge.user], source=place[edge.source]) for edge in edges if edge.user in place and edge.source in place
        ),
        total,
        left_out,
    )
