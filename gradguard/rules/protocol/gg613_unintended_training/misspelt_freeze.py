"""A freeze that is misspelt: `p.require_grad = False` sets an attribute that nothing reads. Part of GG613."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import attributes, modules_in, parameters_in
from gradguard.fixes.edits import replaced
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import the_one, written_in

_MEANT = "requires_grad"
_ALIKE = 0.88  # of `difflib`: a letter or two missing, doubled or swapped
_LONGER = re.compile("requires?_?gradients?|requires?_?grads?_?flag")
# where one is set in a text: one of the two words is whole in a name that is so alike
_LIKELY = re.compile(r"""\w*(?:grad|require)\w*(?=\s*=[^=]|["'])""")


def misspelt(incident: Incident, book: Book, moved: set[int], code: str, name: str) -> Diagnosis | None:
    """Parameters that are trained though they, or a module around them, carry such an attribute with the value False."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for parameter in book.parameters():
        if id(parameter) in moved and parameter.requires_grad and (wrong := _wrong(parameter)) is not None:
            found.setdefault(wrong, {})[id(parameter)] = parameter
    on_modules = not found
    if on_modules and _set_anywhere(incident):
        for _, root in incident.names.modules:
            for module in modules_in(root):
                wrong = _wrong(module)
                inside = [p for p in parameters_in(module) if id(p) in moved and p.requires_grad] if wrong is not None else []
                if wrong is not None and inside:
                    found.setdefault(wrong, {}).update((id(p), p) for p in inside)
    if not found:
        return None
    wrong, frozen = max(found.items(), key=lambda item: len(item[1]))
    place = the_one(incident, lambda sources: _writes(sources, wrong))
    parameters = list(frozen.values())
    shown = wording.listed(wording.parameter_names(parameters, incident.names), len(parameters))
    many = len(parameters) > 1
    optimizer = wording.optimizer_name(book, incident)
    right = f"{_MEANT}_(False)" if on_modules else f"{_MEANT} = False"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"{shown} {'are' if many else 'is'} trained although `{wrong} = False` was to freeze {'them' if many else 'it'}: the flag "
        f"is called `{_MEANT}`",
        culprit=None if place is None else place.statement_span(f"sets a new attribute `{wrong}`, which PyTorch never reads", "culprit"),
        related=wording.spans(wording.span(book.step_site, f"`{optimizer}` changes {'them' if many else 'it'} here", "context")),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"Python sets an attribute of any name without complaint. `{_MEANT}` of {shown} is still True, and each of the "
        f"{book.steps} steps of `{optimizer}` has changed {'them' if many else 'it'}.",
        fixes=[Fix(title=f"Write `{right}`", safety="unsafe", patch=None if on_modules else _patch(place, wrong))],
    )


def _set_anywhere(incident: Incident) -> bool:
    """Whether any file of the user's sets such an attribute, or has its name for `setattr`."""
    return any(True for _ in written_in(incident, lambda text: any(map(_alike, set(_LIKELY.findall(text))))))


def _alike(name: str) -> bool:
    matcher = difflib.SequenceMatcher(None, name, _MEANT)
    if _LONGER.fullmatch(name):
        return True
    return name != _MEANT and matcher.real_quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE


def _wrong(thing: torch.Tensor | nn.Module) -> str | None:
    """The attribute that looks like the flag and is not it; private ones may be somebody's memory of it."""
    for key, value in attributes(thing).items():
        if not key.startswith("_") and value is False and _alike(key):
            return key
    return None


def _writes(sources: list[Source], wrong: str) -> Iterator[tuple[Source, ast.stmt]]:
    """The statements that set the attribute, by whatever means."""
    for source in sources:
        program = program_of(source)
        for write in () if program is None else program.writes(wrong):
            statement = source.statement(write.node)
            if statement is not None:
                yield source, statement


def _patch(place: ResolvedSite | None, wrong: str) -> str | None:
    """The name put right."""
    statement = None if place is None else place.statement
    if place is None or place.source is None or statement is None:
        return None
    named = [node for node in ast.walk(statement) if isinstance(node, ast.Attribute) and node.attr == wrong]
    changes: list[tuple[ast.AST, str]] = [
        (node, f"{text[: -len(wrong)]}{_MEANT}")
        for node in named
        if (text := place.source.segment(node)) is not None and text.endswith(wrong)
    ]
    return replaced(place.source, changes) if changes else None
