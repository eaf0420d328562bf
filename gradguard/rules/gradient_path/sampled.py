"""GG308: a random sample between the parameters of its distribution and the loss, where `rsample()` would have given a path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.history import cut_origins
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import function_word, in_words, same_place, short
from gradguard.analysis.places.source import ResolvedSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.instrumentation.facts import Cut
from gradguard.rules.gradient_path import lost_path, patching, wording
from gradguard.rules.gradient_path.additive import Region
from gradguard.torch_compat.private_api import node_sequence

# what a network gives, and the smaller of two such values: summed into a loss as they are, not compared with a target
_VALUES = ("Addmm", "Linear", "Mm", "Bmm", "Minimum", "Min", "Amin")


def sampled(incident: Incident, region: Region, since: int) -> Diagnosis | None:
    """`sample()` between encoder and decoder of one loss; or, though its log-probability is used, before a term of its own.

    A score-function estimator multiplies the log-probability with what was computed from the sample; a term beside it is the
    reparametrised kind, which has to reach the distribution through the sample.
    """
    journal = incident.journal
    candidates: dict[int, tuple[Cut, list[int]]] = {}
    for store in (journal.fed, journal.partial):
        for seq in reversed(store):
            if seq < since:
                break
            for cut in store[seq]:
                if cut.kind == "sample":
                    candidates.setdefault(id(cut), (cut, []))[1].append(seq)
    if not candidates:
        return None
    nodes = {node_sequence(node): node for node, _ in walk(incident.root_nodes)}
    for cut, uses in candidates.values():
        live = [seq for seq in uses if seq in nodes]
        behind = [seq for seq in cut.sources if seq in nodes]
        if cut.scored:
            live = [seq for seq in live if not _by_hand(nodes, [seq], behind) and _is_a_term(region, nodes[seq], cut)]
        if not live or not behind or _by_hand(nodes, live, behind):
            continue
        origin = cut_origins.of_cut(incident, cut)
        if origin.place is None or not cut_origins.of_trained(incident, origin):
            continue
        return _tell_sample(incident, origin, incident.place_of_node(min(live)), cut.scored)
    return None


def _is_a_term(region: Region, use: Any, sample: Cut) -> bool:
    """Whether the value that the sample goes into here is summed into the loss as a network gives it."""
    if use in region.sums:  # the network is frozen, and its value has no graph: beside the sum's other side
        return node_sequence(use) in sample.valued
    ends = [end for end in region.ends if end.name().rstrip("0123456789").removesuffix("Backward") in _VALUES]
    others = [end for end in region.ends if end not in ends]
    return bool(others) and any(node is use for node, _ in walk(ends)) and not any(node is use for node, _ in walk(others))


def _by_hand(nodes: dict[int, Any], uses: Iterable[int], sources: Iterable[int]) -> bool:
    """A density computed by hand: the sample meets the distribution's own parameters (`(action - mu) ** 2`)."""
    known: set[Any] = set()
    for seq in sources:
        node = nodes[seq]
        known.add(node)
        known.update(source for source, _ in node.next_functions if source is not None)
    return any(source in known for seq in uses for source, _ in nodes[seq].next_functions)


def _tell_sample(incident: Incident, origin: Origin, use: ResolvedSite | None, scored: bool) -> Diagnosis:
    place = origin.place
    assert place is not None
    name = wording.result_name(origin)
    distribution = origin.inner or "the distribution"
    root = lost_path.root_name(incident, incident.roots[0])
    by = "another term, but not by what is computed from the sample, and its log-probability is not used either"
    if scored:
        by = "the term with its log-probability, but not by what is computed from the sample, which is a term of its own"
    related: list[SourceSpan] = []
    if origin.made is not None:
        related.append(origin.made.span(f"parameters of `{short(distribution, 30)}`", "made"))
    if use is not None and not same_place(use, place):
        related.append(use.span(f"{f'`{name}`' if name else 'the sample'} goes on from here", "context"))
    if origin.outer is not None and not same_place(origin.outer, incident.place):
        related.append(origin.outer.span("called from here", "context"))
    if incident.place is not None:
        related.append(
            incident.place.span(
                f"what is computed from {f'`{name}`' if name else 'the sample'} gives `{short(distribution, 30)}` no gradient", "backward"
            )
        )
    return Diagnosis(
        code="GG308", name="partial-detach", severity="warning",
        headline=f"{f'`{name}`' if name else 'a value'} is drawn with "
                 f"`{short(distribution, 30)}.sample()`{function_word(place)}: no gradient of {in_words(root)} goes through it",
        culprit=place.span(wording.label(origin), "culprit"), related=related, tensors=[],
        explanation=f"`sample()` draws under no_grad. {in_words(root, True)} trains the parameters of `{short(distribution, 30)}` by "
                    f"{by}. `rsample()` draws reparametrized samples, through which gradients flow.",
        fixes=[patching.with_patch(Fix(title=f"Draw with "
                                             f"`{short(distribution, 30)}.rsample()`", safety="unsafe"), origin)], confidence="likely",
    )  # fmt: skip
