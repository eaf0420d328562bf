"""An average that only rebinds the loop's variable: `for q, k in zip(...): k = k * m + q * (1 - m)`. Part of GG611."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.tensor_expressions import Evaluator
from gradguard.analysis.places.source import assignments_to, at_line, dotted
from gradguard.analysis.program.bindings import names_read
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import named_modules, parameters_in
from gradguard.fixes.edits import replaced
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.tensor_state import few_values, version_of
from gradguard.rules import wording
from gradguard.rules.protocol.rebound import Dropped, dropped
from gradguard.rules.spans import in_tiers, written_in

_OVER_PARAMETERS = re.compile(r"\bfor\b[^:]*\.(?:named_parameters|parameters|state_dict)\(\)")
_SEEN = "GG611 copies"  # what the parameters in question held at the survey before


def rebound_copy(incident: Incident, book: Book, code: str, name: str) -> Diagnosis | None:
    """The one such statement, once the parameters that it was to move have stayed the same while others were trained."""
    known = incident.memory["ledger"].trained_ids()
    if not any(_rebinding(written_in(incident, _OVER_PARAMETERS.search))):
        return None
    if all(id(p) in known for _, root in incident.names.modules for p in parameters_in(root)):
        return None  # every parameter alive is some optimizer's: no copy is there
    places: dict[tuple[str, int], tuple[Dropped, dict[str, None]]] = {}
    for each, held in _rebinding(next(in_tiers(incident))):
        places.setdefault((each.source.filename, each.statement.lineno), (each, {}))[1][held] = None
    if len(places) != 1:
        return None
    (at, (lost, modules)), *_ = places.items()
    place, source = at_line(*at), lost.source
    if place is None:
        return None
    if not any(version_of(p) > version for ref, version in book.first_versions if (p := ref()) is not None):
        return None
    idle = [found for held in modules if (found := _module(incident, held, known)) is not None]
    if len(idle) != 1:
        return None
    shown, parameters = idle[0]
    runs = _runs_over(lost.loop.target, lost.loop.iter, source)
    if lost.target not in runs and not _is_average(lost, runs):
        return None
    values = [(id(p), few_values(p)) for p in parameters]
    before, incident.memory[_SEEN] = incident.memory.get(_SEEN), (book.key, book.steps, values)
    if before is None or before[0] != book.key or before[2] != values or before[1] >= book.steps:
        return None
    variable = next((name for name, module in runs.items() if module.rpartition(".")[2] == shown.rpartition(".")[2]), lost.target)
    written = f"{variable}.data.copy_({source.segment(lost.value)})"
    what = f"it binds `{lost.target}` to a new tensor" if lost.target else "it computes a new tensor and drops it"
    label = f"the new tensor is dropped: nothing reads `{lost.target}`" if lost.target else "the new tensor is dropped"
    if lost.target in runs:
        label = f"the new tensor is dropped: `{lost.target}` is bound anew in the next turn of the loop"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{wording.short(source.flat(lost.statement), 60)}` updates nothing: {what}, and `{shown}` stays as it is",
        culprit=place.statement_span(label, "culprit"),
        related=wording.spans(wording.span(book.step_site, "trains the others", "context")),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"An assignment to a name does not change the tensor that the name stood for. The {len(parameters)} parameters of "
        f"`{shown}` hold what they held {book.steps - before[1]} steps ago, while `{wording.optimizer_name(book, incident)}` has trained.",
        fixes=[
            Fix(
                title=f"Write into the parameter: `{wording.short(written, 70)}`",
                safety="unsafe",
                patch=replaced(source, [(lost.statement, written)]),
            )
        ],
    )


def _is_average(lost: Dropped, runs: dict[str, str]) -> bool:
    """Whether what is dropped is an update: of equal parameters an average gives the same again, and a distance between them does not."""
    equal = torch.arange(1.0, 7.0).reshape(2, 3)
    values: dict[str, Any] = dict.fromkeys(names_read(lost.source, [lost.value]), 0.5)  # the weights
    found = Evaluator(values | dict.fromkeys(runs, equal)).of(lost.value)
    return isinstance(found, torch.Tensor) and found.shape == equal.shape and not found.is_meta and torch.allclose(found, equal)


def _rebinding(sources: list[Source]) -> Iterator[tuple[Dropped, str]]:
    """Statements that compute something of the parameters that a loop runs over, and drop it; with each module it may be meant for."""
    for source in sources:
        for found in dropped(source):
            runs = _runs_over(found.loop.target, found.loop.iter, source)
            read = {each.id for each in ast.walk(found.value) if isinstance(each, ast.Name)}
            if found.target in runs:
                held = [runs[found.target]] if found.target in read else []
            else:
                held = [module for name, module in runs.items() if name in read]
            if len(read) > 1:
                yield from ((found, module) for module in held)


def _runs_over(target: ast.expr, over: ast.expr, source: Source) -> dict[str, str]:
    """The variables of a loop over parameters, each with its module: `for a, (_, b) in zip(x.parameters(), y.named_parameters())`."""
    called = dotted(over.func) if isinstance(over, ast.Call) else None
    if isinstance(over, ast.Call) and called in ("list", "tuple", "reversed", "iter") and len(over.args) == 1:
        return _runs_over(target, over.args[0], source)
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    if isinstance(over, ast.Call) and called == "enumerate" and len(parts) == 2 and over.args:
        return _runs_over(parts[1], over.args[0], source)
    if isinstance(over, ast.Call) and called == "zip" and len(parts) == len(over.args):
        return {
            name: module for part, each in zip(parts, over.args, strict=True) for name, module in _runs_over(part, each, source).items()
        }
    if isinstance(over, ast.Name):  # a list of them, made before
        around = next((above for above in source.ancestors(over) if isinstance(above, FUNCTIONS)), source.tree)
        made = [each for each in assignments_to(around, over.id) if isinstance(each, ast.Assign)] if around is not None else []
        return _runs_over(target, made[0].value, source) if len(made) == 1 and not isinstance(made[0].value, ast.Name) else {}
    if not isinstance(over, ast.Call) or over.args or not isinstance(over.func, ast.Attribute):
        return {}
    owner: ast.expr = over.func.value
    pairs = over.func.attr in ("named_parameters", "items")
    if over.func.attr in ("items", "values"):
        if not isinstance(owner, ast.Call) or not isinstance(owner.func, ast.Attribute) or owner.func.attr != "state_dict":
            return {}
        owner = owner.func.value
    elif over.func.attr not in ("parameters", "named_parameters"):
        return {}
    variable = parts[1] if pairs and len(parts) == 2 else target
    held = dotted(owner)
    return {variable.id: held} if isinstance(variable, ast.Name) and held is not None else {}


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
