"""`net.training = False` set by hand: the parts keep their own flag, so dropout and batch norm go on as in training. Part of GG609."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.analysis.program.expressions import is_constant
from gradguard.analysis.program.index import writes_in
from gradguard.analysis.program.syntax import Source
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.rules import wording
from gradguard.rules.spans import function_around, the_one


def bare_flag(incident: Incident, module: nn.Module, site: CallSite, what: str, code: str, name: str) -> Diagnosis | None:
    """The one assignment to a `training` that is not the object's own; without it, nothing is said."""
    place = the_one(incident, lambda sources: _sets(sources))
    receiver = _receiver(place)
    if place is None or place.statement is None or receiver is None or module.training:
        return None
    shown = incident.names.of(module) or receiver
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{receiver}.training = False` does not put `{shown}` into eval mode: {what} inside {'are' if ' and ' in what else 'is'} "
        "still in train mode",
        culprit=place.statement_span("sets the flag of this one module; those inside have their own", "culprit"),
        related=wording.spans(wording.span(site, f"`{shown}` runs without grad, {what} as in training", "context")),
        explanation=f"Each module reads its own `training`. `eval()` and `train()` set it on the module and on everything in it; `eval()` "
        f"of `{shown}` was not called.",
        fixes=[
            Fix(
                title=f"Call `{receiver}.eval()`",
                safety="unsafe",
                patch=None if place.source is None else replaced(place.source, [(place.statement, f"{receiver}.eval()")]),
                detail=f"And `{receiver}.train()` where `{receiver}.training` is set to True.",
            )
        ],
        confidence="likely",
    )


def _sets(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    """`x.training = False`, outside methods that set their own."""
    for source, write in writes_in(sources, "training"):
        owner = None if write.owner is None else dotted(write.owner)
        own = owner == "self" and getattr(function_around(source, write.node), "name", "") in ("train", "eval")
        if isinstance(write.node, ast.Assign) and is_constant(write.value, False) and owner is not None and not own:
            yield source, write.node


def _receiver(place: ResolvedSite | None) -> str | None:
    statement = None if place is None else place.statement
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Attribute) or len(statement.targets) != 1:
        return None
    return dotted(statement.targets[0].value)
