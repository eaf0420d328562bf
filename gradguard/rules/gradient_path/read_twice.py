"""A value that one loss reads without its path, as it should, and that another loss reads, which needs the path.

The generator's output is detached for the discriminator's loss, and the generator's own loss is then computed from the detached
one: what is wrong is the second read, and without the `detach()` the first backward would go through the generator too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.places.sites import short, site_at
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.analysis.program.bindings import assignments_to
from gradguard.analysis.program.blocks import function_around
from gradguard.analysis.program.expressions import inside, reads
from gradguard.analysis.program.syntax import Source
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.fixes.edits import replaced
from gradguard.instrumentation.facts import BackwardFact, Cut
from gradguard.instrumentation.journal import Journal
from gradguard.rules.gradient_path.wording import result_name


class Twice(NamedTuple):
    """The two backward calls whose losses read the value.

    Attributes:
        other: the one that went through what is computed from the value without its path.
        mine: the one that was to reach what is behind it.
        apart: whether another optimizer has stepped between the two, and none after them: each loss trains its own.
    """

    other: BackwardFact
    mine: BackwardFact
    apart: bool


def of_calls(journal: Journal, stacks: Iterable[tuple[CallSite, ...]], mine: BackwardFact, optimizer: Any) -> Twice | None:
    """The latest backward call within these frames before `mine`, whose optimizer is `optimizer`."""
    wanted = {stack for stack in stacks if stack and stack != mine.stack}
    return _latest(journal, [call for call in journal.backwards if call.stack in wanted], mine, optimizer)


def of_cut(journal: Journal, cut: Cut | None, mine: BackwardFact | None) -> Twice | None:
    """The latest backward call from a loss that was computed with this value, before the failing one."""
    if cut is None or mine is None:
        return None
    fed = [seq for seq, cuts in journal.fed.items() if cut in cuts]
    calls = [
        call
        for call in journal.backwards
        if cut.clock < call.clock < mine.clock and any(seq <= root for seq in fed for root in call.root_seqs) and call.stack != mine.stack
    ]
    return _latest(journal, calls, mine, None)


def _latest(journal: Journal, calls: list[BackwardFact], mine: BackwardFact, optimizer: Any) -> Twice | None:
    earlier = [call for call in calls if call.clock < mine.clock]
    if not earlier:
        return None
    other = earlier[-1]
    steps = [step for step in journal.steps if step.clock > other.clock and (optimizer is None or step.optimizer() is not optimizer)]
    return Twice(other, mine, bool(steps) and all(step.clock < mine.clock for step in steps))


class Reads(NamedTuple):
    """The culprit, the places that belong to it, the clause of the headline and the repair."""

    culprit: SourceSpan | None
    related: list[SourceSpan]
    clause: str
    fix: Fix


def told(origin: Origin, twice: Twice, whose: str) -> Reads | None:
    """What is to be said where the value is right for one loss and wrong for another; None where the cut itself may be the bug.

    Args:
        whose: what the later loss is to train, in words.
    """
    name, cut = result_name(origin), origin.place
    if not twice.apart or name is None or cut is None:
        return None
    found = _statement(_reads(name, cut, twice.mine, twice.other))
    if found is None:
        return None
    source, nodes = found
    read = site_at(source, nodes[0])
    inner = short(origin.inner, 32) if origin.inner else None
    label = f"{whose} gets no gradient through `{name}`" + (f", which is cut off from `{inner}`" if inner and inner != name else "")
    related = [cut.span(f"`{name}` has no path, as the loss of the other optimizer needs it", "cut")]
    back = resolve(next((site for site in twice.other.stack if site not in twice.mine.stack), twice.other.site))
    if back is not None:
        related.append(back.span(f"the other optimizer's loss, for which `{name}` is right", "backward"))
    return Reads(
        read.span(label, "culprit"), related, f"its loss is computed from `{name}`, which has no path", _fix(origin, name, found, twice)
    )


def without_cut(origin: Origin, whose: str) -> Fix:
    """The repair where several losses read the value, and it is not known which of them is to have the path."""
    name = result_name(origin)
    what = f"`{origin.inner}`" if origin.inner and origin.inner != name else "the value that still has its graph"
    return Fix(
        title=f"Compute the loss that is to train {whose} from {what}, not from {f'`{name}`' if name else 'what was cut off'}",
        safety="manual",
        detail="Another loss reads the same value, and its backward() would go through all of this without the cut.",
    )


def _fix(origin: Origin, name: str, found: tuple[Source, list[ast.expr]], twice: Twice) -> Fix:
    source, nodes = found
    cut = origin.place
    assert cut is not None
    if origin.kind not in ("detach", "data") or cut.source is None or not isinstance(cut.node, (ast.Call, ast.Attribute)):
        return Fix(title=f"Compute this loss from a value that has its graph: `{name}` has none", safety="manual")
    given = cut.node.func.value if isinstance(cut.node, ast.Call) and isinstance(cut.node.func, ast.Attribute) else None
    given = cut.node.value if isinstance(cut.node, ast.Attribute) else given
    inner = None if given is None else dotted(given)
    function = cut.enclosing_function or cut.source.tree
    same = source is cut.source and function is (function_around(source, nodes[0]) or source.tree)
    if inner is not None and inner != name and (same or inner.startswith("self.")):
        changed = same and any(cut.line < each.lineno <= nodes[0].lineno for each in assignments_to(function or cut.node, inner))
        patch = None if changed else replaced(source, [(node, inner) for node in nodes])
        return Fix(title=f"Use `{inner}` here, which has its graph, and leave `{name}` to the other loss", safety="unsafe", patch=patch)
    title = f"Keep the graph of `{name}` where it is made, and write `{name}.detach()` where the other loss reads it"
    others = [(each, node) for each, node in _reads(name, cut, twice.other, None)]
    patch = None
    whole = isinstance(cut.statement, ast.Assign) and cut.statement.value is cut.node
    if same and whole and given is not None and inner != name and others and all(each is source for each, _ in others):
        every = reads(function or cut.node, name)
        if {id(node) for node in every} == {id(node) for node in [*nodes, *(node for _, node in others)]}:
            edits: list[tuple[ast.AST, str]] = [(node, f"{name}.detach()") for _, node in others]
            patch = replaced(source, [(cut.node, source.flat(given)), *edits])
    return Fix(title=title, safety="unsafe" if patch is not None else "manual", patch=patch)


def _statement(found: Iterable[tuple[Source, ast.expr]]) -> tuple[Source, list[ast.expr]] | None:
    """The reads, where all of them stand in one statement."""
    every = list(found)
    statements = {id(source.statement(node)) for source, node in every}
    return (every[0][0], [node for _, node in every]) if len(statements) == 1 else None


def _reads(name: str, cut: ResolvedSite, call: BackwardFact, before: BackwardFact | None) -> Iterator[tuple[Source, ast.expr]]:
    """Where the code around a backward call reads the value by its name: in the innermost function that has any.

    Args:
        before: a backward call that came first; what stands above it in the same function was read for it.
    """
    starts = {} if before is None else {site.code: place for site in before.stack if (place := resolve(site)) is not None}
    for site in call.stack:
        place = resolve(site)
        source = None if place is None else place.source
        function = None if place is None or source is None else place.enclosing_function or source.tree
        if place is None or source is None or function is None or _is_given(function, name):
            continue
        last = place.end_line if place.statement is None else place.statement.end_lineno or place.end_line
        first = cut.end_line if source is cut.source and function is (cut.enclosing_function or source.tree) else 0
        above = starts.get(site.code)
        if above is not None and above.line < place.line:
            first = max(first, above.end_line)
        found = [node for node in reads(function, name) if first < node.lineno <= last]
        if found:
            yield from ((source, node) for node in found)
            return


def _is_given(function: ast.AST, name: str) -> bool:
    """Whether the name is a parameter's: the value was read where the function was called."""
    return any(each.arg == name for each in inside(getattr(function, "args", None), ast.arg))
