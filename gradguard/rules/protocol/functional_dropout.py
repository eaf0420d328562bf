"""Dropout called as a function that does not ask for the mode: it drops in eval mode as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from gradguard.diagnosis import Diagnosis, Fix
from gradguard.evidence.bindings import full_name
from gradguard.evidence.source import assignments_to, dotted
from gradguard.evidence.syntax import FUNCTIONS, Source
from gradguard.fixes.edits import edit_of, patched
from gradguard.rules.incident import Incident
from gradguard.rules.protocol.places import class_node, statement_span

_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
_ATTENTION = "scaled_dot_product_attention"


def functional_dropout(incident: Incident, module: nn.Module, code: str, name: str) -> Diagnosis | None:
    """The call in the class of a module that has just run in eval mode, if there is one that never asks for the mode."""
    found = class_node(type(module))
    if found is None:
        return None
    source, definition = found
    call = next((call for call in _calls(source, definition) if not _asks(source, call)), None)
    if call is None:
        return None
    shown = incident.names.of(module) or type(module).__name__
    written = dotted(call.func) or "dropout"
    attention = written.endswith(_ATTENTION)
    span = statement_span(
        source,
        call,
        f"`training` is True by default: `{type(module).__name__}.eval()` does not reach it"
        if not attention
        else "the dropout probability is the same in eval mode",
    )
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{written}` in `{type(module).__name__}` drops in eval mode too: validation and prediction of `{shown}` are random",
        culprit=span,
        explanation="A function has no mode of its own. `eval()` sets `self.training` of modules; whoever calls the function must hand it "
        "on.",
        fixes=[
            Fix(
                title="pass `training=self.training`" if not attention else "pass `dropout_p=... if self.training else 0.0`",
                safety="unsafe",
                patch=None if attention else _patch(source, call),
                detail="Or use `nn.Dropout`, which does. Where dropout is wanted in eval mode, `training=True` says so.",
            )
        ],
        confidence="likely",
    )


def _calls(source: Source, definition: ast.ClassDef) -> Iterator[ast.Call]:
    for method in definition.body:
        if isinstance(method, FUNCTIONS):
            for node in ast.walk(method):
                if isinstance(node, ast.Call):
                    full = full_name(source, dotted(node.func) or "")
                    if full.startswith("torch.nn.functional.") and full.rpartition(".")[2] in (*_DROPOUTS, _ATTENTION):
                        yield node


def _asks(source: Source, call: ast.Call) -> bool:
    """Whether the call says what is to be done in eval mode, whatever that is."""
    if (dotted(call.func) or "").endswith(_ATTENTION):
        given = _given(call, "dropout_p", 4)
        return not isinstance(given, ast.Constant) or not given.value
    probability = _given(call, "p", 1)
    if isinstance(probability, ast.Constant) and not probability.value:
        return True
    if len(call.args) > 2 or any(keyword.arg in ("training", None) for keyword in call.keywords):
        return True
    if any("training" in source.flat(above.test) for above in source.ancestors(call) if isinstance(above, (ast.If, ast.IfExp))):
        return True
    texts = [] if probability is None else [source.flat(probability)]
    scope = next((above for above in source.ancestors(call) if isinstance(above, FUNCTIONS)), None)
    if isinstance(probability, ast.Name) and scope is not None:
        texts += [source.flat(item) for item in assignments_to(scope, probability.id)]
    return any("training" in text for text in texts)


def _given(call: ast.Call, name: str, position: int) -> ast.expr | None:
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return named if named is not None else call.args[position] if len(call.args) > position else None


def _patch(source: Source, call: ast.Call) -> str | None:
    text = source.segment(call)
    if text is None or "\n" in text or not text.endswith(")"):
        return None
    return patched(source, edit_of(call, f"{text[:-1]}, training=self.training)"))
