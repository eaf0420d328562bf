"""Dropout called as a function that does not ask for the mode: it drops in eval mode as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import assignments_to, dotted, resolve
from gradguard.analysis.program.bindings import full_name
from gradguard.analysis.program.syntax import FUNCTIONS, Source, load
from gradguard.core.callsite import USER_FILES, CallSite
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import UNKNOWN, follow, function_code, in_class, namespace, unwrapped
from gradguard.fixes.edits import edit_of, patched
from gradguard.rules.protocol.settled import is_conditional
from gradguard.rules.spans import function_around, statement_span

_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
_ATTENTION = "scaled_dot_product_attention"
_DEEPEST = 3  # functions called by functions


def functional_dropout(incident: Incident, module: nn.Module, code: str, name: str) -> Diagnosis | None:
    """The call in the class of a module that has just run in eval mode, if there is one that never asks for the mode."""
    found = next(((source, call) for source, call in _candidates(incident, type(module)) if not _asks(source, call)), None)
    if found is None:
        return None
    source, call = found
    shown = incident.names.of(module) or type(module).__name__
    written = dotted(call.func) or "dropout"
    attention = written.endswith(_ATTENTION)
    around = function_around(source, call)
    kind = type(module).__name__
    in_method = isinstance(around, FUNCTIONS) and any(each.arg == "self" for each in around.args.args)
    where = f"`{kind}`" if in_method else f"`{getattr(around, 'name', 'a function')}`, which `{kind}` calls,"
    title = "pass `training=self.training`" if not attention else "pass `dropout_p=... if self.training else 0.0`"
    if not in_method:
        title = f"let `{getattr(around, 'name', 'it')}` take the mode and hand it on, and {title} where `{kind}` calls it"
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
        headline=f"`{written}` in {where} drops in eval mode too: validation and prediction of `{shown}` are random",
        culprit=span,
        explanation="A function has no mode of its own. `eval()` sets `self.training` of modules; whoever calls the function must hand it "
        "on.",
        fixes=[
            Fix(
                title=title,
                safety="unsafe",
                patch=None if attention or not in_method else _patch(source, call),
                detail="Or use `nn.Dropout`, which does. Where dropout is wanted in eval mode, `training=True` says so.",
            )
        ],
        confidence="likely",
    )


def _candidates(incident: Incident, kind: type) -> Iterator[tuple[Source, ast.Call]]:
    """Calls of dropout that ran: in a class's forward, then in functions and methods that it calls in any case."""
    ran = {(id(op[2]), op[3]) for op in incident.journal.ops}
    level = [in_class(kind, "forward")]
    for depth in range(_DEEPEST):
        called: list[Any] = []
        for function in map(unwrapped, level):
            code = function_code(function)
            found = None if code is None or not USER_FILES[code.co_filename] else _definition(code)
            if code is None or found is None:
                continue
            source, definition = found
            places = [resolve(CallSite(code, lasti)) for owner, lasti in ran if owner == id(code)]
            for call in (node for node in ast.walk(definition) if isinstance(node, ast.Call)):
                written = dotted(call.func) or ""
                full = full_name(source, written)
                always = not is_conditional(source, call) and function_around(source, call) is definition
                if full.startswith("torch.nn.functional.") and full.rpartition(".")[2] in (*_DROPOUTS, _ATTENTION):
                    # what a forward does in any case has just been done; of input data there is no node to tell
                    seen = any(place is not None and place.call is call for place in places)
                    if (always or seen) if not depth else (always and seen):
                        yield source, call
                elif always and "training" not in source.flat(definition):  # or the mode may be handed on, in whatever form
                    first, _, rest = written.partition(".")
                    there = kind if first == "self" else namespace(function.__globals__).get(first, UNKNOWN)
                    called.append(follow(there, rest) if rest else there)
        level = called


def _definition(code: CodeType) -> tuple[Source, ast.FunctionDef | ast.AsyncFunctionDef] | None:
    source = load(code.co_filename)
    if source is None or source.tree is None:
        return None
    named = (n for n in ast.walk(source.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == code.co_name)
    lines = ((node, [node.lineno, *(each.lineno for each in node.decorator_list)]) for node in named)
    return next(((source, node) for node, starts in lines if code.co_firstlineno in starts), None)


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
    scope = next((above for above in source.ancestors(call) if isinstance(above, FUNCTIONS)), None)
    inside = [] if scope is None else list(ast.walk(scope))
    told = {each.arg for each in inside if isinstance(each, ast.arg)} - {"self"}
    tests = [above.test for above in source.ancestors(call) if isinstance(above, (ast.If, ast.IfExp))]
    tests += [each.test for each in inside if isinstance(each, ast.If) and each.lineno < call.lineno and _leaves(each)]
    if any("training" in source.flat(test) or any(isinstance(n, ast.Name) and n.id in told for n in ast.walk(test)) for test in tests):
        return True  # by the mode, or by what the caller says
    texts = [] if probability is None else [source.flat(probability)]
    if isinstance(probability, ast.Name) and scope is not None:
        texts += [source.flat(item) for item in assignments_to(scope, probability.id)]
    return any("training" in text for text in texts)


def _leaves(branch: ast.If) -> bool:
    return any(isinstance(each, (ast.Return, ast.Raise)) for each in ast.walk(branch))


def _given(call: ast.Call, name: str, position: int) -> ast.expr | None:
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return named if named is not None else call.args[position] if len(call.args) > position else None


def _patch(source: Source, call: ast.Call) -> str | None:
    text = source.segment(call)
    if text is None or "\n" in text or not text.endswith(")"):
        return None
    return patched(source, edit_of(call, f"{text[:-1]}, training=self.training)"))
