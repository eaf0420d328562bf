"""The words and places that the rules of this family share."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.analysis.graph.older_releases import output_shape
from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.bindings import dotted
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import SourceSpan, TensorFacts
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.facts import BackwardFact
from gradguard.rules.lifetime.second_backward import Study

UNTRACED = (
    "this step was not traced: the places are read from the live graph, the "
    "variables and the source; `level: strict` records them as they happen"
)


def holder_name(carrier: Carrier) -> str:
    """`state`, or `self.bank` of `CrossBatchMemory`, in backticks; "a tensor" where nothing is known."""
    name = carrier.name
    if name is None:
        targets = [] if carrier.made is None else carrier.made.targets
        return (
            f"`{targets[0]}`"
            if targets
            else f"the result of `{shown(carrier.made)}`"
            if carrier.made is not None and carrier.made.text
            else "a tensor"
        )
    holding = carrier.holding
    owner = None if holding is None or holding.owner is None else holding.owner_type
    return f"`{name}`" + (f" of `{owner}`" if owner and owner != "module" else "")


def shown(place: ResolvedSite | None) -> str:
    """An expression on one line, cut where it is long."""
    text = " ".join((place.text or "").split()) if place is not None else ""
    return text if len(text) <= 60 else text[:57] + "..."


def call_words(fact: BackwardFact | None) -> str:
    """`loss.backward()` as written, or what kind of call it was."""
    if fact is None:
        return "an earlier backward call"
    place = resolve(fact.site)
    text = shown(place)
    return f"`{text}`" if text else "`backward()`" if fact.kind == "backward" else "`autograd.grad()`"


def parting(fact: BackwardFact | None, other: BackwardFact | None) -> CallSite | None:
    """Where `fact` stands, told apart from `other`: of two calls through one helper the line that called the helper."""
    if fact is None or other is None:
        return None if fact is None else fact.site
    return next((mine for mine, others in zip(fact.stack, other.stack, strict=False) if mine != others), fact.site)


def call_words_apart(fact: BackwardFact | None, other: BackwardFact | None) -> str:
    """As `call_words`; of two calls through one helper the text of the line that called the helper, where it is short enough to say."""
    site = parting(fact, other)
    place = None if fact is None or site is fact.site else resolve(site)
    name = dotted(place.call.func) if place is not None and place.call is not None else None
    return call_words(fact) if place is None or site is None or name is None else f"`{name}(...)` at line {site.line}"


def freed_words(study: Study) -> str:
    """Which call let the values go: "the backward call of step 1, `loss.backward()` at line 12"."""
    fact = study.freed_by
    if fact is None:
        return "by an earlier backward call that ran before the guard was watching"
    line = "" if fact.site is None else f" at line {fact.site.line}"
    one_by_one = study.call is not None and study.incident.step == study.call.step  # not so where several optimizers share a turn
    when = f" in step {fact.step}" if one_by_one and study.call is not None and fact.step != study.call.step else ""
    return f"by {call_words(fact)}{line}{when} (backward call {fact.index})"


def backward_span(study: Study, label: str = "needs saved values that are gone") -> list[SourceSpan]:
    """Where the failing call stands."""
    place = resolve(parting(study.call, study.freed_by)) if study.call is not None else study.incident.place
    return [] if place is None else [place.span(label, "backward")]


def freed_span(study: Study) -> list[SourceSpan]:
    """Where the values were let go, unless that is the failing line itself."""
    fact = study.freed_by
    place = resolve(parting(fact, study.call))
    if fact is None or place is None:
        return []
    here = resolve(parting(study.call, fact))
    if here is not None and (here.file, here.line) == (place.file, place.line) and here.column == place.column:
        return []
    return [place.span(f"freed the graph here (backward call {fact.index})", "freed")]


def made_span(study: Study, carrier: Carrier, label: str) -> list[SourceSpan]:
    """Where the carried tensor was made."""
    return [] if carrier.made is None else [carrier.made.span(label, "made")]


def entry_place(study: Study, carrier: Carrier) -> ResolvedSite | None:
    """Where the carried tensor enters the new graph."""
    user = carrier.entry
    return None if user is None else study.finder.site(user)


def entry_span(study: Study, carrier: Carrier, label: str = "enters the new graph here") -> list[SourceSpan]:
    place = entry_place(study, carrier)
    return [] if place is None else [place.span(label, "carried")]


def without_repeats(culprit: SourceSpan | None, spans: list[SourceSpan]) -> list[SourceSpan]:
    """Places of the story, each line once."""
    seen = {(culprit.file, culprit.line)} if culprit is not None else set()
    found = []
    for span in spans:
        if (span.file, span.line) not in seen:
            seen.add((span.file, span.line))
            found.append(span)
    return found


def carrier_facts(carrier: Carrier) -> list[TensorFacts]:
    """The carried tensor in figures; in a list or another container it is one of the items, and called so."""
    within = isinstance(carrier.value, (list, tuple, dict)) or (carrier.holding is not None and bool(carrier.holding.through))
    name = f"an item of {carrier.name}" if within and carrier.name is not None else carrier.name
    return tensor_facts(name, carrier.tensor, carrier.link.source)


def tensor_facts(name: str | None, tensor: torch.Tensor | None, node: Any = None) -> list[TensorFacts]:
    """Name, shape and dtype, as far as the tensor lets them be read."""
    if tensor is None:
        shape = _node_shape(node)
        return [TensorFacts(name=name, shape=shape)] if name is not None and node is not None else []
    try:
        return [
            TensorFacts(
                name=name,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                requires_grad=tensor.requires_grad,
            )
        ]
    except internal_error():
        return [TensorFacts(name=name)]


def _node_shape(node: Any) -> list[int] | None:
    shape = output_shape(node)
    return None if shape is None else list(shape)


def notes(study: Study, carrier: Carrier | None = None) -> list[str]:
    """Facts that belong to none of the places."""
    found = []
    if carrier is not None:
        others = [name for name in carrier.names[1:4] if name != carrier.name]
        if others:
            found.append("the same graph is also held by " + ", ".join(f"`{name}`" for name in others))
    if not study.incident.traced and (carrier is None or carrier.made is None):
        found.append(UNTRACED)
    return found


def confidence(study: Study, carrier: Carrier | None) -> Any:
    """How sure the place is: certain with traced call sites, likely where the source alone gave it."""
    if carrier is None:
        return "certain"
    return "certain" if carrier.made is not None else "likely"
