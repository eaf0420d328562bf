"""What happened to a saved value: who saved it, who wrote to it, in which order.

Shared by the rules whose error is "has been modified by an inplace operation" and by the silent checks. Built once an
incident and kept on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from gradguard.analysis.graph.walk import Mismatch, op_name
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import StateName
from gradguard.analysis.live.optimizer_contents import holds_memory
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Confidence
from gradguard.instrumentation.facts import OpFact, StepFact, WriteFact

MODIFIED = "has been modified by an inplace operation"
DETACHED = "has been detached in-place"

Kind = Literal["op", "step", "data", "numpy"]


@dataclass
class Write:
    """One write to the memory of a saved value."""

    kind: Kind
    clock: int
    site: CallSite | None
    func: str
    version: int | None = None  # after the write; None for an optimizer step
    module: Any = None  # the torch module that wrote, alive
    optimizer: Any = None
    type_name: str = ""  # of the optimizer
    grad_enabled: bool = True
    caller_site: CallSite | None = None
    sure: Confidence = "certain"  # "likely" or "possible" where the line was looked for in the source

    @cached_property
    def place(self) -> ResolvedSite | None:
        """The user's line."""
        return resolve(self.site)

    @cached_property
    def caller(self) -> ResolvedSite | None:
        """The line that called the helper in which the write stands."""
        return resolve(self.caller_site)


@dataclass
class Story:
    """A saved value and the writes to it since, oldest first."""

    incident: Incident
    mismatch: Mismatch
    op: OpFact | None
    writes: list[Write] = field(default_factory=list)

    guesses: list[Write] = field(default_factory=list)  # from the source, where nothing was traced; the likeliest first
    unlikely: list[Write] = field(default_factory=list)  # what else in the source writes in place

    @property
    def first(self) -> Write | None:
        """The write that broke it."""
        return self.writes[0] if self.writes else None

    @property
    def blamed(self) -> Write | None:
        """The write that is told as the culprit: a recorded one, else the likeliest of the source's, if one stands out."""
        if self.writes:
            return self.writes[0]
        return self.guesses[0] if (self.guesses and self.guesses[0].sure != "possible") or 0 < len(self.guesses) <= 3 else None

    @cached_property
    def saved_at(self) -> ResolvedSite | None:
        """The user's line whose op saved the value."""
        return None if self.op is None else resolve(self.op.site)

    @cached_property
    def state(self) -> StateName | None:
        """The parameter or buffer whose memory was written, if it is one's."""
        storage = self.mismatch.storage
        return None if storage is None else self.incident.names.state(storage=storage)

    @cached_property
    def op_word(self) -> str:
        """The saving op in the user's words."""
        return saving_op(self.mismatch.node, self.op)


def saving_op(node: Any, op: OpFact | None) -> str:
    """`softmax`, `GRUCell`, `matmul`: what the user called, as far as it is known, else the graph node's own name."""
    own = op_name(node)
    name = "" if op is None else str(getattr(op.func, "__name__", ""))
    if not name or name.startswith("_") or name in ("apply", "backward") or hasattr(type(node), "_forward_cls"):
        return own
    return name.rstrip("_") or own


def writes_since(incident: Incident, mismatch: Mismatch, op: OpFact | None) -> list[Write]:
    """The recorded writes that lie between the save and now, oldest first; optimizer steps among them where versions leave room."""
    storage = mismatch.storage
    if storage is None:
        return []
    journal = incident.journal
    facts = [
        fact
        for fact in journal.writes_to(storage, op.clock if op else 0)
        if fact.via != "data" and fact.version > mismatch.expected and (op is not None or fact.seq > mismatch.seq)
    ]
    steps = [fact for fact in journal.steps if fact.seq > mismatch.seq and holds_memory(fact.optimizer(), storage)]
    found: list[Write] = []
    explained = set()
    for fact in facts:
        step = next((step for step in steps if step.clock > fact.clock and step.site is not None and step.site == fact.site), None)
        if step is None:  # writes by an optimizer with a closure are seen one by one: they are its step's
            explained.add(fact.version)
            found.append(from_fact(fact))
    missing = mismatch.found - mismatch.expected - len(explained)
    if missing > 0:
        found += [from_step(step) for step in steps]
    return sorted(found, key=lambda write: write.clock)


def from_fact(fact: WriteFact) -> Write:
    """A write that the op probe saw."""
    return Write(
        fact.via,
        fact.clock,
        fact.site,
        fact.func,
        fact.version,
        fact.module() if fact.module else None,
        grad_enabled=fact.grad_enabled,
        caller_site=fact.caller,
    )


def from_step(fact: StepFact) -> Write:
    """An optimizer step as a write."""
    return Write("step", fact.clock, fact.site, "step", optimizer=fact.optimizer(), type_name=fact.type_name, grad_enabled=False)
