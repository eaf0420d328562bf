"""A freeze by parameters' names that no name satisfies: `if name.startswith("backbone")`, where it is `net.backbone`. Part of GG613."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.interpreter import UnknownError
from gradguard.analysis.program.index import Program, Write, program_of
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import parameters_in
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.protocol.gg613_unintended_training.named_items import Decided, Items
from gradguard.rules.spans import statement_span, written_in

_MOST_NAMES = 2_000
_NOBODYS = "\x00"  # a name that has no word of any condition in it
_PREFIXES = ("module.", "_orig_mod.")  # that wrappers put in front of names


class Missed(NamedTuple):
    """A freeze that reaches nothing.

    Attributes:
        parameters: what it was to freeze.
        called: the name that one of them has, as the program goes over names.
        expected: the name for which it would freeze that one.
        decided: what decides, as it comes out for `expected`.
        over: what the program goes over, as written.
    """

    parameters: list[torch.Tensor]
    called: str
    expected: str
    decided: Decided
    over: str


def freezes_nothing(incident: Incident, book: Book, moved: set[int], code: str, name: str) -> Diagnosis | None:
    """A place that freezes what has certain names, and none has; while those whose names have its words are trained."""
    sources = written_in(incident, lambda text: "requires_grad" in text and ("named_parameters" in text or "named_modules" in text))
    programs = [program for source in sources if (program := program_of(source)) is not None]
    for program in programs:
        for write in program.writes("requires_grad", value=False):
            try:
                found = _missed(Items(incident, sources), program, write, moved)
            except UnknownError:
                continue
            if found is not None:
                return _told(incident, book, found, code, name)
    return None


def _missed(items: Items, program: Program, write: Write, moved: set[int]) -> Missed | None:
    """The trained parameters that a place was to freeze.

    That is a name from some module inside on (`backbone.0.weight` where it is `net.backbone.0.weight`), or as a wrapper gives it.

    Raises:
        UnknownError: what it compares with, whose parameters they are, or whether it has run at all, is not known.
    """
    named = items.named(program, write)[:_MOST_NAMES]
    if not named or items.frozen(program, write, (_NOBODYS, named[0][1])):
        return None  # the words are those of what is to be trained, and that is all of them
    prefixes = [each for each in _PREFIXES if not items.frozen(program, write, (each + _NOBODYS, named[0][1]))]
    if any(items.frozen(program, write, each) for each in named):
        return None
    meant: dict[int, torch.Tensor] = {}
    told: tuple[str, str, Decided] | None = None
    no: set[str] = set()  # names that freeze nothing
    for full, thing in named:
        for expected in _other_names(full, thing, prefixes):
            if expected in no:
                continue
            frozen = [p for each in items.frozen(program, write, (expected, thing)) for p in _parameters(each)]
            if frozen:
                meant.update((id(p), p) for p in frozen)
                told = told or _decisive(items, program, write, full, expected, thing)
                break
            no.add(expected)
    if told is None or any(key not in moved or not p.requires_grad for key, p in meant.items()):
        return None
    return Missed(list(meant.values()), *told, items.over)


def _other_names(full: str, thing: Any, prefixes: list[str]) -> Iterator[str]:
    """The names from some module inside on, which is more than the parameter's own, and as a wrapper gives it."""
    yield from (full.split(".", i)[-1] for i in range(1, full.count(".") + isinstance(thing, nn.Module)))
    yield from (prefix + full for prefix in prefixes)


def _parameters(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, nn.Module):
        return list(parameters_in(thing))
    return [thing] if isinstance(thing, torch.Tensor) else []


def _decisive(items: Items, program: Program, write: Write, full: str, expected: str, thing: Any) -> tuple[str, str, Decided] | None:
    """The first condition that comes out another way for the name that is expected."""
    items.frozen(program, write, (expected, thing))
    wanted = list(items.trail)
    items.frozen(program, write, (full, thing))
    actual = {(each.node, each.turn): each.truth for each in items.trail}
    return next(((full, expected, each) for each in wanted if actual.get((each.node, each.turn), each.truth) is not each.truth), None)


def _told(incident: Incident, book: Book, missed: Missed, code: str, name: str) -> Diagnosis:
    program, condition, sense, _ = missed.decided
    found = missed.parameters
    function = getattr(program.function(condition), "name", None)
    shown = wording.listed(wording.parameter_names(found, incident.names), len(found))
    are, them = ("are", "them") if len(found) > 1 else ("is", "it")
    optimizer = wording.optimizer_name(book, incident)
    test, over = wording.short(program.source.segment(condition)), wording.short(missed.over)
    where = f"`{function}()`" if function is not None else "the loop over names"
    title = f"Compare with names as `{over}` gives them"
    if missed.called.endswith(missed.expected):
        title += f": here they begin with `{missed.called.removesuffix(missed.expected)}`"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"{shown} {are} trained: {where} was to freeze {them}, and "
        + (f"no name satisfies `{test}`" if sense else f"`{test}` is true for every name"),
        culprit=statement_span(program.source, condition, f"is {str(sense).lower()} for none of the parameters' names"),
        related=wording.spans(wording.span(book.step_site, f"`{optimizer}` changes {them} here", "context")),
        tensors=wording.facts(found, incident.names),
        explanation=f"It would be {str(sense).lower()} for `{missed.expected}`, and `{over}` gives `{missed.called}`. All of them still "
        f"require grad, and each of the {book.steps} steps of `{optimizer}` changed {them}.",
        fixes=[
            Fix(
                title=title,
                safety="unsafe",
                detail="Or freeze the module itself: `module.requires_grad_(False)`, which needs no names and fails where there is none.",
            )
        ],
    )
