"""A buffer that a checkpointed function reads, and that is written in place before backward runs the function again. Part of GG712."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice
from types import CodeType
from typing import Any, NamedTuple

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, function_def, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import Program, program_of
from gradguard.analysis.program.syntax import FUNCTIONS, Function
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.core.safe_read import function_code, in_class, store_of
from gradguard.rules import wording
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.drawn_anew import modules_of
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.unchecked import UNCHECKED
from gradguard.torch_compat.private_api import storage_key

_OVERWRITES = ("copy_", "zero_", "fill_")
_DEEPEST = 4  # calls


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
        code = function_code(in_class(kind, "forward")) if kind.__module__.partition(".")[0] != "torch" else None
        read, functions = _read_before_overwritten(code)
        # a write before the forward is seen by both runs
        ran = next((op[5] for op in incident.journal.ops if op[5] > begun and _is_one(op[2], code, functions)), None) if read else None
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


def _is_one(code: CodeType, forward: CodeType | None, functions: set[str]) -> bool:
    """Whether this is the code of a forward, or of what it calls."""
    return code is forward or (forward is not None and code.co_filename == forward.co_filename and code.co_name in functions)


def _read_before_overwritten(code: CodeType | None) -> tuple[set[str], set[str]]:
    """Attributes whose values from before a forward are read in it, in the order in which it and what it calls stand; the functions
    outside of classes that it calls."""
    function, program = (None, None) if code is None else (function_def(code), program_of(code.co_filename))
    read: set[str] = set()
    overwritten: set[str] = set()
    functions: set[str] = set()
    for attribute, does in _accesses(program, function, functions, 0) if program is not None and isinstance(function, FUNCTIONS) else ():
        if does == "overwrite":
            overwritten.add(attribute)
        elif does == "read" and attribute not in overwritten:
            read.add(attribute)
    return read, functions


def _accesses(program: Program, function: Function, functions: set[str], depth: int) -> Iterator[tuple[str, str]]:
    if not isinstance(function, ast.Lambda) and program.cls(function) is None:
        functions.add(function.name)
    ordered: list[tuple[tuple[int, int], ast.Attribute | ast.Call, str]] = []
    for node in inside(function, ast.Attribute, ast.Call):
        above = list(islice(program.source.ancestors(node), 2))
        place: ast.expr = node
        if isinstance(node, ast.Call):
            does = "call"
        else:
            does = "read" if isinstance(node.ctx, ast.Load) else "update"
            if above and isinstance(above[0], ast.Attribute):
                method = above[0].attr
                if method.endswith("_") and not method.endswith("__"):
                    called = len(above) == 2 and isinstance(above[1], ast.Call) and above[1].func is above[0]
                    does, place = "overwrite" if method in _OVERWRITES else "update", above[1] if called else node  # type: ignore[assignment]
            elif above and isinstance(above[0], ast.Subscript) and isinstance(above[0].ctx, ast.Store):
                does = "update"
        # what a call is given is read before the call does what it does
        ordered.append(((place.end_lineno or 0, place.end_col_offset or 0), node, does))
    for _, node, does in sorted(ordered, key=lambda each: each[0]):
        if isinstance(node, ast.Attribute):
            yield node.attr, does
        elif depth < _DEEPEST:
            for callee in program.callees(node):
                if isinstance(callee, FUNCTIONS):
                    yield from _accesses(program, callee, functions, depth + 1)
