"""Where a carried value can be cut off from its history, and how that is written there.

Between the steps where the code that calls backward() can name the value; in the method that keeps it where only that one can.
"""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted, targets_of
from gradguard.analysis.program.blocks import class_around
from gradguard.analysis.program.defuse import reads_of
from gradguard.analysis.program.index import writes_in
from gradguard.core.diagnosis import Fix
from gradguard.core.safe_read import attributes, elements, pairs, peek, variables_of
from gradguard.fixes.at_places import detached_value
from gradguard.fixes.edits import after, appended, edit_of, patched
from gradguard.fixes.statements import siblings

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
    where = "`backward()`" if not _kept_behind(carrier, call) else f"line {carrier.store.statement.end_lineno}" if carrier.store else ""
    title = f"detach {name} between the steps: `{line}` after {where}" if line else f"detach {name} before the next step uses it"
    return Fix(title=title, safety="unsafe", detail=DETAIL, patch=_after_backward(carrier, call, line))


def detached(carrier: Carrier, name: str) -> str | None:
    """The line that detaches what the variable holds, by the kind of value it holds."""
    if not name or carrier.tensor is None:
        return None
    through = carrier.holding.through if carrier.holding is not None else ()
    if carrier.how == "unknown" and not through:
        return None
    value = carrier.value if carrier.value is not None else held(carrier)
    if value is None:  # a global: what it is in is known by its type alone
        value = {(): carrier.tensor, ("tuple",): (carrier.tensor,), ("list",): [carrier.tensor]}.get(through)
    text = detached_value(name, value)
    return None if text is None else f"{name} = {text}"


def kept_detached(carrier: Carrier) -> str | None:
    """The diff that keeps a variable without its graph from where it is bound on; None where that is not a plain assignment."""
    store, name = carrier.store, carrier.name or ""
    if store is None or not name.isidentifier() or not isinstance(store.statement, ast.Assign):
        return None
    names = [dotted(target) for target in targets_of(store.statement)]
    line = detached(carrier, name)
    if name not in names or line is None:
        return None
    if names == [name] and line == f"{name} = {name}.detach()" and isinstance(store.value, (ast.Call, ast.Attribute, ast.Subscript)):
        return patched(store.source, appended(store.value, ".detach()"))
    return patched(store.source, insert=[after(store.source, store.statement, line)])


def held(carrier: Carrier) -> Any:
    """What the variable or attribute that carries the tensor holds: the tensor itself, or what it is in."""
    holding = carrier.holding
    if holding is None:
        return None
    if holding.owner is not None:
        value = attributes(holding.owner).get(holding.attribute)
        return peek(holding.owner, holding.attribute, None) if value is None else value
    return None if holding.frame is None else variables_of(holding.frame).get(holding.attribute)


def stored_item(carrier: Carrier) -> Any:
    """The item of a container that a store has put there, with the carried tensor in it; None where it is not found."""
    store, levels = carrier.store, [held(carrier)]
    if store is None or carrier.holding is None:
        return None
    method = store.value.func if isinstance(store.value, ast.Call) else None
    items: list[ast.expr] = [target for target in targets_of(store.statement) if isinstance(target, ast.Subscript)]
    written = items[0] if items else method.value if isinstance(method, ast.Attribute) else None
    depth = 0 if items else 1
    while isinstance(written, ast.Subscript):
        written, depth = written.value, depth + 1
    name = None if written is None else dotted(written)
    if name is None or name.rpartition(".")[2] != carrier.holding.attribute:
        return None  # by another name, which may stand for a part of it
    for _ in range(depth):
        levels = [item for level in levels for item in ([each for _, each in pairs(level)] if isinstance(level, dict) else elements(level))]
    return next((item for item in levels if _has(item, carrier.tensor)), None)


def _has(value: Any, tensor: Any, depth: int = 3) -> bool:
    items = [item for _, item in pairs(value)] if isinstance(value, dict) else elements(value) if isinstance(value, (list, tuple)) else []
    return value is tensor or (depth > 0 and any(_has(item, tensor, depth - 1) for item in items))


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
    behind = store.statement if _kept_behind(carrier, call) else call.statement
    return patched(store.source, insert=[after(store.source, behind, line)])


def _kept_behind(carrier: Carrier, call: ResolvedSite | None) -> bool:
    """Whether the value is put where it is kept after the backward call, in the same block."""
    store, statement = carrier.store, None if call is None else call.statement
    if store is None or call is None or statement is None or store.source is not call.source:
        return False
    return store.statement in siblings(store.source, statement) and store.statement.lineno > statement.lineno


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
