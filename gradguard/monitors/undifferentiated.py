"""Gradients taken with create_graph=True, so that a term of the loss can be made of them, and of which no loss is made. Part of GG308."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.analysis.graph.walk import root_nodes, walk
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.instrumentation.facts import BackwardFact
from gradguard.analysis.places.sites import short
from gradguard.analysis.incident import Incident
from gradguard.monitors.findings import Suspicion
from gradguard.torch_compat.private_api import node_sequence

if TYPE_CHECKING:
    from gradguard.instrumentation.journal import Journal
    from gradguard.monitors.gradient_ledger import Ledger

_ENOUGH = 3  # calls of one line in a row
_MOST_NODES = 20_000
_MOST = 64


class _Taken:
    """One `autograd.grad(..., create_graph=True)`: the numbers of the nodes that it made, and whether a later graph has any of them."""

    __slots__ = ("call", "end", "used")

    def __init__(self, call: BackwardFact, end: int) -> None:
        self.call = call
        self.end = end
        self.used = False


class Undifferentiated:
    """Which gradients with a graph of their own a backward call has gone through, in traced steps."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._taken: dict[tuple[CallSite, ...], _Taken] = {}  # the newest of each line, as reached by this way
        self._unused: dict[tuple[CallSite, ...], int] = {}
        self._last: BackwardFact | None = None

    def taken(self, ledger: Ledger, call: BackwardFact, end: int) -> None:
        """A gradient was taken; what became of the one that the same line took before is known by now."""
        if not call.stack or end == call.seq:
            return
        before = self._taken.pop(call.stack, None)
        if before is not None and before.call.step < call.step and self._last is not None and self._last.clock > before.call.clock:
            seen = -1_000 if before.used or self._watched(before) else self._unused.get(call.stack, 0) + 1
            self._unused[call.stack] = seen
            if seen == 1:
                ledger.found.append(Suspicion(""))  # the next steps are traced
            elif seen == _ENOUGH:
                ledger.found.append(Suspicion("GG308", None, {"taken": before.call, "backward": self._last}))
        while len(self._taken) >= _MOST:
            self._taken.pop(next(iter(self._taken)))
        self._taken[call.stack] = _Taken(call, end)

    def went_through(self, call: BackwardFact, roots: tuple[Any, ...]) -> None:
        """A call has gone through the graph of these roots."""
        open_ones = [each for each in self._taken.values() if not each.used and each.call is not call]
        if call.kind == "backward":
            self._last = call
        if not open_ones:
            return
        first = min(each.call.seq for each in open_ones)
        for i, (node, _) in enumerate(walk(root_nodes(roots))):
            seq = node_sequence(node)
            if i > _MOST_NODES:
                for each in open_ones:  # not known
                    each.used = True
                return
            if seq >= first:
                for each in open_ones:
                    each.used = each.used or each.call.seq <= seq < each.end

    def _watched(self, taken: _Taken) -> bool:
        """Whether something computed since was detached, or turned into a number: it may be what is made of these gradients."""
        journal, since = self._journal, taken.call.clock
        until = next((fact.clock for fact in journal.steps if fact.clock > since), None)
        cuts = [fact.cut for fact in journal.escapes if fact.cut is not None] + [cut for _, cut in journal.cuts()]
        roots = {seq for fact in journal.backwards if fact.clock > since for seq in fact.root_seqs}
        return any(
            since < cut.clock
            and (until is None or cut.clock < until)
            and any(seq >= taken.call.seq and seq not in roots for seq in cut.sources)
            for cut in cuts
        )


def told(incident: Incident) -> Diagnosis | None:
    """The statement whose value nothing reads; silent where something does, which may use it in other steps."""
    taken, backward = incident.suspicion.data["taken"], incident.suspicion.data["backward"]
    codes = {site.code for site in backward.stack}
    site = next((site for site in taken.stack if site.code in codes), None)
    place = resolve(site)
    names = [] if place is None else _unread(place)
    if place is None or names is None:
        return None
    subject = " and ".join(f"`{name}`" for name in names) or f"the result of `{short(place.text, 40)}`"
    loss = resolve(backward.site)
    inner = resolve(taken.site)
    return Diagnosis(
        code="GG308",
        name="partial-detach",
        severity="warning",
        headline=f"{subject} {'are' if len(names) > 1 else 'is'} computed to be differentiated, and nothing uses "
        f"{'them' if len(names) > 1 else 'it'}: no loss contains {'these terms' if len(names) > 1 else 'this term'}",
        culprit=place.statement_span("its gradients are taken with create_graph=True, and nothing reads the value", "culprit"),
        related=[
            *([] if inner is None or inner.line == place.line else [inner.span("takes gradients that have a graph of their own", "made")]),
            *([] if loss is None else [loss.span("starts from a loss without it", "backward")]),
        ],
        explanation="`create_graph=True` costs time and memory to make gradients that a further backward() can go through. In the traced "
        "steps no backward() and no other `autograd.grad` went through these.",
        fixes=[Fix(title=f"Add {subject}, times its weight, to the loss that backward() starts from", safety="unsafe")],
    )


def _unread(place: ResolvedSite) -> list[str] | None:
    """The names that a statement binds and that nothing ever reads; none of a value that is dropped; None where it may be read."""
    statement, source = place.statement, place.source
    if statement is None or source is None or source.tree is None:
        return None
    if isinstance(statement, ast.Expr):
        return [] if statement.value is place.call else None
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    parts = [part for target in targets for part in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]
    scope = place.enclosing_function or source.tree
    unread = [part for part in parts if isinstance(part, (ast.Name, ast.Attribute)) and not _is_read(part, scope, source.tree)]
    whole = len(parts) == 1
    if not unread or (whole and statement.value is not place.call):
        return None
    return [source.flat(part) for part in unread]


def _is_read(target: ast.Name | ast.Attribute, scope: ast.AST, tree: ast.AST) -> bool:
    if isinstance(target, ast.Name):
        return any(isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load) for node in ast.walk(scope))
    return any(isinstance(node, ast.Attribute) and node.attr == target.attr and isinstance(node.ctx, ast.Load) for node in ast.walk(tree))
