"""An average that only rebinds the loop's variable: `for q, k in zip(...): k = k * m + q * (1 - m)`. Part of GG611."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import torch

from gradguard.diagnosis import Diagnosis, Fix
from gradguard.evidence.source import at_line, dotted
from gradguard.evidence.syntax import Source
from gradguard.fixes.edits import replaced
from gradguard.rules.incident import Incident
from gradguard.rules.protocol import tell
from gradguard.rules.protocol.books import Book
from gradguard.rules.protocol.places import in_tiers, written_in
from gradguard.rules.protocol.rebound import read_later
from gradguard.rules.protocol.suspicion import few_values, version_of
from gradguard.safe_read import named_modules, parameters_in

_OVER_PARAMETERS = re.compile(r"\bzip\([^:]*\.parameters\(\)")
_SEEN = "GG611 copies"  # what the parameters in question held at the survey before


def rebound_copy(incident: Incident, book: Book, code: str, name: str) -> Diagnosis | None:
    """The one such statement, once the parameters that it was to move have stayed the same while others were trained."""
    known = incident.memory["ledger"].survey.known()
    if not any(_rebinding(written_in(incident, _OVER_PARAMETERS.search))):
        return None
    if all(id(p) in known for _, root in incident.names.modules for p in parameters_in(root)):
        return None  # every parameter alive is some optimizer's: no copy is there
    places = {(source.filename, node.lineno): held for source, node, held in _rebinding(next(in_tiers(incident)))}
    if len(places) != 1:
        return None
    (at, held), *_ = places.items()
    place = at_line(*at)
    statement, source = (None, None) if place is None else (place.statement, place.source)
    if place is None or source is None or not isinstance(statement, ast.Assign):
        return None
    if not any(version_of(p) > version for ref, version in book.first_versions if (p := ref()) is not None):
        return None
    found = _module(incident, held, known)
    if found is None:
        return None
    shown, parameters = found
    values = [(id(p), few_values(p)) for p in parameters]
    before, incident.memory[_SEEN] = incident.memory.get(_SEEN), (book.key, book.steps, values)
    if before is None or before[0] != book.key or before[2] != values or before[1] >= book.steps:
        return None
    variable = dotted(statement.targets[0])
    written = f"{variable}.data.copy_({source.segment(statement.value)})"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{tell.short(source.flat(statement), 60)}` updates nothing: it binds `{variable}` to a new tensor, and `{shown}` stays "
        "as it is",
        culprit=place.statement_span(f"the new tensor is dropped: `{variable}` is bound anew in the next turn of the loop", "culprit"),
        related=tell.spans(tell.span(book.step_site, "trains the others", "context")),
        tensors=tell.facts(parameters, incident.names),
        explanation=f"An assignment to a name does not change the tensor that the name stood for. The {len(parameters)} parameters of "
        f"`{shown}` hold what they held {book.steps - before[1]} steps ago, while `{tell.optimizer_name(book, incident)}` has trained.",
        fixes=[
            Fix(
                title=f"Write into the parameter: `{tell.short(written, 70)}`",
                safety="unsafe",
                patch=replaced(source, [(statement, written)]),
            )
        ],
    )


def _rebinding(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt, str]]:
    """Assignments of a loop's variable that nothing reads after it, and the module whose parameters the variable runs over."""
    for source in sources:
        for loop in [node for node in ast.walk(source.tree or ast.Module([], [])) if isinstance(node, ast.For)]:
            runs = _runs_over(loop)
            for node in ast.walk(loop) if runs else ():
                if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                    target = node.targets[0].id
                    read = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
                    if target in runs and target in read and len(read & set(runs)) > 1 and not read_later(source, loop, node, target):
                        yield source, node, runs[target]


def _runs_over(loop: ast.For) -> dict[str, str]:
    """The variables of `for a, b in zip(x.parameters(), y.parameters())`, each with its module."""
    call, target = loop.iter, loop.target
    if (
        not isinstance(call, ast.Call)
        or dotted(call.func) != "zip"
        or not isinstance(target, ast.Tuple)
        or len(target.elts) != len(call.args)
    ):
        return {}
    found = {}
    for variable, values in zip(target.elts, call.args, strict=True):
        over = dotted(values.func) if isinstance(values, ast.Call) and not values.args else None
        if isinstance(variable, ast.Name) and over is not None and over.endswith(".parameters"):
            found[variable.id] = over.removesuffix(".parameters")
    return found


def _module(incident: Incident, written: str, known: set[int]) -> tuple[str, list[torch.Tensor]] | None:
    """The one module of that name, if no optimizer has its parameters."""
    last = written.rpartition(".")[2]
    found: dict[int, tuple[str, list[torch.Tensor]]] = {}
    for variable, root in incident.names.modules:
        for path, module in named_modules(root):
            full = ".".join(part for part in (variable, path) if part)
            if full.rpartition(".")[2] == last:
                found.setdefault(id(module), (full, list(parameters_in(module))))
    if len(found) != 1:
        return None
    shown, parameters = next(iter(found.values()))
    return (shown, parameters) if parameters and not any(id(p) in known for p in parameters) else None
