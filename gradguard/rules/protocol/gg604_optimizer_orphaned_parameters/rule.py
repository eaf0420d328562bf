"""# GG604 optimizer-orphaned-parameters

## What it is
The optimizer holds parameters that the model no longer has: the model, or a part of it, was replaced after the optimizer was
made.

## Why it is wrong
An optimizer keeps the parameter objects it was given. A model made anew, a replaced head, `load_state_dict(assign=True)` or a
deep copy has other objects; they get the gradients, and the optimizer steps on the old ones, which get none.

## Example
    optimizer = Adam(model.parameters())
    model.load_state_dict(checkpoint, assign=True)     # new parameter objects
    ...
    optimizer.step()                                   # does nothing

## Use instead
Make the optimizer after the model has its final parameters; in cross validation, a new optimizer for each fold.

## Fix safety
Unsafe: the model is trained from then on.

## When it speaks, what silences it
At the third step in a row for which no parameter of the optimizer has a gradient while a backward ran and filled leaves that
are in no optimizer (a module's, or tensors of their very shapes, stacked or not); or, where
part of a model was replaced, at the end (as GG603). Frozen parameters and heads that are used
now and then are silent.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.monitors.findings import Confirmed
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.rules.base import Rule
from gradguard.rules.protocol import orphans
from gradguard.rules.protocol.gg604_optimizer_orphaned_parameters import copies
from gradguard.rules.protocol.owners import Owners

CODE, NAME = orphans.CODE, orphans.NAME


def recognise(incident: Incident) -> Diagnosis | None:
    """The line that replaced the parameters, and the optimizer that was not told."""
    finding = incident.finding
    if isinstance(finding, Confirmed):
        return finding.diagnosis
    book: Book = finding.book
    told = _told(incident, book)
    if told is not None:
        book.gathered["orphaned"] = True
    return told


def _told(incident: Incident, book: Book) -> Diagnosis | None:
    mine = [p for p in book.parameters() if p.requires_grad]
    if not mine or any(p.grad is not None for p in mine):
        return None
    ledger = incident.notes[Ledger]
    strangers = [s for s in incident.finding.strangers.values() if s.last_backward > book.backwards_at_step - 3]
    owners = Owners(incident.names)
    left = [(leaf, owner) for s in strangers if (leaf := s.ref()) is not None and (owner := owners.of(leaf)) is not None and s.same()]
    left = [(leaf, owner) for leaf, owner in left if id(leaf) not in ledger.trained_ids()]
    if not left:
        return copies.told(incident, book, [leaf for s in strangers if (leaf := s.ref()) is not None and s.same()], mine)
    gone = [p for p in mine if incident.names.state(p) is None]
    shapes = [tuple(p.shape) for p in mine]
    alike = sum(tuple(leaf.shape) in shapes for leaf, _ in left)
    if len(gone) < len(mine):
        roots = [state.root for p in mine if (state := incident.names.state(p)) is not None]
        if 2 * alike < len(left) or any(root is left[0][1].root for root in roots):
            return None
    return orphans.told(incident, book, left, mine)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="the optimizer holds parameters that the model no longer has",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
