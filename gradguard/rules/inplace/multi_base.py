"""Views of one call and the writes to their base, from the journal."""

from __future__ import annotations

import re
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.callsite import CallSite
from gradguard.core.safe_read import elements
from gradguard.rules.inplace.aliases import MULTI, aliases_of_name
from gradguard.rules.inplace.reaching_writes import step_scopes
from gradguard.rules.inplace.suspects import writes_of
from gradguard.rules.inplace.write_history import Write, from_fact
from gradguard.torch_compat.private_api import storage_key

_NODE = re.compile(r"output \d+ of (\w+?)(?:backward\d*)? is a view", re.IGNORECASE)

# the calls that make a node of this name
_BY_NODE = {
    "unbind": frozenset({"unbind", "__iter__"}),
    "split": frozenset({"split", "chunk", "tensor_split"}),
    "splitwithsizes": frozenset({"split", "split_with_sizes", "chunk"}),
    "chunk": frozenset({"chunk"}),
    "slice": frozenset({"tensor_split", "hsplit", "vsplit", "dsplit", "chunk"}),
}


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            found += [item for item in elements(value) if isinstance(item, torch.Tensor)]
    return found


def _maker(incident: Incident) -> tuple[Any, ...] | None:
    said = _NODE.search(incident.message)
    names = _BY_NODE.get(said[1].lower(), frozenset()) if said is not None else MULTI | {"__iter__"}
    return next((op for op in reversed(incident.journal.ops) if getattr(op[4], "__name__", "") in names), None)


def view_maker(incident: Incident) -> ResolvedSite | None:
    """The last call that returned several views."""
    op = _maker(incident)
    return None if op is None else resolve(CallSite(op[2], op[3]))


def base_write(incident: Incident) -> Write | None:
    """The first write to the memory of the failing call's arguments after the views were made."""
    op = _maker(incident)
    storages = {storage_key(tensor) for tensor in _tensors([*incident.args, *incident.kwargs.values(), *incident.roots])}
    facts = [fact for fact in incident.journal.writes if fact.storage in storages and (op is None or fact.clock > op[5])]
    if not facts:
        return _in_source(incident)
    return from_fact(facts[0] if op is not None else facts[-1])


def _in_source(incident: Incident) -> Write | None:
    """The first in-place statement on the base of a view that the failing line reads, after the views were made."""
    place = incident.place
    if place is None:
        return None
    for name in place.statement_names:
        for link in aliases_of_name(place, name):
            if link.call not in MULTI and link.call != "for":
                continue
            for scope in step_scopes(incident):
                for suspect in writes_of(incident, scope):
                    found = suspect.place
                    if (
                        found is not None
                        and suspect.written == link.base
                        and link.span.line < found.line <= place.line
                        and found.file == place.file
                    ):
                        write = Write("op", 0, None, "", sure="likely")
                        write.__dict__["place"] = found
                        return write
    return None
