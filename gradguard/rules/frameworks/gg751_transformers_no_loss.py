"""# GG751 transformers-no-loss

## What it is
A transformers model was called without `labels`, so its output's `loss` is None, and the None is used as the loss.

## Why it is wrong
These models compute a loss only from an argument that is called `labels` (or, for a few, `start_positions` and the like). A
batch key of another name is dropped or goes unused.

## Example
    batch = {"input_ids": ids, "label": y}
    outputs = model(input_ids=batch["input_ids"])
    outputs.loss.backward()

## Use instead
    batch = {"input_ids": ids, "labels": y}
    outputs = model(**batch)

## Fix safety
Unsafe: the model is trained from now on, which is the purpose.

## When it speaks, what silences it
When None is used where a model output with `loss=None` and `logits` stands in the frames around the error, and when
transformers' own Trainer says that the model returned no loss: it drops what the model's forward has no argument for.
"""

from __future__ import annotations

import ast
import inspect
from collections import UserDict
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import function_def, span_of
from gradguard.analysis.program.expressions import inside, is_constant
from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import UNKNOWN, function_code, in_class, namespace, peek
from gradguard.fixes.edits import respelt
from gradguard.rules.base import Rule
from gradguard.rules.spans import in_tiers

CODE, NAME = "GG751", "transformers-no-loss"


def recognise(incident: Incident) -> Diagnosis | None:
    """The output without a loss, the batch's key that was meant to be `labels`, and where it is written."""
    from_trainer = "did not return a loss from the inputs" in incident.message
    output = _lossless(incident)
    if output is None and not from_trainer:
        return None
    key, value = _label_key(incident)
    if from_trainer and key is None:
        return _dropped(incident)
    name = output or "the model's output"
    written = _written(incident, key) if key is not None else None
    place = incident.place
    culprit = written if written is not None else (place.span("uses a loss that is None", "culprit") if place is not None else None)
    related: list[SourceSpan] = []
    if written is not None and place is not None:
        related.append(place.span(f"`{name}.loss` is None here", "backward"))
    said = f": the batch has `{key}`, the model takes `labels`" if key is not None else ": it was called without `labels`"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{name}.loss` is None{said}" if output else f"the model returned no loss{said}",
        culprit=culprit,
        related=related,
        explanation=(
            "A transformers model computes its loss only when it is given "
            "`labels`. Without them `loss` is None and only the logits are there."
        ),
        fixes=[
            Fix(
                title=f'Name the key `"labels"`, in place of `"{key}"`' if key else "Pass `labels=` to the model",
                safety="unsafe",
                patch=_renamed(written, key),
            )
        ],
        notes=[] if value is None else [f"`{key}` holds {value}"],
    )


def _dropped(incident: Incident) -> Diagnosis:
    """Transformers' Trainer hands on only what the model's forward has a name for; the rest of a sample it leaves out."""
    keys = _unknown_keys(incident)
    name, span = next(iter(keys.items())) if len(keys) == 1 else (None, None)
    place = incident.place
    given = (
        f": `{name}` of the dataset's samples is no argument of the model and is left out" if name else ": it was called without `labels`"
    )
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"the model returned no loss{given}",
        culprit=span,
        related=[] if place is None else [place.span("the model is trained here, and returns no loss", "backward")],
        explanation="A transformers model computes its loss only when it is given `labels`. The Trainer hands on those columns of a sample "
        "that the model's forward has an argument for, and drops the others.",
        fixes=[
            Fix(title=f'If `{name}` is what is to be predicted, name the key `"labels"`, in place of `"{name}"`', safety="unsafe")
            if name
            else Fix(title="Give the samples of the dataset a column `labels`, by that name", safety="manual")
        ],
    )


def _unknown_keys(incident: Incident) -> dict[str, SourceSpan]:
    """The keys that the dataset's own `__getitem__` writes into its samples and that are no arguments of the model, with their places."""
    trainer = next((value for view in incident.frames if peek(value := view.locals.get("self"), "train_dataset") is not UNKNOWN), None)
    code = function_code(in_class(type(peek(trainer, "train_dataset")), "__getitem__"))
    forward = in_class(type(peek(trainer, "model")), "forward")
    tree = function_def(code) if code is not None and USER_FILES[code.co_filename] else None
    if code is None or tree is None or not callable(forward):
        return {}
    known = inspect.signature(forward).parameters
    return {
        key.value: span_of(code.co_filename, key, label="the model's forward has no argument of this name", role="culprit")
        for node in inside(tree, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value not in {*known, "label", "label_ids"}
    }


def _lossless(incident: Incident) -> str | None:
    for name, value in incident.names.bindings:
        if (
            any(base.__name__ == "ModelOutput" for base in type(value).__mro__)
            and peek(value, "loss", 0) is None
            and peek(value, "logits") is not UNKNOWN
        ):
            return name
    return None


def _label_key(incident: Incident) -> tuple[str | None, str | None]:
    """A batch's key that looks like the labels and is not called so."""
    for view in incident.user_frames:
        for value in view.locals.values():
            batch = _batch(value)
            if "labels" in batch:
                continue
            for key, tensor in batch.items():
                if key.rstrip("s").lower() in ("label", "target", "y", "gold", "answer", "class", "tag"):
                    return key, f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else ""
    return None, None


def _batch(value: Any) -> dict[str, Any]:
    """What a dictionary, or transformers' own, holds by name; nothing where there is no tensor among the first."""
    held = namespace(peek(value, "data") if isinstance(value, UserDict) else value)
    return held if any(isinstance(item, torch.Tensor) for item in list(held.values())[:8]) else {}


def _written(incident: Incident, key: str) -> SourceSpan | None:
    """The line that puts the key into the batch: `batch["label"] = ...`, else the one dict display that has it."""
    for sources in in_tiers(incident):
        stores: list[tuple[str, ast.AST]] = []
        displays: list[tuple[str, ast.AST]] = []
        for file, tree in ((source.filename, source.tree) for source in sources):
            stores += [(file, node) for node in inside(tree, ast.Assign) if any(_subscript(target) == key for target in node.targets)]
            displays += [(file, node) for node in inside(tree, ast.Dict) if any(is_constant(each, key) for each in node.keys)]
        found = stores or displays
        if found:
            return span_of(found[-1][0], found[-1][1], label=f'the model does not know the key "{key}"', role="culprit")
    return None


def _renamed(written: SourceSpan | None, key: str | None) -> str | None:
    """The diff that writes `labels` for the key where it is stored, or where the dict is displayed."""
    spelt = [f'["{key}"] =', f"['{key}'] =", f'"{key}":', f"'{key}':"]
    return next((patch for old in spelt if key and (patch := respelt(written, old, old.replace(key, "labels")))), None)


def _subscript(target: ast.expr) -> object:
    return target.slice.value if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) else None


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a transformers model was called without labels and its loss is None",
    recognise=recognise,
    messages=("nonetype", "did not return a loss from the inputs"),
    priority=-1,
)
