"""What a checkpointed function fills in forward and finds filled when backward runs it again: a cache of values with a graph. Part of
GG712."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted, targets_of
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import attributes
from gradguard.rules import wording
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.drawn_anew import modules_of
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.unchecked import UNCHECKED
from gradguard.rules.spans import class_node


class Filled(NamedTuple):
    """The statement that fills an attribute, under a condition on it; what it is called, and whose it is."""

    place: ResolvedSite
    attribute: str
    owner: str


def filled_in(function: Any) -> Filled | None:
    """The one attribute of a module that runs in there which is filled only once, and now holds tensors with a graph."""
    found: dict[tuple[str, int], Filled] = {}
    for module in modules_of(function):
        for each in _fills(module):
            held = attributes(module).get(each.attribute)
            if any(isinstance(item, torch.Tensor) and item.requires_grad for item in _items(held)):
                found.setdefault((each.place.file, each.place.line), each)
    return next(iter(found.values())) if len(found) == 1 else None


def told(filled: Filled, again: ResolvedSite | None, code: str, name: str) -> Diagnosis:
    """The diagnosis."""
    what = f"`self.{filled.attribute}` of `{filled.owner}`"
    label = f"filled in forward: when backward runs this again, `self.{filled.attribute}` is found filled, and nothing is computed"
    return Diagnosis(
        code=code,
        name=name,
        headline=f"a checkpointed function did not do in backward what it did in forward: it fills a cache, {what}, and found it filled",
        culprit=filled.place.statement_span(label, "culprit"),
        related=wording.spans(None if again is None else again.span("backward runs the checkpointed function again", "backward")),
        explanation="`checkpoint` drops the activations and computes them anew in backward, by the same operations. What was computed in "
        f"forward and kept in {what} is taken from there the second time, so that other tensors are saved than in forward.",
        fixes=[
            Fix(
                title=f"Compute it in every run of the function, without `self.{filled.attribute}`",
                safety="unsafe",
                detail="Or fill it outside of the checkpointed function, and pass what it gives as an argument.",
            )
        ],
        avoid=[UNCHECKED],
        confidence="likely",
    )


def _fills(module: nn.Module) -> Iterator[Filled]:
    found = None if type(module).__module__.partition(".")[0] == "torch" else class_node(type(module))
    if found is None:
        return
    source, tree = found
    for node in inside(tree, ast.If):
        if getattr(function_around(source, node), "name", "__init__") == "__init__":
            continue
        asked = {dotted(part) for part in inside(node.test, ast.Attribute)}
        for statement in (inner for part in node.body for inner in inside(part, ast.Assign)):
            for target in targets_of(statement):
                kept = dotted(target.value if isinstance(target, ast.Subscript) else target)
                if kept is not None and kept.startswith("self.") and kept.count(".") == 1 and kept in asked:
                    yield Filled(site_at(source, statement), kept[5:], type(module).__name__)


def _items(held: Any) -> Iterable[Any]:
    if isinstance(held, dict):
        return [item for value in held.values() for item in (value if isinstance(value, (tuple, list)) else (value,))]
    return held if isinstance(held, (tuple, list)) else (held,)
