"""# GG615 aliased-parameters

## What it is
Two Parameters live in the same memory, and an optimizer has both. Or what is taken for a copy of the weights (the shadow of a
moving average, the best state so far) lives in the memory of the weights.

## Why it is wrong
Weights are tied by giving two modules the same Parameter object. Two objects on one memory get two gradients, and the
optimizer steps twice in the same place, with separate running averages; nothing adds the gradients up.

## Example
    decoder.weight.data = encoder.weight.data          # one memory, two parameters

## Use instead
    decoder.weight = encoder.weight                    # one parameter

## Fix safety
Unsafe: the gradients of both uses are added from then on.

## When it speaks, what silences it
At the third step of an optimizer that holds two different Parameters with the same address and the same number of elements.
A parameter shared as one object is silent, and so are views of a flat buffer at different places. At each survey (steps 3, 12, 24,
60 ...), about tensors kept in a container whose memory is a parameter's, where a traced step has blended one of them with itself
(`lerp_`, `copy_`, `mul_` and then `add_`, whose operand is another tensor on the same memory); other writes to such tensors are silent.
At a `load_state_dict` of a state that this module's `state_dict()` has given out, where every tensor lies in the memory of the
parameter it is copied to, and optimizer steps (each with as many writes as the others) or another `load_state_dict` are all that has
written the parameters since. Copies (`deepcopy`, `clone`, `torch.save` at once) are silent.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.foreign_exceptions import internal_error
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.own_state import KeptState
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.gg615_aliased_parameters import kept_state, no_copy
from gradguard.rules.spans import the_one

CODE, NAME = "GG615", "aliased-parameters"


def recognise(incident: Incident) -> Diagnosis | None:
    """The two parameters, and the assignment that put them on one memory; or the copy that is none."""
    if isinstance(incident.finding, KeptState):
        return kept_state.told(incident, incident.finding, CODE, NAME)
    book: Book = incident.finding.book
    return (_two_parameters(incident, book) if book.steps == 3 else None) or no_copy.told(incident, book, CODE, NAME)


def _two_parameters(incident: Incident, book: Book) -> Diagnosis | None:
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for parameter in book.parameters():
        try:
            key = (parameter.data_ptr(), parameter.numel())
        except internal_error():  # no storage of its own: fake, sparse and wrapped tensors
            continue
        if not key[0] or not key[1]:
            continue
        other = seen.setdefault(key, parameter)
        if other is not parameter and other.requires_grad and parameter.requires_grad:
            return _told(incident, book, other, parameter)
    return None


def _told(incident: Incident, book: Book, first: torch.Tensor, second: torch.Tensor) -> Diagnosis:
    names = wording.parameter_names([first, second], incident.names)
    shown = " and ".join(f"`{name}`" for name in names) or "two parameters"
    culprit = _tied_at(incident, names)
    name = wording.optimizer_name(book, incident)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"{shown} are two parameters in one memory: `{name}` updates it twice, with gradients that are never added up",
        culprit=culprit,
        related=wording.spans(wording.span(book.made, f"`{name}` gets both", "declared")),
        tensors=wording.facts([first, second], incident.names),
        explanation="Each has a gradient and running averages of its own; each step writes both updates into the same values. Tied "
        "weights are one Parameter object in two modules.",
        fixes=[
            Fix(
                title=f"Assign the parameter itself, without `.data`: `{names[1]} = {names[0]}`"
                if len(names) == 2
                else "Assign the parameter itself",
                safety="unsafe",
                detail="Before the optimizer is made.",
            )
        ],
    )


def _tied_at(incident: Incident, names: list[str]) -> SourceSpan | None:
    """An assignment of one's `.data` (or a Parameter made of it) to the other."""
    ends = {name.split(".")[-1] for name in names}
    owners = {name.split(".")[-2] for name in names if name.count(".")}

    def ties(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
        for source in sources:
            for node in ast.walk(source.tree or ast.Module([], [])):
                if not isinstance(node, ast.Assign):
                    continue
                target, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
                base = target.removesuffix(".data")
                if (
                    base.split(".")[-1] in ends
                    and any(f".{end}" in value for end in ends)
                    and (not owners or any(owner in target or owner in value for owner in owners))
                    and base != value
                ):
                    yield source, node

    place = the_one(incident, ties)
    return None if place is None else place.statement_span("puts two parameters on the same memory", "culprit")


RULE = Rule(
    code=CODE, name=NAME, summary="two parameters in one memory", recognise=recognise, moments=frozenset({"finding"}), severity="warning"
)
