"""Where a carried value can be cut off from its history, and how that is written there.

Between the steps where the code that calls backward() can name the value; in the method that keeps it where only that one can.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.blocks import class_around
from gradguard.analysis.program.defuse import reads_of
from gradguard.analysis.program.index import writes_in
from gradguard.core.diagnosis import Fix
from gradguard.fixes.edits import after, edit_of, patched

DETAIL = "truncated backpropagation through time: the value goes on, the history ends at the step"
IN_METHOD = "truncated backpropagation through time: the value goes on, the history ends there"


def detach_fix(carrier: Carrier, name: str, call: ResolvedSite | None) -> Fix:
    """The recommended cure of a value that is carried with its graph.

    Args:
        name: what the message calls it, in backticks.
        call: the place of the failing backward call.
    """
    if carrier.holding is not None and carrier.holding.owner is not None and not _in_sight(carrier, call):
        return _in_method(carrier, name)
    line = detached(carrier, (carrier.name or "").strip())
    title = f"detach {name} between the steps: `{line}` after `backward()`" if line else f"detach {name} before the next step uses it"
    return Fix(title=title, safety="unsafe", detail=DETAIL, patch=_after_backward(carrier, call, line))


def detached(carrier: Carrier, name: str) -> str | None:
    """The line that detaches what the variable holds, by the kind of value it holds."""
    if not name or carrier.tensor is None:
        return None
    through = carrier.holding.through if carrier.holding is not None else ()
    value = carrier.value
    if carrier.how == "unknown" and not through:
        return None
    if through == ("tuple",) or _is_all_tensors(value, tuple):
        return f"{name} = tuple(part.detach() for part in {name})"
    if through == ("list",) or _is_all_tensors(value, list):
        return f"{name} = [part.detach() for part in {name}]"
    if through:
        return None
    return f"{name} = {name}.detach()" if value is None or isinstance(value, torch.Tensor) else None


def _is_all_tensors(value: Any, kind: type[list[Any]] | type[tuple[Any, ...]]) -> bool:
    return isinstance(value, kind) and type(value) is kind and bool(value) and all(isinstance(part, torch.Tensor) for part in value)


def _in_sight(carrier: Carrier, call: ResolvedSite | None) -> bool:
    """Whether the backward call stands in a method that can write the attribute as `self.x`."""
    store = carrier.store
    if call is None or call.source is None or store is None or call.source is not store.source or call.statement is None:
        return False
    mine = class_around(call.source, call.statement)
    theirs = class_around(store.source, store.statement)
    return mine is not None and mine is theirs


def _after_backward(carrier: Carrier, call: ResolvedSite | None, line: str | None) -> str | None:
    """The detaching line after the backward statement, where both stand in one function."""
    store = carrier.store
    if line is None or store is None or call is None or call.source is not store.source or not isinstance(call.statement, ast.Expr):
        return None
    if store.source.qualname_around(call.statement) != store.function_name:
        return None
    return patched(store.source, insert=[after(store.source, call.statement, line)])


def _in_method(carrier: Carrier, name: str) -> Fix:
    """The value is kept by a method of an object that the loop does not speak of: it is cut off there."""
    store, written = carrier.store, carrier.name or ""
    unknown = Fix(title=f"detach {name} before the next step uses it", safety="unsafe", detail=IN_METHOD)
    if store is None or store.function is None or not isinstance(store.statement, (ast.Assign, ast.AnnAssign)):
        return unknown
    if carrier.holding is not None:  # another object's method has its own name for the owner
        written = next(iter(store.filled(carrier.holding.attribute)), written)
    value, line = store.value, detached(carrier, written)
    plain = line == f"{written} = {written}.detach()"
    if plain and isinstance(value, (ast.Name, ast.Attribute)) and isinstance(store.statement, ast.Assign):
        kept = f"{dotted(value)}.detach()"
        title = f"keep `{kept}` in {name}: what is computed in this step keeps its graph"
        return Fix(title=title, safety="unsafe", detail=IN_METHOD, patch=patched(store.source, edit_of(value, kept)))
    end = store.statement.end_lineno or store.statement.lineno
    used_below = any(read.lineno > end for read in reads_of(store.function, written))
    if line is not None and not used_below:
        title = f"detach {name} where it is kept: `{line}` after it is made"
        return Fix(
            title=title, safety="unsafe", detail=IN_METHOD, patch=patched(store.source, insert=[after(store.source, store.statement, line)])
        )
    reads = reads_of(value, written) if value is not None else []
    if plain and len(reads) == 1:
        title = f"read the earlier value as `{written}.detach()` where the new one is made from it"
        constant = _begins_with(carrier, written)
        change = None if constant else patched(store.source, edit_of(reads[0], f"{written}.detach()"))
        number = any(isinstance(each.value, (int, float)) for each in constant)
        detail = f"{IN_METHOD}; it begins as a number, which has no detach(): let it begin as a tensor" if number else IN_METHOD
        return Fix(title=title, safety="unsafe", detail=detail, patch=change)
    return unknown


def _begins_with(carrier: Carrier, written: str) -> list[ast.Constant]:
    """The constants that the attribute is set to somewhere, where the store may read them: nothing asks first."""
    store = carrier.store
    assert store is not None
    asked = any(
        isinstance(above, (ast.If, ast.IfExp)) and bool(reads_of(above.test, written)) for above in store.source.ancestors(store.statement)
    )
    owner = class_around(store.source, store.statement)
    of, _, attribute = written.rpartition(".")
    writes = [write for _, write in writes_in([store.source], attribute)] if of and not asked else []
    own = [each for each in writes if class_around(store.source, each.node) is owner]
    return [each.value for each in own if isinstance(each.value, ast.Constant) and each.owner is not None and dotted(each.owner) == of]
