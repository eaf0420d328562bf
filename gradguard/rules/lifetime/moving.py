"""Repairs that have a value computed anew in each iteration: its statements moved into the loop, the closure or `forward`."""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.stores import Store
from gradguard.analysis.places.source import resolve
from gradguard.analysis.program.bindings import dotted, names_read, statement_names, targets_of, uses_of
from gradguard.analysis.program.blocks import class_around
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.fixes.statements import moved_before, siblings, unwrapped
from gradguard.rules.lifetime.second_backward import Study


def computed_each_time(facts: Study, store: Store) -> str | None:
    """The diff that has a kept value computed anew where it is used; None where no plain move of statements does it."""
    if store.relation == "cache":
        guard = store.source.parents.get(store.statement)
        return unwrapped(store.source, guard) if isinstance(guard, ast.If) and store.statement in guard.body else None
    if store.relation == "init":
        return _from_constructor(store)
    return into_iteration(facts, store)


def into_iteration(facts: Study, store: Store) -> str | None:
    """The diff that moves a statement, with the statements of the forward pass that it hangs on, into the loop (or the closure) below it
    that is running."""
    source = store.source
    view, target, chain = _to_move(facts, store)
    anchor = None if target is None else _first_statement(target)
    if view is None or target is None or anchor is None or not chain or _brings_data(source, view, chain, target):
        return None
    if isinstance(target, (ast.FunctionDef, ast.AsyncFunctionDef)):  # what it binds is its own: nothing else may read it
        own = {id(node) for statement in (target, *chain) for node in inside(statement, ast.expr)}
        tree = source.tree or ast.Module([], [])
        bound = [name for statement in chain for item in targets_of(statement) if (name := dotted(item)) is not None]
        if any(id(read) not in own for name in bound for read in uses_of(tree, name)):
            return None
    return moved_before(source, chain, anchor)


def comes_with_data(facts: Study, store: Store) -> bool:
    """Whether what makes a kept value makes data as well that the loop below works on: a rollout, which is one for all of its turns."""
    view, target, chain = _to_move(facts, store)
    return view is not None and target is not None and _brings_data(store.source, view, chain, target)


def _to_move(facts: Study, store: Store) -> tuple[FrameView | None, ast.stmt | None, list[ast.stmt]]:
    """The frame of a store's block, the loop or function below that is running, and the statements that belong together."""
    block = siblings(store.source, store.statement)
    running = _running_below(facts, store.source, block[block.index(store.statement) + 1 :]) if block else None
    if running is None:
        return None, None, []
    view, target = running
    return view, target, _chain(store.source, view, block[: block.index(target)], store.statement)


def _brings_data(source: Source, view: FrameView, chain: list[ast.stmt], target: ast.stmt) -> bool:
    bound = {name for statement in chain for item in targets_of(statement) if (name := dotted(item)) is not None}
    data = {name for name in bound if isinstance(value := view.locals.get(name), torch.Tensor) and not value.requires_grad}
    return bool(data & set(names_read(source, [target])))


def _running_below(facts: Study, source: Source, below: list[ast.stmt]) -> tuple[FrameView, ast.stmt] | None:
    """The loop, or the function, among the statements that the failing call ran in; with the frame of the block."""
    views = [view for view in facts.incident.user_frames if view.site.code.co_filename == source.filename]
    for view in views:
        place = resolve(view.site)
        if place is None:
            continue
        for statement in below:
            if isinstance(statement, (ast.For, ast.While)) and statement.lineno <= place.line <= (statement.end_lineno or 0):
                return view, statement
            if isinstance(statement, ast.FunctionDef) and view.code_name == statement.name and statement.lineno <= place.line:
                return next((outer for outer in views if outer is not view), view), statement
    # the closure is defined in the loop's body, below the statement, and called by the optimizer
    return None


def _first_statement(block: ast.stmt) -> ast.stmt | None:
    body: list[ast.stmt] = getattr(block, "body", [])
    documented = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    body = body[1:] if documented else body
    return body[0] if body and body[0].lineno != block.lineno else None


def _chain(source: Source, view: FrameView, before: list[ast.stmt], statement: ast.stmt) -> list[ast.stmt]:
    """The statement, what makes the values with a graph that it reads, and what reads those values before the loop."""
    chain = {statement}
    wanted = [name for name in statement_names(source, statement) if _has_graph(view, name)]
    for above in reversed(before[: before.index(statement)]):
        bound = {dotted(target) for target in targets_of(above)}
        if bound & set(wanted):
            chain.add(above)
            wanted += [name for name in statement_names(source, above) if _has_graph(view, name)]
    bound = {dotted(target) for item in chain for target in targets_of(item)}
    for item in before[before.index(min(chain, key=lambda each: each.lineno)) :]:
        if item not in chain and bound & set(names_read(source, [item])):
            chain.add(item)
            bound |= {dotted(target) for target in targets_of(item)}
    return sorted(chain, key=lambda each: each.lineno) if all(isinstance(item, (ast.Assign, ast.AnnAssign)) for item in chain) else []


def _has_graph(view: FrameView, name: str) -> bool:
    value = view.locals.get(name)
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _from_constructor(store: Store) -> str | None:
    """The diff that moves `self.x = ...` from the constructor to the beginning of the class's `forward`."""
    source, function = store.source, store.function
    owner = class_around(source, store.statement)
    if owner is None or not isinstance(function, FUNCTIONS) or source.parents.get(store.statement) is not function:
        return None
    forward = next((item for item in owner.body if isinstance(item, ast.FunctionDef) and item.name == "forward"), None)
    anchor = None if forward is None else _first_statement(forward)
    own = forward.args.args[0].arg if forward is not None and forward.args.args else None
    local = [name for name in statement_names(source, store.statement) if not name.startswith(f"{own}.")]
    known = [name for name in local if name.partition(".")[0] in source.imports or name in source.defined]
    return moved_before(source, [store.statement], anchor) if anchor is not None and local == known else None
