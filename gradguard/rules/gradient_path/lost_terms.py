"""GG308: which parts of a loss that backward accepts have lost their path. Built to stay silent when in doubt."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.history import cut_origins, loss_expressions
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.sites import function_word, in_words, same_place, short
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.notes import Notes
from gradguard.instrumentation.facts import Cut
from gradguard.instrumentation.journal import Journal, current_journal
from gradguard.rules.gradient_path import additive, lost_path, patching, regraphed, terms, wording
from gradguard.rules.gradient_path.additive import Region
from gradguard.rules.gradient_path.sampled import sampled
from gradguard.rules.told import Told
from gradguard.torch_compat.private_api import node_sequence

_TRIES = 12  # looks at one backward call's line in one run: the same line shows the same graph again and again


@dataclass
class _Looked:
    """How often each backward call's line was looked at, and the lines at which the source was asked in vain."""

    calls: Counter[Any] = field(default_factory=Counter)
    in_vain: set[tuple[str, int]] = field(default_factory=set)


def screen(notes: Notes, moment: str, facts: dict[str, Any], traced: bool) -> bool:
    """Whether a value without a path has gone into anything, and this line is still to be looked at."""
    journal, call = current_journal(), facts["call"]
    if call is None or not (journal.partial or journal.fed):
        return False
    return bool(notes[_Looked].calls[call.site] < _TRIES)


def recognise(incident: Incident) -> Diagnosis | None:
    """See the rule."""
    journal = incident.journal
    nodes = incident.root_nodes
    call = incident.call
    if not nodes or call is None or call.nested or call.create_graph:
        return None
    since = _since(journal, call)
    newest_partial = next(reversed(journal.partial), -1)
    newest_fed = next(reversed(journal.fed), -1)
    if max(newest_partial, newest_fed) < since[1]:
        return None
    looks = incident.notes[_Looked].calls
    if looks[call.site] >= _TRIES:
        return None
    looks[call.site] += 1
    region = additive.region(nodes, journal.fed)
    found = None
    if newest_partial >= since[1]:
        found = _term(incident, region, since[0])
    if found is None and max(newest_fed, newest_partial) >= since[1]:
        found = sampled(incident, region, since[1])
    if found is None and newest_fed >= since[1]:
        found = _weight(incident, region, since)
    return found


def _since(journal: Journal, call: Any) -> tuple[int, int]:
    """Clock and sequence number at which this step's values begin: the previous backward from the same line, or the last step."""
    for fact in reversed(journal.backwards):
        if fact is not call and fact.site == call.site and not fact.nested:
            return fact.clock, fact.seq
    return 0, 0


# -- a term without a path --------------------------------------------------------------------------------------------------


def _term(incident: Incident, region: Region, since: int) -> Diagnosis | None:
    journal = incident.journal
    members = {node_sequence(node) for node in region.members}
    for node in region.sums:
        seq = node_sequence(node)
        cuts = journal.partial.get(seq)
        if cuts is None:
            continue
        place = incident.place_of_node(seq)
        if cuts:
            scalar = additive.scalar(node)
            found = [cut_origins.of_cut(incident, cut) for cut in cuts if _counts(cut, since, members, scalar)]
            found = [origin for origin in found if not _intended(origin, place)]
        else:
            found = _told(incident, place, since)
        found = _trained(incident, cut_origins.ranked(incident, cut_origins.merged(found)))
        if not found or _difference(incident, node, found[0]) or _frozen_meanwhile(incident, found[0], since):
            continue
        if additive.is_pile(node) and not additive.of_terms(node):
            continue
        if not cuts or additive.scalar(node) or _is_add(node):
            return _tell_term(incident, found, place, node)
    return None


def _counts(cut: Cut, since: int, members: set[int], scalar: bool) -> bool:
    """Whether an origin can be a bug: of this step, no random sample, and not itself a live term (`x - x.detach()`)."""
    if cut.clock <= since or cut.kind == "sample" or cut.drawn or any(seq in members for seq in cut.sources):
        return False
    return scalar or cut.kind not in ("nondiff", "cast")


def _frozen_meanwhile(incident: Incident, origin: Origin, since: int) -> bool:
    """Whether the optimizer that this loss trains holds what was frozen in this very step: a critic that was frozen for another's turn.

    What it judges is detached on purpose then (`critic(fake.detach())`), and the term lacks the critic's own parameters.
    """
    if origin.kind not in ("detach", "data"):
        return False
    live = {id(getattr(node, "variable", None)) for node, _ in walk(incident.root_nodes)}
    for optimizer in incident.names.optimizers():
        held = parameters_of(optimizer)
        frozen = [parameter for parameter in held if not parameter.requires_grad]
        if not any(id(parameter) in live for parameter in held):
            continue
        if any(incident.journal.toggled_at(parameter) > since for parameter in frozen):
            return True
    return False


def _is_add(node: Any) -> bool:
    return str(node.name()).startswith(("Add", "Stack", "Cat"))


def _intended(origin: Origin, place: ResolvedSite | None) -> bool:
    """A stop-gradient trick shows it in one statement: what is detached stands beside itself (`z + (q - z).detach()`)."""
    if (
        origin.place is None
        or place is None
        or place.statement is None
        or origin.place.statement is not place.statement
        or origin.place.source is None
    ):
        return False
    if origin.kind not in ("detach", "data"):
        return False
    cut = origin.place.node
    source = origin.place.source
    others: set[str] = set()
    for node in inside(place.statement, ast.Name, ast.Attribute):
        if isinstance(node.ctx, ast.Load) and node is not cut and not (cut is not None and _below(source, node, cut)):
            others.add(source.flat(node))
    return bool(others.intersection(origin.place.inner_names))


def _below(source: Any, node: ast.AST, above: ast.AST) -> bool:
    return any(item is above for item in source.ancestors(node))


def _trained(incident: Incident, found: list[Origin]) -> list[Origin]:
    """Without the origins that only networks outside every optimizer stand behind (teachers, targets)."""
    if not found:
        return []
    trained = cut_origins.trained_ids(incident)
    if not trained:
        return found
    kept = []
    for origin in found:
        leaves = origin.leaves or _leaves_behind(incident, origin)
        if not leaves or any(id(leaf) in trained for leaf in leaves):
            kept.append(origin)
    return kept


def _leaves_behind(incident: Incident, origin: Origin) -> list[torch.Tensor]:
    """What the source says stands behind a detached value."""
    followed = loss_expressions.flow_of_root(incident)
    for other in followed[1].found if followed is not None else ():
        if other.key == origin.key:
            return other.leaves
    return []


def _difference(incident: Incident, node: Any, origin: Origin) -> bool:
    """`current - reference`: the same parameters stand behind both sides, and the reference stays fixed on purpose."""
    if _is_add(node):
        return False
    if not additive.scalar(node):
        return True
    leaves = origin.leaves or _leaves_behind(incident, origin)
    if not leaves:
        return False
    live = {id(getattr(inner, "variable", None)) for inner, _ in walk([source for source, _ in node.next_functions if source is not None])}
    return all(id(leaf) in live for leaf in leaves) and not _scaled(incident, node)


def _scaled(incident: Incident, node: Any) -> bool:
    """`- 0.01 * entropy`: a term with a weight of its own is no reference."""
    place = incident.place_of_node(node_sequence(node))
    expression = place.node if place is not None else None
    return isinstance(expression, ast.BinOp) and isinstance(expression.right, ast.BinOp) and isinstance(expression.right.op, ast.Mult)


def _told(incident: Incident, place: ResolvedSite | None, since: int) -> list[Origin]:
    """A number or an array as a term: the source leads to where its value left torch, and the record confirms it."""
    vain = incident.notes[_Looked].in_vain
    key = (place.file, place.line) if place is not None else ("", 0)
    if key in vain:
        return []
    escaped: dict[tuple[object, ...], Origin] = {}
    for fact in incident.journal.escapes:
        if fact.clock > since and fact.cut is not None:
            for cut in fact.cut.roots():
                origin = cut_origins.of_cut(incident, cut)
                escaped.setdefault(origin.key, origin)
    found = []
    for origin in terms.pathless(incident):
        seen = escaped.get(origin.key)
        if seen is not None and not seen.discrete:
            seen.leaves = seen.leaves or origin.leaves
            seen.outer = seen.outer or origin.outer
            found.append(seen)
    if not found:
        vain.add(key)
    return found


def _tell_term(incident: Incident, found: list[Origin], place: ResolvedSite | None, node: Any) -> Diagnosis:
    origin = found[0]
    incident.notes[Told].lost_terms.add(origin.key)
    root = incident.roots[0]
    name = lost_path.root_name(incident, root)
    term = _term_name(origin, place, additive.pathless_side(incident, node))
    culprit, related = lost_path.story(origin)
    outer = origin.outer
    if outer is not None and not same_place(outer, origin.place) and not same_place(outer, place):
        related.append(outer.span("called from here", "context"))
    if place is not None and not same_place(place, origin.place):
        related.append(place.span(f"{f'`{term}`' if term else 'the term'} is added here", "carried"))
    if incident.place is not None and not (place is not None and place.line == incident.place.line):
        related.append(incident.place.span("runs, without this term", "backward"))
    what = f"`{term}`" if term else "a term of the loss"
    fix = patching.with_patch(wording.fix(origin, name), origin, found)
    if fix.patch is None and len(found) == 1 and (patch := patching.term_without_item(origin, place)) is not None:
        fix = fix.model_copy(update={"patch": patch, "safety": "unsafe"})
    headline = f"{what} is part of {in_words(name)} but gives no gradient: {wording.why(origin, term or name)}"
    return Diagnosis(
        code="GG308", name="partial-detach", severity="warning", headline=headline, culprit=culprit, related=related,
        tensors=[lost_path.facts(incident.names.leaf(leaf), leaf) for leaf in origin.leaves[:3]],
        explanation=f"backward() works, because the rest of {in_words(name)} has a graph; this term only changes the number. "
                    f"{wording.explanation(origin, name)}",
        fixes=[*regraphed.anew(incident, origin), fix],
        notes=["If the term is only meant to be reported, keep it out of what backward() is called on."], confidence="likely",
    )  # fmt: skip


def _term_name(origin: Origin, place: ResolvedSite | None, pathless: int | None) -> str | None:
    """The term as written in the sum: the operand without a graph, where that is known, or what is not the other side."""
    node = place.node if place is not None else None
    if isinstance(node, ast.BinOp) and place is not None and place.source is not None:
        if pathless is not None:
            return short(place.source.flat((node.left, node.right)[pathless]), 40)
        outer = {origin.place.targets[0]} if origin.place is not None and origin.place.targets else set()
        for side in (node.right, node.left):
            text = place.source.flat(side)
            if text in outer:
                return short(text, 40)
        return short(place.source.flat(node.right), 40)
    if isinstance(node, ast.AugAssign) and place is not None and place.source is not None:
        return short(place.source.flat(node.value), 40)
    return None


# -- a weight that only its regularizer trains --------------------------------------------------------------------------------


def _weight(incident: Incident, region: Region, since: tuple[int, int]) -> Diagnosis | None:
    """A trained parameter is detached where it weighs the loss; what is left of its gradient is the same in every step."""
    journal = incident.journal
    constant = {id(leaf): leaf for leaf in additive.constant_leaves(region, incident.root_nodes) if leaf.numel() <= 4096}
    if not constant:
        return None
    trained = cut_origins.trained_ids(incident)
    graph = {node_sequence(node) for node, _ in walk(incident.root_nodes)}
    for seq in reversed(journal.fed):
        if seq < since[1]:
            break
        if seq not in graph:
            continue
        for cut in journal.fed[seq]:
            leaf = next(
                (leaf for leaf in (ref() for ref in cut.leaves) if leaf is not None and id(leaf) in constant and id(leaf) in trained), None
            )
            if leaf is None or cut.clock <= since[0] or cut.kind not in ("detach", "data", "no_grad", "escape", "rewrap"):
                continue
            origin = cut_origins.of_cut(incident, cut)
            if origin.place is not None:
                return _tell_weight(incident, origin, leaf, resolve(cut.outer), incident.place_of_node(seq))
    return None


def _tell_weight(incident: Incident, origin: Origin, leaf: torch.Tensor, outer: ResolvedSite | None, use: ResolvedSite | None) -> Diagnosis:
    name = incident.names.leaf(leaf) or "a parameter"
    root = lost_path.root_name(incident, incident.roots[0])
    culprit, related = lost_path.story(origin)
    if use is not None and not same_place(use, origin.place):
        related.append(
            use.span(f"{f'`{wording.result_name(origin)}`' if wording.result_name(origin) else 'it'} weighs the loss here", "context")
        )
    if outer is not None and not same_place(outer, incident.place):
        related.append(outer.span("called from here", "context"))
    if incident.place is not None:
        related.append(incident.place.span(f"gives `{name}` the same gradient in every step", "backward"))
    return Diagnosis(
        code="GG308", name="partial-detach", severity="warning",
        headline=f"`{name}` is detached where it weighs the loss{function_word(origin.place)}: its gradient is a constant that "
                 f"no data can change",
        culprit=culprit, related=related, tensors=[lost_path.facts(name, leaf)],
        explanation=f"All that is left of the way from {in_words(root)} to `{name}` is a plain sum, whose slope is the same in every "
                    f"step: the parameter drifts in one direction for ever.",
        fixes=[patching.with_patch(wording.fix(origin, root), origin)], confidence="likely",
    )  # fmt: skip
