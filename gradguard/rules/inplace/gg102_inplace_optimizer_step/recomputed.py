"""Repairs of a value that was computed before an update and is used after it: computed again, detached, or the update moved."""

from __future__ import annotations

import ast

from gradguard.analysis.graph.walk import leaves
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted, statement_names, targets_of
from gradguard.analysis.program.expressions import reads
from gradguard.analysis.program.syntax import Source, load
from gradguard.core.diagnosis import SourceSpan
from gradguard.fixes.edits import replaced
from gradguard.fixes.statements import moved_after, siblings
from gradguard.rules.inplace.gg102_inplace_optimizer_step.over_update import Carried
from gradguard.rules.inplace.write_history import Story, Write
from gradguard.torch_compat.private_api import storage_key


def trains_nothing_else(story: Story, write: Write, carried: Carried) -> bool:
    """Whether all that the carried value was computed from is trained by the optimizer that has stepped: the second loss, another
    optimizer's, has no use for its gradient."""
    if write.optimizer is None or carried.is_root:
        return False
    fed = {id(leaf) for leaf in leaves([carried.node])}
    others = [optimizer for optimizer in story.incident.names.optimizers() if optimizer is not write.optimizer]
    return bool(fed) and fed <= trained_by(write.optimizer) and not any(fed & trained_by(optimizer) for optimizer in others)


def detached_where_used(carried: Carried) -> str | None:
    """The diff that detaches the carried value in the statement that uses it after the update."""
    if carried.name is None or carried.used is None:
        return None
    source = load(carried.used.file)
    statement = None if source is None else source.statement_at(carried.used.line)
    if source is None or statement is None:
        return None
    found = reads(statement, carried.name)
    return replaced(source, [(node, f"{carried.name}.detach()") for node in found]) if found else None


def computed_again(story: Story, carried: Carried, update: ResolvedSite | None) -> str | None:
    """The diff that repeats, right after the update, the statements that made the carried value from the updated parameter."""
    if carried.name is None or update is None or update.source is None or update.statement is None:
        return None
    block = siblings(update.source, update.statement)
    before = block[: block.index(update.statement)] if block else []
    chain = _stale(story, update.source, before, carried.name)
    return moved_after(update.source, chain, update.statement, keep=True) if chain else None


def _stale(story: Story, source: Source, before: list[ast.stmt], name: str) -> list[ast.stmt]:
    """The statements that make a variable, and those that make what it is made from, as far as the updated parameter is in it."""
    found: list[ast.stmt] = []
    wanted = [name]
    for statement in reversed(before):
        bound = {dotted(target) for target in targets_of(statement)}
        if not bound & set(wanted) or not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            if bound & set(wanted):
                return []  # bound by a loop or an augmented assignment: more than one statement to repeat
            continue
        found.append(statement)
        wanted = [item for item in wanted if item not in bound]
        wanted += [item for item in statement_names(source, statement) if _holds_parameter(story, item)]
    return found if not any(item == name for item in wanted) else []


def _holds_parameter(story: Story, name: str) -> bool:
    """Whether a variable is a tensor that was computed from the updated parameter."""
    incident = story.incident
    for view in incident.user_frames:
        value = view.locals.get(name)
        node = getattr(value, "grad_fn", None)
        if node is not None:
            return any(storage_key(leaf) == story.mismatch.storage for leaf in leaves([node]))
    return False


def update_moved(called: ResolvedSite | None, backward: SourceSpan | None) -> str | None:
    """The diff that moves an update of the weights to after the optimizer's step below it, or after the failing backward."""
    if called is None or called.source is None or called.statement is None or backward is None:
        return None
    block = siblings(called.source, called.statement)
    if not isinstance(called.statement, ast.Expr) or not block or backward.file != called.source.filename:
        return None
    below = block[block.index(called.statement) + 1 :]
    ran = next((i for i, item in enumerate(below) if item.lineno <= backward.line <= (item.end_lineno or item.lineno)), None)
    if ran is None:
        return None
    steps = [item for item in below[ran:] if _is_step(item)]
    return moved_after(called.source, [called.statement], steps[0] if steps else below[ran])


def _is_step(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"
