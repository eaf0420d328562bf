"""Tensors that are trained in the place of an optimizer's parameters: copies or stacks of them that no module has. Part of GG604."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import the_one

CODE, NAME = "GG604", "optimizer-orphaned-parameters"


def told(incident: Incident, book: Book, strangers: list[torch.Tensor], mine: list[torch.Tensor]) -> Diagnosis | None:
    """The optimizer has the originals; the gradients go to what was made of them."""
    known = incident.notes[Ledger].trained_ids()
    strangers = [leaf for leaf in strangers if id(leaf) not in known]
    shapes = {tuple(leaf.shape) for leaf in strangers}
    ours = {tuple(p.shape) for p in mine}
    if not strangers or any(s not in ours and s[1:] not in ours for s in shapes) or not ours <= shapes | {s[1:] for s in shapes}:
        return None  # not all of the one against all of the other
    stacked = not shapes & ours
    names = [name for leaf in strangers if (name := incident.names.of(leaf)) is not None]
    if len(names) < len(strangers):
        return None
    holders = {re.split(r"\[", name)[0] for name in names}
    holder = holders.pop() if len(holders) == 1 else None
    name = wording.optimizer_name(book, incident)
    made = None if holder is None else the_one(incident, lambda sources: _bindings(sources, holder))
    what = f"`{holder}`" if holder is not None else short_list(names, 3)
    values = ".values()" if "['" in names[0] else ""
    kind = "stacked copies" if stacked else "copies"
    label = f"makes the {'stacked ' if stacked else ''}tensors that get the gradients"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` updates parameters that no loss uses: the gradients go to {what}, which no optimizer has",
        culprit=wording.span(book.made, f"is given {len(mine)} parameters, of which none gets a gradient", "culprit"),
        related=wording.spans(
            None if made is None else made.statement_span(label, "made"),
            wording.span(book.step_site, "finds no gradient to apply", "context"),
        ),
        tensors=wording.facts(strangers, incident.names),
        explanation=f"All {len(mine)} parameters of `{name}` had `.grad` None at {book.empty} steps in a row. backward() filled "
        f"{len(strangers)} leaves of {'their shapes, with one dimension more' if stacked else 'the same shapes'}: {kind} are tensors of "
        "their own, and what an optimizer does to the originals does not reach them.",
        fixes=[
            Fix(
                title=f"Give `{name}` the tensors that the loss is computed from: " + (what if holder is None else f"`{holder}{values}`"),
                safety="unsafe",
            )
        ],
    )


def _bindings(sources: list[Source], name: str) -> Iterator[tuple[Source, ast.stmt]]:
    """Statements that bind a name; `self` stands for any object."""
    for source in sources:
        for node in ast.walk(source.tree or ast.Module([], [])):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                parts = [part for t in targets for part in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
                if any(_ends(dotted(part), name) for part in parts):
                    yield source, node


def _ends(target: str | None, name: str) -> bool:
    if target is None:
        return False
    first, _, rest = target.partition(".")
    return target == name or (first == "self" and "." in name and rest == name.partition(".")[2])
