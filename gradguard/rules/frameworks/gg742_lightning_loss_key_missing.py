"""# GG742 lightning-loss-key-missing

## What it is
Under automatic optimization `training_step` returns a dict without the key `loss`.

## Why it is wrong
Lightning runs backward on `result["loss"]`; a loss under another name is a number like any other.

## Example
    def training_step(self, batch, batch_idx):
        return {"train_loss": loss}

## Use instead
    def training_step(self, batch, batch_idx):
        return {"loss": loss}

## Fix safety
Safe.

## When it speaks, what silences it
When Lightning raises.
"""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import function_def, module_ast, segment, span_of
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.syntax import FUNCTIONS, load
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import UNKNOWN, function_code, in_class
from gradguard.fixes.edits import replaced
from gradguard.rules import lightning_manual
from gradguard.rules.base import Rule

CODE, NAME = "GG742", "lightning-loss-key-missing"


def recognise(incident: Incident) -> Diagnosis | None:
    """The dict that training_step returned, and where it is written."""
    module = _module(incident)
    code = None if module is None else function_code(in_class(type(module), "training_step"))
    if code is None:
        return Diagnosis(
            code=CODE, name=NAME, headline=("`training_step` returns a dict without the key `loss`"), explanation=_WHY, fixes=[_FIX]
        )
    returned = _returned_dicts(code.co_filename, function_def(code), type(module))
    keys = _actual_keys(incident) or sorted({key for _, _, found in returned for key in found})
    like = next((key for key in keys if "loss" in key), None)
    culprit: SourceSpan | None = None
    if returned:
        file, node, _ = returned[0]
        culprit = span_of(file, node, label="this dict has no key `loss`", role="culprit")
    said = f" (its keys: {', '.join(f'`{key}`' for key in keys)})" if keys else ""
    fix = _FIX
    if like is not None:
        patch = None if not returned else _renamed(returned[0][0], returned[0][1], keys, like)
        fix = Fix(title=f'Return the loss as `"loss"`, in place of `"{like}"`', safety="safe", patch=patch)
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`training_step` of `{type(module).__name__}` returns a dict without the key `loss`{said}",
        culprit=culprit,
        explanation=_WHY,
        fixes=[fix],
    )


_WHY = (
    'Under automatic optimization Lightning calls backward on `result["loss"]` of what `training_step` returns, '
    "a loss under another name is only kept."
)
_FIX = Fix(title='Return the loss itself, or a dict with the key `"loss"`', safety="safe")


def _renamed(file: str, node: ast.AST, keys: list[str], like: str) -> str | None:
    """The diff that gives the key of the loss its right name: the key as written, or the one that is computed (an f-string)."""
    source = load(file)
    if source is None or not isinstance(node, ast.Dict):
        return None
    written = [key for key in node.keys if isinstance(key, ast.Constant) and key.value == like]
    computed = [key for key in node.keys if key is not None and not isinstance(key, ast.Constant)]
    others = {key.value for key in node.keys if isinstance(key, ast.Constant)}
    found = written or (computed if set(keys) - others == {like} else [])
    return replaced(source, [(found[0], '"loss"')]) if len(found) == 1 else None


def _module(incident: Incident) -> Any:
    for view in incident.frames:
        for value in list(view.locals.values()):
            for candidate in (value, lightning_manual.module_of(value)):
                if _steps(candidate) and in_class(type(candidate), "configure_optimizers") is not UNKNOWN:
                    return candidate
    return next((module for module in incident.models if _steps(module)), None)


def _steps(value: Any) -> bool:
    return in_class(type(value), "training_step") is not UNKNOWN


def _actual_keys(incident: Incident) -> list[str]:
    """The keys of the dict that Lightning was about to take the loss from: it stands in the innermost frame that has one."""
    for view in incident.frames:
        for value in view.locals.values():
            if type(value) is dict and value and all(isinstance(key, str) for key in value) and "loss" not in value:
                return sorted(value)
        if view.is_user:
            break
    return []


def _returned_dicts(file: str, function: ast.AST | None, owner: type, depth: int = 0) -> list[tuple[str, ast.expr, list[str]]]:
    """The dict displays that a function returns, its own or those of the methods and functions whose result it returns."""
    found: list[tuple[str, ast.expr, list[str]]] = []
    if function is None or depth > 3 or module_ast(file) is None:
        return found
    program = program_of(file)
    returned = program.returns(function) if program is not None and isinstance(function, FUNCTIONS) else []
    for value in (each for node in returned if program is not None for each in program.values(node)):
        if isinstance(value, ast.Dict):
            found.append((file, value, [_key(file, key) for key in value.keys if key is not None]))
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
            found.append((file, value, [item.arg for item in value.keywords if item.arg]))
        elif isinstance(value, ast.Call) and program is not None:
            names = {name.rpartition(".")[2] for name in program.names_of(value.func) if "." in name}
            methods = [code for name in names if (code := function_code(in_class(owner, name))) is not None]
            for code in methods:
                found += _returned_dicts(code.co_filename, function_def(code), owner, depth + 1)
            for callee in program.callees(value) if not methods else ():
                found += _returned_dicts(file, callee, owner, depth + 1) if isinstance(callee, FUNCTIONS) else []
    return found


def _key(file: str, key: ast.expr) -> str:
    if isinstance(key, ast.Constant):
        return str(key.value)
    return segment(file, key) or "?"


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="training_step returns a dict without the key loss",
    recognise=recognise,
    messages=("the 'loss' key needs to be present",),
)
