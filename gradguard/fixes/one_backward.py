"""Several losses of one step, backpropagated one after the other, as one sum with one backward()."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted, names_read, targets_of
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.memory import memory_writes
from gradguard.analysis.program.syntax import Source
from gradguard.fixes.statements import Layout, siblings

_PLAIN = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def summed(first: ResolvedSite | None, second: ResolvedSite | None) -> tuple[str, str] | None:
    """The call on the sum, and the diff that puts it in the place of the calls: the two, and those right after them.

    None where the first cannot wait for the second: what stands between may step, clear, write or read gradients.
    """
    if first is None or second is None or first.source is None or first.file != second.file:
        return None
    source, one, two = first.source, first.statement, second.statement
    block = siblings(source, one) if one is not None else []
    if one is None or two is None or two not in block or block.index(one) >= block.index(two):
        return None
    end = block.index(two) + 1
    while end < len(block) and _loss(block[end]) is not None:
        end += 1
    losses: list[ast.expr] = []
    calls: list[ast.stmt] = []
    for statement in block[block.index(one) : end]:
        loss = _loss(statement)
        if loss is not None:
            losses.append(loss)
            calls.append(statement)
        elif not _leaves_alone(source, statement, calls):
            return None
    if one not in calls or two not in calls:
        return None
    texts = [source.segment(loss) or "" for loss in losses]
    if any("\n" in text or not text for text in texts):
        return None
    total = " + ".join(text if isinstance(loss, _PLAIN) else f"({text})" for loss, text in zip(losses, texts, strict=True))
    call = f"({total}).backward()"
    layout = Layout(source)
    for statement in calls:
        if statement.lineno != statement.end_lineno or source.lines[statement.lineno - 1].strip() != source.segment(statement):
            return None  # it shares its line, or has a comment that would be lost
        layout.drop(statement)
    line = source.lines[calls[-1].lineno - 1]
    layout.put(calls[-1].lineno, [line[: calls[-1].col_offset] + call + "\n"])
    diff = layout.diff()
    return None if diff is None else (call, diff)


def _loss(statement: ast.stmt) -> ast.expr | None:
    """What a statement calls a plain `backward()` on."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
        return None if call.args or call.keywords else call.func.value
    return None


def _leaves_alone(source: Source, statement: ast.stmt, calls: list[ast.stmt]) -> bool:
    """Whether a statement only gives values new names: none that the calls before it read, and none from gradients."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or list(memory_writes(source, statement)):
        return False
    bound = {dotted(target) for target in targets_of(statement)}
    if None in bound or bound & set(names_read(source, [*calls])):
        return False
    used = {last_part(call) for call in inside(statement, ast.Call)} | {read.attr for read in inside(statement, ast.Attribute)}
    return not used & {"backward", "grad", "step", "zero_grad"}
