"""Writes that PyTorch's version counter does not see, found before backward: through `.data`, and by numpy.

The graph is walked only when the journal holds a `.data` write or a fingerprint that can concern it, and saved values are
looked at only in nodes older than those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradguard.analysis.graph.walk import Mismatch, nodes_from
from gradguard.analysis.incident import Incident
from gradguard.core.notes import Notes
from gradguard.instrumentation.facts import Prints, Region, WriteFact
from gradguard.instrumentation.fingerprints import fingerprint
from gradguard.instrumentation.journal import Journal, current_journal
from gradguard.rules.inplace.regions import meet
from gradguard.rules.inplace.write_history import Story, from_fact
from gradguard.torch_compat.private_api import node_sequence, saved_data, saved_slots, storage_key, version_of


@dataclass
class Unseen:
    """A saved value whose contents are not what was saved."""

    node: Any
    slot: str
    tensor: torch.Tensor
    writes: list[WriteFact]  # through `.data`, oldest first
    mark: Prints | None  # the fingerprint that no longer fits

    def story(self, incident: Incident) -> Story:
        """As a story, with the writes that are known."""
        version = version_of(self.tensor) or 0
        mismatch = Mismatch(self.node, self.slot, self.tensor, version, version, "")
        story = Story(incident, mismatch, incident.journal.op_at(mismatch.seq))
        story.writes = [from_fact(fact) for fact in self.writes]
        return story


def screen(notes: Notes, moment: str, facts: dict[str, Any], traced: bool) -> bool:
    """Whether anything can have been written unseen: through `.data`, or where contents were noted."""
    journal = current_journal()
    return bool(journal.data_writes or journal.prints)


def unseen_writes(incident: Incident) -> list[Unseen]:
    """Saved values of the graph about to be used that were changed behind PyTorch's back; once an incident."""
    cached = incident.__dict__.get("_inplace_unseen")
    if cached is None:
        cached = incident.__dict__["_inplace_unseen"] = _find(incident)
    return list(cached)


def _find(incident: Incident) -> list[Unseen]:
    journal = incident.journal
    writes: dict[int, list[WriteFact]] = {}
    for fact in journal.writes if journal.data_writes else ():
        if fact.via == "data":
            writes.setdefault(fact.storage, []).append(fact)
    nodes = [(node, node_sequence(node)) for node in nodes_from(incident.root_nodes)]
    oldest = min((seq for _, seq in nodes), default=0)
    marks: dict[int, list[Prints]] = {}
    # numpy memory of long ago is not looked at again in every step
    since = journal.backwards[-16].clock if len(journal.backwards) >= 16 else 0
    for item in reversed(journal.prints):
        if item.clock <= since:
            break
        if item.seq_to > oldest:  # the others concern nodes of other graphs
            marks.setdefault(item.storage, []).append(item)
    if not writes and not marks:
        return []
    newest = max([fact.seq for facts in writes.values() for fact in facts] + [item.seq_to for items in marks.values() for item in items])
    found: list[Unseen] = []
    verdicts: dict[int, bool] = {}  # many nodes may have saved the same memory
    for node, seq in nodes:
        if seq >= newest:
            continue
        saved_at = _saved_at(node, journal)
        for name, slot in saved_slots(node):
            tensor = saved_data(slot)
            storage = None if tensor is None else storage_key(tensor)
            if tensor is None or storage is None or (storage not in writes and storage not in marks) or _is_unread(node, name):
                continue
            later = [fact for fact in writes.get(storage, ()) if fact.seq > seq and fact.clock > saved_at and _reaches(fact, tensor)]
            if later and not _restored(later, tensor):
                found.append(Unseen(node, name, tensor, later, None))
                continue
            concerning = (item for item in reversed(marks.get(storage, ())) if item.clock > saved_at and _concerns(item, seq))
            mark = next((item for item in concerning if _differs(item, tensor, verdicts)), None)
            if mark is not None:
                found.append(Unseen(node, name, tensor, [], mark))
    return sorted(found, key=lambda item: -node_sequence(item.node))  # in the order backward meets them


def _saved_at(node: Any, journal: Journal) -> int:
    """When a Function of the user's saved its tensors: once its forward had returned, long after its node got its number."""
    if not hasattr(node, "_forward_cls"):
        return 0
    call = journal.op_at(node_sequence(node))
    return 0 if call is None else call.clock


def _restored(writes: list[WriteFact], saved: torch.Tensor) -> bool:
    """Whether everything written is again as it was before: `gradcheck` and the like change a value and put it back."""
    first: dict[Region, int] = {}
    for fact in writes:
        if fact.before is None:
            return False
        first.setdefault(*fact.before)
    with torch.no_grad():
        return all(
            region.dtype == saved.dtype and fingerprint(saved.detach().as_strided(region.shape, region.stride, region.offset)) == mark
            for region, mark in first.items()
        )


def _reaches(fact: WriteFact, saved: torch.Tensor) -> bool:
    """Whether a write was into elements of the saved tensor, and not into others of the same memory."""
    return fact.region is None or meet(fact.region, Region.of(saved)) is True


def _is_unread(node: Any, slot: str) -> bool:
    """Whether backward does not read this saved value: a normalisation that trains saves its running statistics for nothing, and
    its next call updates them in C++, past the version counter."""
    return slot in ("running_mean", "running_var") and bool(getattr(node, "_saved_training", False))


def _concerns(item: Prints, seq: int) -> bool:
    """Whether the fingerprint shows what the node saved: taken with its op, or at a later `.numpy()`."""
    return seq < item.seq_to if item.seq_from == 0 else item.seq_from <= seq < item.seq_to


def _differs(item: Prints, tensor: torch.Tensor, verdicts: dict[int, bool]) -> bool:
    """Whether the memory has other contents now, with no write that PyTorch knows of."""
    if version_of(tensor) != item.version or tensor.dtype != item.dtype:
        return False
    verdict = verdicts.get(id(item))
    if verdict is None:
        seen = tensor
        if tensor.storage_offset() != item.offset or tensor.shape != item.shape or tensor.stride() != item.stride:
            with torch.no_grad():
                seen = torch.empty(0, dtype=item.dtype, device=tensor.device)
                seen = seen.set_(tensor.untyped_storage(), item.offset, item.shape, item.stride)
        now = fingerprint(seen, item.sampled)
        verdict = verdicts[id(item)] = now is not None and now != item.mark
    return verdict
