"""A buffer that a checkpointed function reads, and that is written in place before backward runs the function again. Part of GG712."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.core.safe_read import function_code, in_class, store_of
from gradguard.rules import wording
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.drawn_anew import modules_of
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.unchecked import UNCHECKED
from gradguard.rules.spans import class_node
from gradguard.torch_compat.private_api import storage_key

_OVERWRITES = ("copy_", "zero_", "fill_")
_DEEPEST = 4  # methods called by methods


class Rewritten(NamedTuple):
    """The first write after forward has read the buffer; what it is called, and whose it is."""

    place: ResolvedSite
    name: str
    owner: str
    tensor: torch.Tensor


def rewritten_in(incident: Incident, function: Any) -> Rewritten | None:
    """The one buffer, or the same one of several modules, that forward reads and that was written in place since."""
    begun = incident.journal.steps[-1].clock if incident.journal.steps else 0
    found: dict[tuple[str, str], Rewritten] = {}
    for module in modules_of(function):
        kind = type(module)
        read = _read_before_overwritten(kind)
        code = function_code(in_class(kind, "forward"))
        # a write before the forward is seen by both runs
        ran = next((op[5] for op in incident.journal.ops if op[2] is code and op[5] > begun), None) if read else None
        for name, tensor in store_of(module, "_buffers").items() if ran is not None else ():
            storage = storage_key(tensor) if name in read and isinstance(tensor, torch.Tensor) else None
            writes = [] if storage is None or ran is None else incident.journal.writes_to(storage, ran)
            place = next((site for write in writes if (site := resolve(write.site)) is not None), None)
            if place is not None:
                found.setdefault((name, kind.__name__), Rewritten(place, name, kind.__name__, tensor))
    return next(iter(found.values())) if len(found) == 1 else None


def told(written: Rewritten, again: ResolvedSite | None, code: str, name: str) -> Diagnosis:
    """The diagnosis."""
    what, where = f"`self.{written.name}` of `{written.owner}`", f"`{written.place.function}()`"
    return Diagnosis(
        code=code,
        name=name,
        headline="a checkpointed function did not do in backward what it did in forward: "
        f"it reads {what}, and {where} writes it in between",
        culprit=written.place.statement_span(
            f"writes into `{written.name}` after forward has read it: backward reads the new values", "culprit"
        ),
        related=wording.spans(None if again is None else again.span("backward runs the checkpointed function again", "backward")),
        tensors=[
            TensorFacts(
                name=written.name, kind="buffer", shape=list(written.tensor.shape), dtype=str(written.tensor.dtype).removeprefix("torch.")
            )
        ],
        explanation="`checkpoint` drops the activations and computes them anew in backward, from the arguments and from what the function "
        f"reads besides. {what} is no argument: the second run sees the values of that later moment, and other tensors come out.",
        fixes=[
            Fix(
                title=f"Write into `{written.name}` once a step, after `optimizer.step()`, from what forward has kept for it",
                safety="manual",
                detail="Or read it before the checkpoint, and pass a copy (`.clone()`) as an argument.",
            )
        ],
        avoid=[UNCHECKED],
        confidence="likely",
    )


def _read_before_overwritten(kind: type) -> set[str]:
    """Attributes whose values from before a forward are read in it, in the order in which it and the methods that it calls stand."""
    found = None if kind.__module__.partition(".")[0] == "torch" else class_node(kind)
    if found is None:
        return set()
    source, tree = found
    methods = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    read: set[str] = set()
    overwritten: set[str] = set()
    for attribute, does in _accesses(source, methods, "forward", 0):
        if does == "overwrite":
            overwritten.add(attribute)
        elif does == "read" and attribute not in overwritten:
            read.add(attribute)
    return read


def _accesses(source: Source, methods: Mapping[str, ast.AST], name: str, depth: int) -> Iterator[tuple[str, str]]:
    definition = methods.get(name)
    if definition is None or depth > _DEEPEST:
        return
    ordered: list[tuple[tuple[int, int], str, str]] = []
    for node in inside(definition, ast.Attribute):
        if not isinstance(node.value, ast.Name) or node.value.id != "self":
            continue
        above = list(islice(source.ancestors(node), 2))
        place: ast.expr = node
        does = "read" if isinstance(node.ctx, ast.Load) else "update"
        if len(above) == 2 and isinstance(above[0], ast.Attribute) and isinstance(above[1], ast.Call) and above[1].func is above[0]:
            method = above[0].attr
            if method.endswith("_") and not method.endswith("__"):
                does, place = "overwrite" if method in _OVERWRITES else "update", above[1]
        elif above and isinstance(above[0], ast.Subscript) and isinstance(above[0].ctx, ast.Store):
            does = "update"
        # what a call is given is read before the call does what it does
        ordered.append(((place.end_lineno or 0, place.end_col_offset or 0), node.attr, does))
    for _, attribute, does in sorted(ordered):
        if attribute in methods:
            yield from _accesses(source, methods, attribute, depth + 1)
        else:
            yield attribute, does
