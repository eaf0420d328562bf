"""# GG310 repeated-term

## What it is
A term of the loss is added to it twice: once by itself and once within a sum that already contains it, or by a running sum that is not
set back in the loop.

## Why it is wrong
Nothing raises. The term has twice the weight that is written, and its gradient twice the size, against all other terms.

## Example
```python
terms = {"task": task, "sparsity": sparsity}
terms["total"] = task + sparsity
loss = sum(terms.values())          # task and sparsity are in it twice
```

## Use instead
```python
loss = terms["total"]
```
Where a weight of two is meant, write `2 * sparsity`.

## Fix safety
Manual: which of the two additions is meant, only the author knows.

## When it speaks, what silences it
In traced steps, as a warning, at the second backward call of a line in whose graph the same places add the same term again. Only numbers
that reach the loss through sums by two ways or more, each with the same weight. A term with a weight (`2 * x`), one that is
also part of something else (`x * x`, `x.sqrt()`), a difference, and a mean over copies of one single term are silent.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradguard.analysis.graph.walk import root_nodes
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.sites import same_place, short
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.notes import Notes
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import additive
from gradguard.torch_compat.private_api import node_sequence

CODE, NAME = "GG310", "repeated-term"
_TRIES = 12  # looks at the backward calls of one line
_MOST = 2_000  # nodes
_STARTS = ("Add", "Div", "Mul", "Sum", "Sub", "Mean", "Neg")
_SAME = frozenset({"ViewBackward0", "CloneBackward0", "SqueezeBackward0", "AliasBackward0", "ReshapeAliasBackward0", "ToCopyBackward0"})
_SCALINGS = frozenset({"MulBackward0", "DivBackward0", "NegBackward0"})


class Way(NamedTuple):
    """How a node is reached from the loss.

    Attributes:
        node: the node.
        output: which of its results.
        scale: the last node on the way that scales what is behind it; None for none. Ways with the same one have the same weight.
    """

    node: Any
    output: int
    scale: Any


class Term(NamedTuple):
    """A node's result that sums add more than once.

    Attributes:
        times: how often it is in the loss.
        sums: the nodes that add it, in the order in which they were made.
    """

    node: Any
    output: int
    times: int
    sums: tuple[Any, ...]


@dataclass(frozen=True)
class Repeated:
    """The terms of one loss, each with where it is made and where it is added."""

    terms: list[tuple[Term, CallSite | None, tuple[CallSite, ...]]]


class _Seen(dict[Any, tuple[int, Any]]):
    """By the line of the backward call: how often it was looked at, and what was repeated there last."""


def screen(notes: Notes, moment: str, facts: dict[str, Any], traced: bool) -> bool:
    """Whether the loss is a sum of something, and this line is still to be looked at."""
    call, roots = facts["call"], root_nodes(facts["roots"])
    if call is None or len(roots) != 1 or not roots[0].name().startswith(_STARTS):
        return False
    return bool(notes[_Seen].get(call.site, (0, None))[0] < _TRIES)


def find(incident: Incident) -> Repeated | None:
    """The terms that this line's losses have had twice, two times in a row."""
    call, roots = incident.call, incident.root_nodes
    if call is None or call.nested or call.create_graph or len(roots) != 1:
        return None
    seen = incident.notes[_Seen]
    looks, before = seen.get(call.site, (0, None))
    found = []
    for term in repeated(roots[0]):
        sites = tuple(site for node in term.sums if (site := incident.site_of_node(node_sequence(node))) is not None)
        if len(sites) == len(term.sums):
            found.append((term, incident.site_of_node(node_sequence(term.node)), sites))
    places = {(made, sites[0], sites[-1]) for _, made, sites in found}
    again = bool(places) and before is not None and bool(places & before)
    seen[call.site] = (_TRIES if again else looks + 1, places)
    return Repeated([each for each in found if (each[1], each[2][0], each[2][-1]) in before]) if again else None


def repeated(root: Any) -> list[Term]:
    """The single numbers that a root adds up more than once, with one weight; the sums that contain one are not listed again."""
    counts: Counter[Way] = Counter({Way(root, 0, None): 1})
    sums: dict[Way, list[Any]] = {}
    ends: set[tuple[Any, int]] = set()
    heap = [(-node_sequence(root), 0, Way(root, 0, None))]
    while heap:
        _, _, way = heapq.heappop(heap)
        below = _below(way)
        if not below:
            ends.add((way.node, way.output))
        for each in below:
            if each not in counts:
                heapq.heappush(heap, (-node_sequence(each.node), len(counts), each))
            counts[each] += counts[way]
            sums.setdefault(each, []).append(way.node)
        if len(counts) > _MOST:
            return []
    if len(ends) < 2:
        return []
    terms = [
        Term(way.node, way.output, counts[way], tuple(sorted(adding, key=node_sequence))) for way, adding in sums.items() if len(adding) > 1
    ]
    return sorted(terms, key=lambda term: node_sequence(term.node))


def _below(way: Way) -> list[Way]:
    """The summands behind a node, or the one number that it scales; nothing for what is a term itself."""
    node, _, scale = way
    name = node.name()
    edges: list[tuple[Any, int]] = [edge for edge in node.next_functions if edge[0] is not None]
    given = [source for source, _ in edges]
    if name in ("AddBackward0", "SubBackward0") and additive.scalar(node):
        second = scale if name == "AddBackward0" and getattr(node, "_saved_alpha", None) == 1 else node
        return [
            Way(source, output, second if i else scale)
            for i, (source, output) in enumerate(node.next_functions)
            if source is not None and additive.scalar(source)
        ]
    if name == "StackBackward0":
        return [Way(*edge, scale) for edge in edges] if all(map(additive.scalar, given)) else []
    if name in ("SumBackward0", "MeanBackward0") and given and given[0].name() == "StackBackward0":
        return [Way(*edges[0], node if name == "MeanBackward0" else scale)]
    if len(given) != 1 or not additive.scalar(given[0]) or not additive.scalar(node):
        return []
    return [Way(*edges[0], node)] if name in _SCALINGS else [Way(*edges[0], scale)] if name in _SAME else []


def recognise(incident: Incident) -> Diagnosis | None:
    """The line that adds a term again."""
    found = find(incident)
    return None if found is None else render(found, incident)


def render(found: Repeated, incident: Incident) -> Diagnosis | None:
    """The diagnosis: a running sum that goes on, or a term that is added twice."""
    names, related = list[str](), list[SourceSpan]()
    running = [each for each in found.terms if each[1] is not None and each[1] in each[2] and set(each[2]) != {each[1]}]
    term, made, sites = (running or found.terms)[-1]
    for each, site, _ in running or found.terms:
        place = incident.place_of_node(node_sequence(each.node))
        name = incident.names.of_node(each.node, each.output)
        if name is None and place is not None:
            whole = place.node is not None and getattr(place.statement, "value", None) is place.node
            name = place.targets[0] if whole and len(place.targets) == 1 else short(place.text, 40)
        if name is not None and name not in names:
            names.append(name)
            if place is not None and site not in sites:
                related.append(place.span(f"`{name}` is computed", "made"))
    first, last = (incident.place_of_node(node_sequence(node)) for node in (term.sums[0], term.sums[-1]))
    if running:
        last = next((incident.place_of_node(node_sequence(n)) for n, site in zip(term.sums, sites, strict=True) if site != made), last)
        first = incident.place_of_node(node_sequence(term.node))
    if last is None or not names:
        return None
    listed, many = short_list(names, 3), len(names) > 1
    if first is not None and not same_place(first, last):
        goes_on = f"goes on from its value of the iteration before: nothing sets `{names[0]}` back"
        related.insert(0, first.span(goes_on if running else "adds it for the first time", "context"))
    times = "twice" if term.times == 2 else f"{term.times} times"
    if running:
        headline = f"the loss contains earlier terms of {listed} again: it is added in each iteration and never set back"
        label = f"adds `{names[0]}` with all that it has summed up in the iterations before"
        title = f"Set `{names[0]}` back at the start of each iteration, or add it once, after the loop"
    else:
        headline = f"{listed} {'are' if many else 'is'} added to the loss {times if not many else 'more than once'}"
        label = f"adds {listed} again"
        title = f"Add {listed} once: leave {'them' if many else 'it'} out of one of the two sums"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=last.statement_span(label, "culprit"),
        related=[*related[:3], *([] if incident.place is None else [incident.place.span("backward starts from this loss", "backward")])],
        explanation=f"The loss is a sum that contains the same number {times}, with the same weight: its gradient counts {times}.",
        fixes=[Fix(title=title, safety="manual", detail=None if running else f"Where such a weight is meant, write it: `2 * {names[0]}`.")],
        confidence="likely",
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a term of the loss is added to it more than once",
    recognise=recognise,
    moments=frozenset({"before_backward"}),
    severity="warning",
    priority=-5,
    traced_only=True,
    screen=screen,
)
