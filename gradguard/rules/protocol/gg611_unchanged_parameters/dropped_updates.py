"""An update that is computed and dropped: `for p in ...: p = p - lr * p.grad`, `k = m * k + (1 - m) * q`. Part of GG611."""

from __future__ import annotations

import ast
from itertools import chain, islice, takewhile
from typing import Any, TypeGuard

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.analysis.program.destinations import dropped_by
from gradguard.analysis.program.index import Program, program_of
from gradguard.analysis.program.syntax import COMPREHENSIONS
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import parameters_in
from gradguard.fixes.edits import replaced
from gradguard.monitors.findings import TraceNext
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.tensor_state import few_values
from gradguard.monitors.unused_updates import UpdateDropped
from gradguard.rules import wording

_MOST_COPIES = 16
_OTHERS = (*COMPREHENSIONS, ast.Lambda, ast.Call, ast.Tuple, ast.List, ast.Dict)  # what stands inside is not their value


class _Copies(dict[int, Any]):
    """What they held at the survey before, by id."""


def trace_copies(incident: Incident, book: Book) -> None:
    """Has the next steps traced where tensors that no optimizer has, of the trained parameters' shapes, stay as they are: what is computed
    from them is to be seen."""
    ledger = incident.notes[Ledger]
    known, shapes = ledger.trained_ids(), {p.shape for p in book.parameters()}
    owned = (p for _, value in incident.names.bindings if isinstance(value, nn.Module) for p in parameters_in(value))
    bare = (tensor for _, tensor in incident.names.tensor_bindings() if not tensor.requires_grad)
    copies = islice((p for p in chain(owned, bare) if id(p) not in known and p.shape in shapes), _MOST_COPIES)
    before, now = incident.notes[_Copies], _Copies((id(p), few_values(p)) for p in copies)
    incident.notes.put(now)
    if any(before.get(key) == values for key, values in now.items()):
        ledger.wake()
        ledger.report([TraceNext(None)])


def dropped_update(incident: Incident, finding: UpdateDropped, code: str, name: str) -> Diagnosis | None:
    """The statement that drops it; a value that something may read at another time is none."""
    computed = resolve(finding.stack[0])
    place = dropped_by(finding.stack)
    parameters = [p for ref in finding.parameters if (p := ref()) is not None]
    if computed is None or not parameters or (place is None and computed.source is not None):
        return None
    at = place or computed
    names = wording.parameter_names(parameters, incident.names)
    shown = wording.common_prefix(names)
    whose = f"`{shown}`" if shown else wording.listed(names, len(parameters))
    bound = at.targets[0] if at.targets and at.targets[0].isidentifier() else None
    kept = at.targets[0] if at.targets and not bound else None
    several = len(parameters) > 1 and not _is_whole(getattr(at.statement, "value", None), program_of(at.source), computed)
    new, them, dropped = (
        ("new tensors", "them", "the new tensors are dropped") if several else ("a new tensor", "it", "the new tensor is dropped")
    )
    if bound:
        what, label = f"it binds `{bound}` to {new}", f"{dropped}: nothing reads `{bound}` after this"
    elif kept:
        what, label = f"it puts {new} into `{kept}`, which nothing reads", f"{dropped}: nothing reads this item"
    else:
        what, label = f"it computes {new} and drops {them}", dropped
    text = wording.short(at.text if at.source is None or at.statement is None else at.source.flat(at.statement), 60)
    have = "have" if len(parameters) > 1 else "has"
    stay = "stays as it is" if shown or len(parameters) == 1 else "stay as they are"
    steps = f"{finding.steps} steps" if finding.book is not None else f"{finding.steps} backward calls, and no optimizer has stepped"
    since = f"{wording.listed(names, len(parameters))} {have} not been written in {steps}"
    beside = "" if finding.book is None else f", while `{wording.optimizer_name(finding.book, incident)}` has trained"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{text}` updates nothing: {what}, and {whose} {stay}",
        culprit=at.statement_span(label, "culprit"),
        related=wording.spans(
            computed.span("computes it", "context") if computed.line != at.line or computed.file != at.file else None,
            None if finding.book is None else wording.span(finding.book.step_site, "trains the others", "context"),
        ),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"An assignment to a name does not change the tensor that the name stood for. {since}{beside}.",
        fixes=[_fix(at, computed, finding, shown)],
        confidence="certain" if place is not None else "likely",
    )


def _fix(at: ResolvedSite, computed: ResolvedSite, finding: UpdateDropped, shown: str) -> Fix:
    """The same value written into the parameter, by the name that the function has for it."""
    statement, variable, program = at.statement, finding.variable, program_of(at.source)
    value = getattr(statement, "value", None)
    alone = statement is not None and statement is computed.statement and variable is not None
    if program is None or not alone or not _is_whole(value, program, computed):
        into = f"{shown or '...'}.load_state_dict(...)" if any("[" in target for target in at.targets) else "parameter.data.copy_(...)"
        return Fix(title=f"Write each result into its parameter: `{into}`", safety="unsafe")
    text, quiet = program.source.segment(value), program.grad_mode(value) == {"no_grad"}
    written = f"{variable}.copy_({text})" if quiet else f"{variable}.data.copy_({text})"
    if quiet and isinstance(value, ast.BinOp) and dotted(value.left) == variable and isinstance(value.op, (ast.Add, ast.Sub)):
        written = f"{variable} {'+' if isinstance(value.op, ast.Add) else '-'}= {program.source.segment(value.right)}"
    patch = replaced(program.source, [(statement, written)]) if statement is not None else None
    return Fix(title=f"Write into the parameter: `{wording.short(written, 70)}`", safety="unsafe", patch=patch)


def _is_whole(value: object, program: Program | None, computed: ResolvedSite) -> TypeGuard[ast.expr]:
    """Whether a statement's value is what was computed, and no list or function of it."""
    if not isinstance(value, ast.expr) or computed.node is None or program is None:
        return False
    around = list(takewhile(lambda each: each is not value, (computed.node, *program.source.ancestors(computed.node))))
    return not any(isinstance(each, _OTHERS) for each in [*around[1:], *([value] if around else [])])
