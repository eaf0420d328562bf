"""A state that an object keeps: how often it is made anew within one step, and which method of the object lets go of it.

Where it is made several times in a step (a loop over time in which a cell's forward runs), it cannot be cut off where it is
made: that would cut each turn of the inner loop from the one before.
"""

from __future__ import annotations

import ast
import gc
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from gradguard.analysis.graph.walk import MAX_NODES, is_accumulate, nodes_from
from gradguard.analysis.history.carried_graphs import Carrier, called_in
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.stores import classes_of
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import assignments_to, dotted, targets_of
from gradguard.analysis.program.expressions import inside
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Fix
from gradguard.fixes.at_places import spelt
from gradguard.fixes.edits import replaced
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.journal import Journal
from gradguard.rules import wording
from gradguard.rules.lifetime.detaching import detach_fix
from gradguard.torch_compat.private_api import node_sequence

_CLEARING = {"zero_": "zeros_like", "fill_": "full_like"}  # what makes the same anew
_MAKERS = {"zeros", "zeros_like", "new_zeros"}


@dataclass(frozen=True)
class Reset:
    """A method that lets go of the state."""

    name: str
    statement: str  # as written
    keeps_value: bool  # it detaches: the value goes on


def _several_in_a_step(carrier: Carrier, journal: Journal, previous: BackwardFact | None) -> bool | None:
    """Whether one object's state was made more than once since the last turn; None where that was not traced."""
    store, owner = carrier.store, _owner(carrier)
    if store is None or owner is None:
        return False
    if previous is None or not any(op[0] >= previous.seq for op in journal.ops):
        return None
    lines = range(store.statement.lineno, (store.statement.end_lineno or store.statement.lineno) + 1)
    counts: Counter[tuple[int, int]] = Counter()
    for op in journal.ops:
        if op[0] >= previous.seq and op[2].co_filename == store.file and CallSite(op[2], op[3]).line in lines:
            counts[id(op[2]), op[3]] += 1
    if max(counts.values(), default=0) < 2:
        return False
    kind = type(owner)
    return max(counts.values()) > sum(type(obj) is kind for obj in gc.get_objects())


def _made_in_another_loop(carrier: Carrier, call: ResolvedSite | None) -> bool:
    """Whether the method that keeps the state is called in a loop that the backward call does not stand in: over time, in each step."""
    store = carrier.store
    function = None if store is None else store.function
    if store is None or not isinstance(function, ast.FunctionDef) or call is None or call.source is not store.source:
        return False
    own = [] if call.statement is None else list(store.source.ancestors(call.statement))
    loops = [node for node in inside(store.source.tree or function, ast.For, ast.While) if node not in own]
    return any(function.name in called_in(loop) for loop in loops)


def _reset_method(carrier: Carrier) -> Reset | None:
    """A method of the object's class, other than the constructor and the one that keeps the state, that empties or detaches it."""
    owner, holding, store = _owner(carrier), carrier.holding, carrier.store
    if owner is None or holding is None:
        return None
    name = f"self.{holding.attribute}"
    found: list[Reset] = []
    for source, definition in classes_of(owner):
        for function in definition.body:
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("__") or _needs_arguments(function):
                continue
            if store is not None and store.function is function:
                continue
            for statement in inside(function, ast.Assign):
                if [dotted(target) for target in targets_of(statement)] == [name]:
                    kept = _lets_go(statement.value, name)
                    if kept is not None:
                        found.append(Reset(function.name, source.flat(statement), kept))
    return next((reset for reset in found if reset.keeps_value), found[0] if found else None)


def state_fixes(
    carrier: Carrier,
    name: str,
    call: ResolvedSite | None,
    journal: Journal,
    previous: BackwardFact | None,
    place: ResolvedSite | None = None,
) -> list[Fix]:
    """What to do with a value that goes from step to step, by what its class offers; the best first.

    Args:
        name: what the message calls it, in backticks.
        call: the place of the failing backward call.
        previous: the last time the program came to this same call.
        place: where the value entered this step's graph.
    """
    cleared = _cleared(carrier, place)
    if cleared is not None:
        return [cleared]
    several, reset = _several_in_a_step(carrier, journal, previous), _reset_method(carrier)
    if several is None and reset is None and _made_in_another_loop(carrier, call):
        several = True
    calling = None
    if reset is not None:
        calling = Fix(
            title=f"call `{reset.name}()` of each `{type(_owner(carrier)).__name__}` between the steps: it has `{reset.statement}`",
            safety="unsafe",
            detail="the value goes on, its history ends there" if reset.keeps_value else "each step then begins without what was before",
        )
        if reset.keeps_value:
            return [calling]
    if several:
        detaching = Fix(
            title=f"detach {name} once a step, before the loop in which it is made several times",
            safety="unsafe",
            detail="detached where it is made, each turn of that loop would forget the turns before",
        )
        return [detaching] if calling is None else [calling, detaching]
    detaching = detach_fix(carrier, name, call)
    if calling is None:
        return [detaching]
    return [calling, detaching] if several is None else [detaching, calling]


def is_cleared(place: ResolvedSite | None) -> bool:
    """Whether a place is a statement that sets all of a tensor's elements in place, which keeps its graph: `self.state.zero_()`."""
    call = None if place is None or not isinstance(place.statement, ast.Expr) else place.statement.value
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _CLEARING


def _cleared(carrier: Carrier, place: ResolvedSite | None) -> Fix | None:
    """The repair of a reset that writes into the state rather than making it anew; an attribute or an item can be given another tensor."""
    if place is None or place.source is None or not is_cleared(place):
        return None
    statement = place.statement
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    what, given = place.source.flat(call.func.value), [place.source.flat(each) for each in call.args]
    maker = spelt(place.source, f"torch.{_CLEARING[call.func.attr]}")
    made = f"{what} = {maker}({', '.join([what, *given])})"
    alone = isinstance(call.func.value, (ast.Attribute, ast.Subscript)) and maker is not None and len(given) == (call.func.attr == "fill_")
    if not alone:
        if carrier.tensor is None or carrier.tensor._is_view():
            return None
        made = f"{what}.detach_().{call.func.attr}({', '.join(given)})"
    return Fix(
        title=f"Begin anew where it is reset: `{made}`",
        safety="unsafe",
        detail=f"`{call.func.attr}()` at line {place.line} sets the values and keeps the graph behind them",
        patch=replaced(place.source, [(call, made)]),
    )


def learning_kept(fixes: list[Fix], carrier: Carrier, name: str, incident: Incident, previous: BackwardFact | None) -> list[Fix]:
    """The fixes for a state that goes from step to step, where it begins from a parameter that detaching it would cut off.

    Then the state is to begin from there in each step, and it is said what stops learning otherwise.
    """
    cut_off = wording.parameter_names(_only_behind(incident.root_nodes, 0 if previous is None else previous.seq), incident.names)
    if not cut_off:
        return fixes
    shown = wording.listed(cut_off, len(cut_off))
    reset = _reset_method(carrier)
    if reset is not None and not reset.keeps_value:
        first = [fix for fix in fixes if fix.title.startswith(f"call `{reset.name}()`")]
    else:
        begun = _at_first(carrier)
        back = f"set {name} back to its first value" + (f" (`{begun}`)" if begun is not None else "")
        first = [
            Fix(
                title=f"{back} between the steps, so that each step begins from {shown} again",
                safety="unsafe",
                detail="before the forward of the next step, outside of any loop over time",
            )
        ]
    has, them = ("have", "they are") if len(cut_off) > 1 else ("has", "it is")
    warned = f"{shown} {has} no other part in this loss: while the value goes on detached, {them} not trained"
    rest = [fix for fix in fixes if fix not in first]
    warned_of = [fix.model_copy(update={"detail": f"{fix.detail}; {warned}" if fix.detail else warned}) for fix in rest]
    return warned_of + first if _begins_empty(carrier) else first + warned_of


def _begins_empty(carrier: Carrier) -> bool:
    """Whether a loop's own variable begins as `None`: a memory that is to be carried on, so it is not to be dropped in each step."""
    store, name = carrier.store, carrier.name or ""
    scope = None if store is None else store.function or store.source.tree
    if scope is None or not name.isidentifier():
        return False
    values = [statement.value for statement in assignments_to(scope, name) if isinstance(statement, ast.Assign)]
    return any(isinstance(value, ast.Constant) for value in values)


def _only_behind(roots: list[Any], seq: int) -> list[torch.Tensor]:
    """The parameters that a graph reaches only through nodes which were there before that sequence number."""
    near: set[int] = set()
    seen, stack = set(roots), [node for node in roots if node_sequence(node) >= seq]
    while stack and len(seen) < MAX_NODES:
        for source, _ in stack.pop().next_functions:
            if source is None or source in seen:
                continue
            seen.add(source)
            if is_accumulate(source):
                near.add(id(source))
            elif node_sequence(source) >= seq:
                stack.append(source)
    if stack:
        return []
    variables = [(node, getattr(node, "variable", None)) for node in nodes_from(roots) if is_accumulate(node) and id(node) not in near]
    return [variable for _, variable in variables if isinstance(variable, torch.nn.Parameter)]


def _at_first(carrier: Carrier) -> str | None:
    """The statement of the constructor that gives the state its first value, as written; a constant alone can be written elsewhere."""
    owner, holding = _owner(carrier), carrier.holding
    if owner is None or holding is None:
        return None
    for source, definition in classes_of(owner):
        for function in definition.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                for statement in inside(function, ast.Assign):
                    if f"self.{holding.attribute}" in map(dotted, targets_of(statement)):
                        return source.flat(statement) if isinstance(statement.value, ast.Constant) else None
    return None


def _owner(carrier: Carrier) -> Any:
    owner = None if carrier.holding is None else carrier.holding.owner
    return None if isinstance(owner, type) else owner


def _needs_arguments(function: ast.FunctionDef) -> bool:
    given = [*function.args.posonlyargs, *function.args.args]
    return len(given) - len(function.args.defaults) != 1 or any(default is None for default in function.args.kw_defaults)


def _lets_go(value: ast.expr, name: str) -> bool | None:
    """Whether the assigned value keeps what was there, detached; None where it neither empties nor detaches."""
    if isinstance(value, ast.Constant) and value.value is None:
        return False
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr == "detach" and dotted(value.func.value) == name:
            return True
        if value.func.attr in _MAKERS:
            return False
    return None
