"""Layers that are made where they are used: new, random parameters in each step, which no optimizer has. Part of GG603."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn

from gradguard.diagnosis import Diagnosis, Fix
from gradguard.evidence.bindings import full_name
from gradguard.evidence.source import dotted
from gradguard.evidence.syntax import FUNCTIONS, Source, range_of
from gradguard.rules.incident import Incident
from gradguard.rules.protocol import tell
from gradguard.rules.protocol.books import Book
from gradguard.rules.protocol.places import the_one

_WITHOUT = ("Dropout", "Pool", "Loss", "Pad", "Flatten", "Softmax", "Identity", "Fold", "Upsample", "Shuffle")


def made_anew(incident: Incident, book: Book, shapes: list[tuple[int, ...]], code: str, name: str) -> Diagnosis | None:
    """The one place where a layer is made and called at once; without it, nothing is said."""
    found: list[tuple[Source, ast.Call]] = []

    def places(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
        for source, made, statement in _made(sources):
            found.append((source, made))
            yield source, statement

    place = the_one(incident, places)
    if place is None or not found:
        return None
    source, made = found[-1]
    where = range_of(made)
    if where is None:
        return None
    written = tell.short(source.segment(made), 60)
    optimizer = tell.optimizer_name(book, incident)
    around = source.qualname_around(made)
    inside = f" in `{around}`" if around else ""
    sizes = " and ".join(str(list(shape)) for shape in shapes[:3])
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{written}`{inside} is made anew in each call: its parameters are random every time, and `{optimizer}` never has them",
        culprit=source.span(where, "a new layer at each call; no step ever changes its parameters", "culprit", around),
        related=tell.spans(
            tell.span(book.made, f"`{optimizer}` is made without them", "declared"),
            None if book.last_part is None else tell.span(book.last_part.call.site, "fills the gradients of the newest ones", "backward"),
        ),
        explanation=f"At each look another set of parameters ({sizes}) got gradients, those of the look before were gone, and no optimizer "
        "knew any of them. What is learnt in front of such a layer has to fit another random one in the next step.",
        fixes=[Fix(title="Make the layer once, in `__init__`, as an attribute of the module, and call that", safety="unsafe")],
        confidence="likely",
    )


def _made(sources: list[Source]) -> Iterator[tuple[Source, ast.Call, ast.stmt]]:
    """Constructions of torch's layers that are called on the spot, or through a variable of the same function."""
    for source in sources:
        for node in ast.walk(source.tree or ast.Module([], [])):
            if not isinstance(node, ast.Call):
                continue
            maker: ast.expr | None = node.func
            if isinstance(maker, ast.Name):
                around = next((above for above in source.ancestors(node) if isinstance(above, FUNCTIONS)), None)
                maker = _assigned(around, maker.id)
            statement = source.statement(node)
            if isinstance(maker, ast.Call) and statement is not None and _has_parameters(source, maker):
                yield source, maker, statement


def _assigned(function: ast.AST | None, name: str) -> ast.expr | None:
    """What the one assignment to a variable of a function gives it."""
    values = [
        node.value
        for node in (() if function is None else ast.walk(function))
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    return values[0] if len(values) == 1 else None


def _has_parameters(source: Source, made: ast.Call) -> bool:
    written = dotted(made.func)
    full = "" if written is None else full_name(source, written)
    kind = getattr(torch.nn, full.rpartition(".")[2], None) if full.startswith("torch.nn.") else None
    return isinstance(kind, type) and issubclass(kind, nn.Module) and not any(word in kind.__name__ for word in _WITHOUT)
