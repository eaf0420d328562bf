"""Parameters that were frozen when DDP was made and require grad since: whether they were, and which statement switched them on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import module_ast, resolve, span_of
from gradguard.analysis.program.syntax import FUNCTIONS, load
from gradguard.analysis.program.user_calls import calls, user_files
from gradguard.core.diagnosis import SourceSpan

_LABEL = "unfreezes parameters that DDP has no hooks on"


def was_frozen(ddp: Any, parameter: torch.Tensor) -> bool:
    """Whether DDP knows this parameter from its construction (it has then hooked those that required grad, and no others)."""
    return any(parameter is known for known in getattr(ddp, "_module_parameters", ()))


def place(incident: Incident, parameters: list[torch.Tensor]) -> SourceSpan | None:
    """The statement that switched requires_grad on: as recorded, else the only one in the source."""
    sites = {known[1] for p in parameters if (known := incident.journal.toggle_of(p)) is not None and known[0]}
    seen = resolve(sites.pop()) if len(sites) == 1 else None
    if seen is not None and not _flag(seen.file, seen.node, getattr(seen, "statement", None)):
        return seen.statement_span(_LABEL, "culprit")
    found = [span_of(file, node, label=_LABEL, role="culprit") for file in user_files(incident) for node in _switches(incident, file)]
    found = [span for span in found if span is not None]
    return found[0] if len(found) == 1 else None


def _switches(incident: Incident, file: str) -> Iterator[ast.AST]:
    """Statements that set requires_grad to True; of a helper that is given the value, its calls that give True."""
    tree = module_ast(file)
    for node in ast.walk(tree) if tree is not None else ():
        value = _set_to(node)
        if value is None:
            continue
        if isinstance(value, ast.Constant):
            if value.value is True:
                yield node
            continue
        helper = _flag(file, value, node)
        for _, call in calls(incident, helper[0]) if helper is not None else ():
            given = [word.value for word in call.keywords if word.arg == helper[1]] if helper is not None else []
            given += call.args[-1:] if not given else []
            if any(isinstance(each, ast.Constant) and each.value is True for each in given):
                yield call


def _set_to(node: ast.AST) -> ast.expr | None:
    """The value that a statement gives to some parameters' requires_grad."""
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in node.targets):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requires_grad_":
        given = [*node.args, *(word.value for word in node.keywords)]
        return given[0] if given else ast.Constant(True)
    return None


def _flag(file: str, value: ast.AST | None, node: ast.AST | None) -> tuple[str, str] | None:
    """The helper and its argument, where the value is what a function was given."""
    value = (_set_to(node) if node is not None else None) or value
    source = load(file)
    if source is None or node is None or not isinstance(value, ast.Name):
        return None
    function = next((above for above in source.ancestors(node) if isinstance(above, FUNCTIONS)), None)
    arguments = [] if function is None else [*function.args.args, *function.args.kwonlyargs]
    name = getattr(function, "name", None)
    return (name, value.id) if name is not None and any(argument.arg == value.id for argument in arguments) else None
