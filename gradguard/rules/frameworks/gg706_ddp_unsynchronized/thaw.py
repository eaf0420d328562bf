"""Parameters that were frozen when DDP was made and require grad since: whether they were, and which statement switched them on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve, span_of
from gradguard.analysis.program.expressions import is_constant
from gradguard.analysis.program.index import Program, Write, program_of, programs_of
from gradguard.analysis.program.user_calls import user_files
from gradguard.analysis.program.user_files import sources_of
from gradguard.core.diagnosis import SourceSpan

_LABEL = "unfreezes parameters that DDP has no hooks on"


def was_frozen(ddp: Any, parameter: torch.Tensor) -> bool:
    """Whether DDP knows this parameter from its construction (it has then hooked those that required grad, and no others)."""
    return any(parameter is known for known in getattr(ddp, "_module_parameters", ()))


def place(incident: Incident, parameters: list[torch.Tensor]) -> SourceSpan | None:
    """The statement that switched requires_grad on: as recorded, else the only one in the source."""
    sites = {known[1] for p in parameters if (known := incident.journal.toggle_of(p)) is not None and known[0]}
    seen = resolve(sites.pop()) if len(sites) == 1 else None
    program = program_of(seen.source) if seen is not None else None
    writes = [each for each in program.writes("requires_grad") if each.node in (seen.node, seen.statement)] if program and seen else []
    if seen is not None and not any(_told_by(program, each) for each in writes if program is not None):
        return seen.statement_span(_LABEL, "culprit")
    found = [span_of(file, node, label=_LABEL, role="culprit") for file in user_files(incident) for node in _switches(incident, file)]
    found = [span for span in found if span is not None]
    return found[0] if len(found) == 1 else None


def _switches(incident: Incident, file: str) -> Iterator[ast.AST]:
    """Statements that set requires_grad to True; of a helper that is given the value, its calls that give True."""
    program = program_of(file)
    for write in program.writes("requires_grad") if program is not None else ():
        if is_constant(write.value, True):
            yield write.node
        told = None if program is None else _told_by(program, write)
        for caller in programs_of(sources_of(user_files(incident))) if told is not None else ():
            for call in caller.calls(told[0].name) if told is not None else ():
                if told is not None and is_constant(caller.given(call, *told), True):
                    yield call


def _told_by(program: Program, write: Write) -> tuple[ast.FunctionDef, str] | None:
    """The helper that the value is given to, and the parameter."""
    function, value = program.function(write.node), write.value
    parameters = program.reaching(value) if isinstance(value, ast.Name) else frozenset()
    given = isinstance(value, ast.Name) and any(each.kind == "parameter" for each in parameters)
    return (function, value.id) if given and isinstance(function, ast.FunctionDef) and isinstance(value, ast.Name) else None
