"""Layers that are made where they are used: new, random parameters in each step, which no optimizer has. Part of GG603."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import dotted, resolve
from gradguard.analysis.program.bindings import full_name
from gradguard.analysis.program.syntax import FUNCTIONS, Source, range_of
from gradguard.core.diagnosis import Confidence, Diagnosis, Fix, SourceSpan
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.surveys import Making
from gradguard.rules import wording
from gradguard.rules.protocol.new_leaves import new_leaf
from gradguard.rules.spans import the_one

_WITHOUT = ("Dropout", "Pool", "Loss", "Pad", "Flatten", "Softmax", "Identity", "Fold", "Upsample", "Shuffle")


def made_anew(
    incident: Incident, book: Book, shapes: list[tuple[int, ...]], makings: list[Making | None], code: str, name: str
) -> Diagnosis | None:
    """The lines that made the parameters, as seen in the last steps; outside of any forward call, the one that makes and calls a layer."""
    seen = [made for made in makings if made is not None]
    if seen:
        return _seen(incident, book, shapes, seen, code, name)
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
    written = wording.short(source.segment(made), 60)
    optimizer = wording.optimizer_name(book, incident)
    around = source.qualname_around(made)
    inside = f" in `{around}`" if around else ""
    culprit = source.span(where, "a new layer at each call; no step ever changes its parameters", "culprit", around)
    headline = f"`{written}`{inside} is made anew in each call: its parameters are random every time, and `{optimizer}` never has them"
    return _told(book, optimizer, headline, culprit, [], shapes, _ONCE, (code, name), "likely")


_ONCE = "Make the layer once, in `__init__`, as an attribute of the module, and call that"


def _seen(incident: Incident, book: Book, shapes: list[tuple[int, ...]], makings: list[Making], code: str, name: str) -> Diagnosis | None:
    """What was seen being made in forward calls."""
    optimizer = wording.optimizer_name(book, incident)
    makings = sorted(makings, key=lambda made: made.site.line)
    sites = list(dict.fromkeys(made.site for made in makings))
    places = [place for site in sites if (place := resolve(site)) is not None]
    computed = new_leaf(incident)  # of values with a path: that the path ends there is the bug, told by GG605
    if not places or (computed is not None and any((computed.file, computed.line) == (place.file, place.line) for place in places)):
        return None
    attributes = list(dict.fromkeys(made.attribute for made in makings if made.attribute is not None))
    many = len(places) > 1
    function = places[0].function
    inside = f" in `{function}`" if function != "<module>" else ""
    if attributes and len(attributes) == len(set(makings)):
        subject = wording.listed([f"{makings[0].owner}.{attribute}" for attribute in attributes], len(attributes))
        them = " and ".join(f"`{attribute}`" for attribute in attributes[:4])
        label, title = "a new parameter at each call; no step ever changes it", f"Make {them} once, in `__init__`, and only use {{}} here"
        title = title.format("them" if len(attributes) > 1 else "it")
        many, random = len(attributes) > 1, "their values start anew every time"
    else:
        subject = f"`{wording.short(places[0].text, 60)}`" + (f" and {len(places) - 1} more" if many else "")
        label, title, random = (
            "a new layer at each call; no step ever changes its parameters",
            _ONCE,
            "the parameters start anew every time",
        )
    headline = f"{subject} {'are' if many else 'is'} made anew in each call{inside}: {random}, and `{optimizer}` never has them"
    others = [place.span(label, "context") for place in places[1:4]]
    return _told(book, optimizer, headline, places[0].span(label, "culprit"), others, shapes, title, (code, name), "certain")


def _told(
    book: Book,
    optimizer: str,
    headline: str,
    culprit: SourceSpan,
    others: list[SourceSpan],
    shapes: list[tuple[int, ...]],
    title: str,
    rule: tuple[str, str],
    confidence: Confidence,
) -> Diagnosis:
    sizes = " and ".join(str(list(shape)) for shape in shapes[:3])
    return Diagnosis(
        code=rule[0],
        name=rule[1],
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=wording.spans(
            *others,
            wording.span(book.made, f"`{optimizer}` is made without them", "declared"),
            None
            if book.last_part is None
            else wording.span(book.last_part.call.site, "fills the gradients of the newest ones", "backward"),
        ),
        explanation=f"At each look another set of parameters ({sizes}) got gradients, those of the look before were gone, and no optimizer "
        "knew any of them. What is learnt in front of such a layer has to fit another random one in the next step.",
        fixes=[Fix(title=title, safety="unsafe")],
        confidence=confidence,
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
