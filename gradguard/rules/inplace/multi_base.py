"""Views of one call and the writes to their base, from the journal."""

from __future__ import annotations

from typing import Any

import torch

from gradguard.callsite import CallSite
from gradguard.evidence.source import ResolvedSite, resolve
from gradguard.rules.incident import Incident
from gradguard.rules.inplace.aliases import MULTI
from gradguard.rules.inplace.story import Write, from_fact
from gradguard.torch_internals import storage_key


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def _maker(incident: Incident) -> tuple[Any, ...] | None:
    names = MULTI | {"__iter__"}
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
        return None
    return from_fact(facts[0] if op is not None else facts[-1])
