"""# GG413 index-out-of-range

## What it is
An embedding is asked for a row that its table does not have, or a loss is given the number of a class for which there is no score.

## Why it is wrong
A table of `n` rows has rows 0 to n - 1, and scores of shape [batch, n] have classes 0 to n - 1. The usual causes are numbers that
count from 1, one id more than was planned for (padding, unknown words), and -1 for "no label". On a GPU the same mistake ends in a
device-side assert that names nothing.

## Example
    words = nn.Embedding(len(vocabulary), 64)      # the padding has the number len(vocabulary)
    words(batch)

## Use instead
    words = nn.Embedding(len(vocabulary) + 1, 64, padding_idx=len(vocabulary))
    words(batch)

## Fix safety
Unsafe: whether the numbers or the size is wrong, only the author knows.

## When it speaks, what silences it
When PyTorch raises, on the CPU.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import only
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.safe_read import named_modules
from gradguard.fixes.edits import replaced, with_argument
from gradguard.rules.base import Rule
from gradguard.rules.spans import attribute_set
from gradguard.torch_compat.private_api import storage_key

CODE, NAME = "GG413", "index-out-of-range"


class Lookup(NamedTuple):
    """What was asked for and what there is.

    Attributes:
        kind: "row" of an embedding's table, "class" of a loss.
        numbers: the indices, of any shape.
        size: how many rows or classes there are.
        table: the embedding's weight, [rows, width]; None for a loss.
        given: the indices as the call got them.
    """

    kind: str
    given: torch.Tensor
    numbers: torch.Tensor
    size: int
    table: torch.Tensor | None


def find(incident: Incident) -> Lookup | None:
    """The tensors of the call that PyTorch refused, read from torch's own frame."""
    for view in incident.all_frames:
        if not view.frame.f_code.co_filename.endswith("functional.py"):
            continue
        if view.code_name == "embedding":
            numbers, table = _tensors(view, "input", "weight")
            if numbers is not None and table is not None:
                return _outside("row", numbers, table.shape[0], table)
        elif view.code_name in ("cross_entropy", "nll_loss"):
            target, scores = _tensors(view, "target", "input")
            if target is not None and scores is not None and scores.dim():
                return _outside("class", target, scores.shape[1 if scores.dim() > 1 else 0], None, view.locals.get("ignore_index"))
    return None


def _tensors(view: FrameView, *names: str) -> list[torch.Tensor | None]:
    found: list[Any] = [view.locals.get(name) for name in names]
    return [each if type(each) in (torch.Tensor, torch.nn.Parameter) else None for each in found]


def _outside(kind: str, given: torch.Tensor, size: int, table: torch.Tensor | None, ignored: object = None) -> Lookup | None:
    numbers = given.detach()
    if isinstance(ignored, int):
        numbers = numbers[numbers != ignored]
    found = Lookup(kind, given, numbers, size, table)
    return found if numbers.numel() and not numbers.is_floating_point() and (_low(found) < 0 or _high(found) >= size) else None


def _low(lookup: Lookup) -> int:
    return int(lookup.numbers.min())


def _high(lookup: Lookup) -> int:
    return int(lookup.numbers.max())


def recognise(incident: Incident) -> Diagnosis | None:
    """The call, and where the table was made."""
    lookup = find(incident)
    return None if lookup is None else render(lookup, incident)


def render(lookup: Lookup, incident: Incident) -> Diagnosis:
    """The diagnosis; the call is what is known for certain, whether the number or the size is wrong is not."""
    place, low, high = incident.place, _low(lookup), _high(lookup)
    wrong, last = (high if high >= lookup.size else low), lookup.size - 1
    module, made = (None, None) if lookup.table is None else _maker(incident, lookup.table)
    owner = f"`{module}` has" if module else "the table has" if lookup.kind == "row" else "the scores have"
    plural = {"row": "rows", "class": "classes"}[lookup.kind]
    related: list[SourceSpan] = []
    if made is not None:
        related.append(made.span(f"makes a table of {lookup.size} rows", "declared"))
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{lookup.kind.capitalize()} {wrong} is asked for, and {owner} {lookup.size} {plural}: 0 to {last}",
        culprit=None if place is None else place.span(f"the numbers here run from {low} to {high}", "culprit"),
        related=related,
        tensors=_named(lookup.given, incident),
        explanation=f"{plural.capitalize()} are numbered from 0, so the last one is {last}. Either the numbers are wrong, or there are "
        f"too few {plural}.",
        fixes=_fixes(lookup, place, made),
        confidence="likely",
    )


def _named(given: torch.Tensor, incident: Incident) -> list[TensorFacts]:
    """The indices by the name of their variable, or of the one that they are all of; nothing where they have none."""
    same = {id(t): name for name, t in reversed(list(incident.names.tensor_bindings())) if _all_of(t, given)}  # the first name of each
    name = incident.names.of(given) or only(same.values())
    return [TensorFacts(name=name, shape=list(given.shape), dtype=str(given.dtype).removeprefix("torch."))] if name is not None else []


def _all_of(tensor: torch.Tensor, given: torch.Tensor) -> bool:
    memory = storage_key(given)
    return memory is not None and storage_key(tensor) == memory and tensor.numel() == given.numel()


def _fixes(lookup: Lookup, place: ResolvedSite | None, made: ResolvedSite | None) -> list[Fix]:
    low, high, size = _low(lookup), _high(lookup), lookup.size
    call = None if place is None else place.call
    target = call.args[1] if call is not None and lookup.kind == "class" and len(call.args) > 1 else None
    if lookup.kind == "class":
        if low < 0 <= high < size:  # where every element is left out, the mean loss is NaN
            return [Fix(title=f"Leave these elements out of the loss: `ignore_index={low}`", safety="unsafe", patch=_ignoring(place, low))]
        if low == 1 and high == size:
            patch = None
            if place is not None and place.source is not None and isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)):
                patch = replaced(place.source, [(target, f"{place.source.flat(target)} - 1")])
            return [Fix(title="Count the classes from 0: subtract 1 from the target", safety="unsafe", patch=patch)]
        bring = Fix(title=f"Bring the targets to 0 to {size - 1}")
        if high < size:
            return [bring]
        return [Fix(title=f"Give the last layer an output for each class: {high + 1} for these targets", safety="unsafe"), bring]
    if low < 0:
        return [Fix(title=f"Replace the negative numbers before the call: {low} is no row (`padding_idx` is a row of the table)")]
    return [
        Fix(title=f"Make the table large enough: {high + 1} rows for these numbers", safety="unsafe", patch=_enlarged(made, size, high)),
        Fix(title=f"Bring the numbers to 0 to {size - 1}"),
    ]


def _ignoring(place: ResolvedSite | None, number: int) -> str | None:
    """A patch for a loss that is called as a function; a module's is set where it is made."""
    call, source = (None, None) if place is None else (place.call, place.source)
    if call is None or source is None or place is None or not (place.callee_full_name or "").startswith("torch."):
        return None
    if not call.args or any(keyword.arg in ("ignore_index", None) for keyword in call.keywords):
        return None
    return with_argument(source, call, f"ignore_index={number}")


def _enlarged(made: ResolvedSite | None, size: int, high: int) -> str | None:
    """`Embedding(n + 1, ...)` where one row is missing, and the larger number where the size is written as one."""
    source = None if made is None else made.source
    for call in inside(None if made is None else made.statement, ast.Call):
        first = call.args[0] if call.args else None
        if source is None or first is None or not source.flat(call.func).endswith("Embedding"):
            continue
        if isinstance(first, ast.Constant) and first.value == size:
            return replaced(source, [(first, str(high + 1))])
        if high == size and isinstance(first, (ast.Name, ast.Attribute, ast.Call)):
            return replaced(source, [(first, f"{source.flat(first)} + 1")])
    return None


def _maker(incident: Incident, table: torch.Tensor) -> tuple[str | None, ResolvedSite | None]:
    """The module that has the table, as the user would write it, and the statement of its owner's class that makes it."""
    key = table.untyped_storage().data_ptr()
    for _, root in incident.names.modules:
        known = dict(named_modules(root))
        for path, module in known.items():
            weight = module._parameters.get("weight")
            if weight is not None and type(weight) is torch.nn.Parameter and weight.untyped_storage().data_ptr() == key:
                parent, _, name = path.rpartition(".")
                owner = known.get(parent)
                made = attribute_set(type(owner), name) if owner is not None and path else None
                return incident.names.module_path(module), made
    return None, None


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="an embedding is asked for a row that it does not have, or a loss is given a class without a score",
    recognise=recognise,
    messages=("index out of range in self", "is out of bounds"),
    priority=5,
)
