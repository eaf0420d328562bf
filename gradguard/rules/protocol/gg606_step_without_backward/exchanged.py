"""An optimizer whose parameters no module has any more, while a model has others of the very same shapes, as after sharding. Part of
GG604, where the gradients of those others are not to be seen in the graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.index import calls_in
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import modules_in, parameters_in
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.protocol.orphans import CODE, NAME, alive_owner

_SHARDS = "fully_shard"


def exchanged(incident: Incident, book: Book, parameters: list[torch.Tensor]) -> Diagnosis | None:
    """The optimizer was made before the exchange."""
    mine = [p for p in parameters if isinstance(p, nn.Parameter)]
    if not mine or len(mine) < len(parameters) or any(incident.names.is_a_modules(p) or alive_owner(p) is not None for p in mine):
        return None
    known = incident.notes[Ledger].trained_ids()
    shapes = Counter(tuple(p.shape) for p in mine)
    for variable, root in incident.names.modules:
        theirs = [p for p in parameters_in(root) if p.requires_grad]
        if Counter(tuple(p.shape) for p in theirs) == shapes and not any(id(p) in known for p in theirs):
            return _told(incident, book, variable, root, mine)
    return None


def _told(incident: Incident, book: Book, variable: str | None, root: nn.Module, mine: list[Any]) -> Diagnosis:
    name, model = wording.optimizer_name(book, incident), variable or type(root).__name__
    sharded = _sharding(incident) if any(type(part).__name__.startswith("FSDP") for part in modules_in(root)) else []
    by = f"`{_SHARDS}`" if sharded else "something after that"
    made = resolve(book.made)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` updates parameters that `{model}` no longer has: {by} has put others in their place",
        culprit=None if made is None else made.span(f"keeps the parameters that `{model}` had here", "culprit"),
        related=wording.spans(*sharded[:3], wording.span(book.step_site, "steps on the old parameters, which have no gradient", "context")),
        tensors=wording.facts(parameters_in(root), incident.names),
        explanation=f"None of the {len(mine)} parameters of `{name}` is a module's any more, and none has ever had a gradient. `{model}` "
        "has as many others of the same shapes, and they are in no optimizer.",
        fixes=[Fix(title=f"Make `{name}` after {by if sharded else f'`{model}` has its final parameters'}", safety="unsafe")],
    )


def _sharding(incident: Incident) -> list[SourceSpan]:
    """The calls that shard a module, the last in the source first: it is the whole model's."""
    found = [
        site_at(source, node).span("puts sharded parameters in the place of these", "context")
        for source, node in calls_in(incident.sources, _SHARDS)
    ]
    return found[::-1]
