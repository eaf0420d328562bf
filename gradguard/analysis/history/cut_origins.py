"""Where a value lost its path to the graph, from the journal's memories: the candidates, and which one an expert would name."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from gradguard.analysis.history import grad_mode_switches
from gradguard.analysis.history.grad_mode_switches import Switch
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, function_def, resolve
from gradguard.analysis.program.expressions import calls_inside
from gradguard.analysis.program.syntax import load
from gradguard.instrumentation.facts import Cut


@dataclass
class Origin:
    """A place where the path was lost.

    Attributes:
        kind: a `gradguard.instrumentation.journal.CutKind`.
        func: the operation, as torch or the source calls it.
        place: where it stands.
        switch: for values computed with grad mode off, what had switched it off.
        outer: the user's next frame out, as far as known.
        made: where the value that was cut off had been made.
        leaves: the leaves that were cut off directly.
        certain: seen happening, not only read in the source.
        output: which of several results it is about (the indices beside the values of `max`).
        into_leaf: the value was copied into a leaf that requires grad, without grad (`load_state_dict`).
    """

    kind: str
    func: str
    place: ResolvedSite | None
    switch: Switch | None = None
    outer: ResolvedSite | None = None
    made: ResolvedSite | None = None
    leaves: list[torch.Tensor] = field(default_factory=list)
    certain: bool = True
    inner: str | None = None
    output: int = 0
    into_leaf: bool = False
    sure: bool = True
    """Read in the source: whether what was cut off is known to have had a path."""
    cut: Cut | None = None
    """What the journal has of it."""

    @property
    def discrete(self) -> bool:
        return self.kind in ("nondiff", "cast")

    @property
    def key(self) -> tuple[object, ...]:
        place = self.place
        return ("?", self.func) if place is None else (place.file, place.line, place.column, place.end_column)


def of_cut(incident: Incident, cut: Cut) -> Origin:
    """A memory of the journal as an origin."""
    kind: str = cut.kind
    switch = (
        grad_mode_switches.of_cut(incident.journal, cut)
        if kind in ("no_grad", "inference", "sample", "escape") and (kind != "escape" or cut.mode)
        else None
    )
    place = _in_body(resolve(cut.site), cut)
    if kind == "no_grad" and switch is not None and switch.how == "library" and callee_name(place) == "sample":
        kind = "sample"
    if switch is not None and switch.called is not None:
        place = switch.called
    made = None
    for seq in cut.sources:
        made = incident.place_of_node(seq) if seq >= 0 else None
        if made is not None:
            break
    leaves = [leaf for leaf in (ref() for ref in cut.leaves) if leaf is not None]
    inner = receiver_text(place)
    if cut.into_leaf:
        inner = place.arguments[0] if place is not None and place.arguments else None
    return Origin(kind, cut.func, place, switch, resolve(cut.outer), made, leaves, True, inner, cut.output, cut.into_leaf, cut=cut)


def _in_body(place: ResolvedSite | None, cut: Cut) -> ResolvedSite | None:
    """The place; in a compiled function, whose code has only the lines of its header left, the one call of this name in its body."""
    function, source = _compiled(place, cut), None if place is None else load(place.file)
    if function is None or source is None:
        return place
    calls = list(calls_inside(function, cut.func))
    return site_at(source, calls[0]) if len(calls) == 1 else place


def _compiled(place: ResolvedSite | None, cut: Cut) -> ast.FunctionDef | None:
    """The function whose compiled code made the cut: nothing of what is written in a header runs when it is called."""
    function = None if place is None or cut.site is None else function_def(cut.site.code)
    header = isinstance(function, ast.FunctionDef) and place is not None and place.line < function.body[0].lineno
    return function if header and isinstance(function, ast.FunctionDef) else None


def _unknown(cut: Cut) -> bool:
    """Whether compiled code made the cut, and it is not known where: its runtime may have switched grad mode off for itself."""
    place = resolve(cut.site)
    return _compiled(place, cut) is not None and (cut.kind == "no_grad" or _in_body(place, cut) is place)


def callee_name(place: ResolvedSite | None) -> str:
    callee = place.callee if place is not None else None
    return callee.rpartition(".")[2] if callee else ""


def receiver_text(place: ResolvedSite | None) -> str | None:
    """What the cutting expression was applied to, as written."""
    if place is None or place.source is None or place.node is None:
        return None
    node = place.node
    if isinstance(node, ast.Compare):
        return place.source.flat(node.left)
    if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
        return place.source.flat(node.args[0]) if node.args else None
    return place.receiver


def of_tensor(incident: Incident, tensor: torch.Tensor) -> list[Origin]:
    """Every place where this gradless value, or what it was made of, lost its path; in the order of the arguments."""
    cut = incident.journal.cut_of(tensor)
    if cut is None or cut.guess:
        return []
    return merged(of_cut(incident, origin) for origin in cut.roots() if not _unknown(origin))


def merged(origins: Iterable[Origin]) -> list[Origin]:
    """One origin a place: a forward under no_grad cuts at every layer, and is one bug."""
    found: dict[tuple[object, ...], Origin] = {}
    for origin in origins:
        span = origin.switch.span if origin.switch is not None and origin.switch.how != "library" else None
        key = ("switch", span.file, span.line, span.column) if span is not None else origin.key
        known = found.setdefault(key, origin)
        if known is not origin:
            if lingers(origin) and not lingers(known):  # the block's own content and what ran after it: the latter is the trouble
                found[key] = origin
            found[key].leaves = known.leaves + origin.leaves
    return list(found.values())


def lingers(origin: Origin) -> bool:
    """Whether grad mode was off because nothing switched it on again."""
    return origin.switch is not None and origin.switch.how in ("left_on", "yield")


def ranked(incident: Incident, origins: Sequence[Origin]) -> list[Origin]:
    """The likeliest bug first: values before masks and indices, what an optimizer trains before what none does, then in argument order."""
    if len(origins) < 2:
        return list(origins)
    trained = trained_ids(incident)
    off = not torch.is_grad_enabled()
    return sorted(
        origins,
        key=lambda origin: (
            off and not lingers(origin),
            _untrained(origin, trained),
            origin.kind == "sample",
            origin.discrete,
            not origin.certain,
        ),
    )


def trained_ids(incident: Incident) -> set[int]:
    """The ids of the parameters that live optimizers hold."""
    return set().union(*map(trained_by, incident.names.optimizers()))


def _untrained(origin: Origin, trained: set[int]) -> bool:
    return bool(origin.leaves) and bool(trained) and not any(id(leaf) in trained for leaf in origin.leaves)


def of_trained(incident: Incident, origin: Origin) -> bool:
    """Whether an optimizer holds a leaf that was cut off, as far as leaves are known."""
    trained = trained_ids(incident)
    return not trained or not origin.leaves or any(id(leaf) in trained for leaf in origin.leaves)
