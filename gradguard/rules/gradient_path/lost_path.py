"""The loss has no path: finds where it was lost and tells the story. Shared by GG301, GG302, GG304 and the silent forms of them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradguard.analysis.graph.walk import leaves, root_nodes
from gradguard.analysis.history import cut_origins as origins
from gradguard.analysis.history import loss_expressions
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.alive_tensors import Alive
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.sites import UNNAMED, bare, in_words, same_place, short
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, SourceSpan, TensorFacts
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.notes import Notes
from gradguard.instrumentation.facts import Cut
from gradguard.instrumentation.journal import current_journal
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.rules.gradient_path import in_play, patching, read_twice, wording
from gradguard.rules.gradient_path.called_by_autograd import called_by_autograd, computed_at, with_grad
from gradguard.rules.gradient_path.still_off import still_off
from gradguard.rules.told import Told
from gradguard.torch_compat.private_api import only_leaf

MESSAGES = ("does not require grad and does not have a grad_fn",)
NAMES = {"GG301": "no-grad-mode", "GG302": "detached", "GG304": "non-differentiable-op", "GG305": "inference-tensor"}
_ELEMENT = re.compile(r"element (\d+) of tensors")


@dataclass
class LostPath:
    """What is known of a root without a path: the origins, likeliest first, and whether backward ran nevertheless.

    There are no origins where the optimizer in play has nothing to train (`frozen`): whatever was cut, there was no path.
    """

    root: torch.Tensor
    root_name: str
    origins: list[Origin]
    silent: bool
    frozen: in_play.AllFrozen | None = None

    @property
    def code(self) -> str | None:
        return wording.rule_of(self.origins[0]) if self.origins else None


def lost_path(incident: Incident) -> LostPath | None:
    """Looks once an incident; None where this is another kind of incident."""
    memo = incident.__dict__
    if "_lost_path" not in memo:
        memo["_lost_path"] = _silent(incident) if incident.error is None else _raised(incident)
    found: LostPath | None = memo["_lost_path"]
    return found


def _raised(incident: Incident) -> LostPath | None:
    if incident.where not in ("backward", "grad") or not incident.roots:
        return None
    match = _ELEMENT.search(incident.message)
    index = int(match[1]) if match else 0
    root: Any = incident.roots[index] if index < len(incident.roots) else incident.roots[0]
    if not isinstance(root, torch.Tensor):  # a GradientEdge
        return None
    found = find(incident, root)
    found = _of_the_one_in_play(incident, found) or found
    frozen = in_play.all_frozen(incident, bool(found)) if not found or wording.rule_of(found[0]) in ("GG302", "GG304") else None
    return LostPath(root, root_name(incident, root), [] if frozen is not None else found, False, frozen)


def _of_the_one_in_play(incident: Incident, found: list[Origin]) -> list[Origin]:
    """Of an optimizer that was zeroed for this very backward, and holds but a few numbers: where one of them left torch in this step.

    A Python number carries no memory of what it was, so that a product with one only knows of its other factor's past.
    """
    ledger = incident.notes[Ledger]
    owner = None
    if ledger.zeroed_by is not None and ledger.last_zero is not None and ledger.last_zero[1] == ledger.backwards:
        owner = ledger.zeroed_by()
    trained = [p for p in parameters_of(owner) if p.numel() == 1]
    if not trained or len(trained) != len(parameters_of(owner)):
        return []
    if any(leaf is p for origin in found for leaf in origin.leaves for p in trained):
        return []
    for fact in reversed(incident.journal.escapes):
        if fact.step != incident.journal.step:
            break
        if fact.cut is not None and any(ref() is p for cut in fact.cut.roots() for ref in cut.leaves for p in trained):
            return origins.merged(origins.of_cut(incident, cut) for cut in fact.cut.roots())
    return []


def _silent(incident: Incident) -> LostPath | None:
    """A loss that was made a leaf by hand: backward runs, and fills its own .grad."""
    for root in incident.roots:
        if (
            isinstance(root, torch.Tensor)
            and root.requires_grad
            and root.grad_fn is None
            and not isinstance(root, torch.nn.Parameter)
            and root.numel() == 1
        ):
            found = find(incident, root, leaf=True)
            if found:
                return LostPath(root, root_name(incident, root), found, True)
        leaf = fresh_leaf(root)
        cut = None if leaf is None else incident.journal.cut_of(leaf)
        if cut is not None and _of_losses(incident, cut):
            return LostPath(root, root_name(incident, root), [origins.of_cut(incident, cut)], True)
    return None


def _of_losses(incident: Incident, cut: Cut) -> bool:
    """Whether single numbers that trained parameters stand behind were copied into a new tensor (`torch.tensor(losses)`).

    Nothing else is: a leaf made of a network's output may be what is optimised, or the border of a backward in two parts.
    """
    if cut.kind != "rewrap" or cut.guess or not cut.sources:
        return False
    made = Alive().made_at(set(cut.sources))
    trained = origins.trained_ids(incident)
    numbers = bool(made) and all(tensor.numel() == 1 for tensor in made)
    return numbers and any(id(leaf) in trained for leaf in leaves(root_nodes(made)))


def fresh_leaf(root: Any) -> torch.Tensor | None:
    """The only leaf behind a root, through a few ops of one input each, if it was made of values that had a graph before."""
    node = getattr(root, "grad_fn", None)
    leaf = None if node is None else only_leaf(node, 6)
    known = leaf is not None and not isinstance(leaf, torch.nn.Parameter) and current_journal().cut_of(leaf) is not None
    return leaf if known else None


def root_name(incident: Incident, root: torch.Tensor) -> str:
    """What the user calls the tensor that backward was called on."""
    return incident.names.of(root) or root_text(incident) or UNNAMED


def root_text(incident: Incident) -> str | None:
    """The root as written in the backward call."""
    place = incident.place
    if place is None or place.call is None or place.source is None:
        return None
    expression = loss_expressions.root_expression(place)
    return None if expression is None else short(place.source.flat(expression), 40)


def find(incident: Incident, root: torch.Tensor, leaf: bool = False) -> list[Origin]:
    """The origins of a root without a path, likeliest first: as recorded, else as the source tells."""
    recorded = origins.of_tensor(incident, root)
    if recorded and not leaf and torch.is_inference_mode_enabled() and recorded[0].kind == "inference" and recorded[0].switch is None:
        off = still_off(incident)  # inference mode goes on, and what entered it was not seen around the cut
        if off is not None:
            return [off]
    if recorded:
        if len(recorded) > 1:
            return loss_expressions.refined(incident, origins.ranked(incident, recorded))
        return recorded
    if not leaf and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):  # the latter records nothing, grad mode on or off
        off = still_off(incident)
        if off is not None:
            return [off]
    return loss_expressions.origins_of_root(incident, leaf)


def screen(notes: Notes, moment: str, facts: dict[str, Any], traced: bool) -> bool:
    """Before a backward that works there is something to say only of a root that is a leaf itself."""
    for root in facts["roots"]:  # noqa: SIM110  (a generator for `any` costs as much again, in every traced step)
        if getattr(root, "grad_fn", None) is None:
            return True
    return False


def screen_fresh(notes: Notes, moment: str, facts: dict[str, Any], traced: bool) -> bool:
    """The same, and of a root that hangs on a fresh leaf."""
    return screen(notes, moment, facts, traced) or (
        current_journal().has_cuts and any(fresh_leaf(root) is not None for root in facts["roots"])
    )


# -- the story ------------------------------------------------------------------------------------------------------------


def recognise(incident: Incident, code: str) -> Diagnosis | None:
    """The diagnosis, if the likeliest origin is this rule's cause."""
    lost = lost_path(incident)
    if lost is None or lost.code != code:
        return None
    return tell(incident, lost, code)


def tell(incident: Incident, lost: LostPath, code: str) -> Diagnosis:
    """The diagnosis of a lost path."""
    origin = lost.origins[0]
    root = lost.root_name
    certain = origin.certain
    inside = called_by_autograd(incident, origin)
    if inside is not None:
        first = computed_at(inside, root, incident.place) if origin.switch is not None else origin.place
        origin = replace(origin, place=first or origin.place, switch=None)
    culprit, related = story(origin)
    toggled = _toggle(incident, lost)
    if toggled is not None and not same_place(toggled, origin.place):
        related.append(
            toggled.span(f"switches requires_grad on by hand: backward() then runs, but ends at {in_words(root)} itself", "carried")
        )
    called = _called(origin, incident)
    if called is not None:
        related.append(called.span("called from here", "context"))
    if incident.place is not None:
        related.append(
            incident.place.span("runs, and reaches no parameter" if lost.silent else f"{in_words(root)} has no graph to follow", "backward")
        )
    clause = wording.why(origin, root)
    if inside is not None:
        clause = f"{wording.computed(origin, root)} in `{inside.name}`, and {inside.clause}"
    if lost.silent:
        incident.notes[Told].fresh_leaf = True  # GG606 need not tell of the parameters that it keeps from gradients
        what = "is" if lost.root.grad_fn is None else "is computed from"
        headline = f"backward() runs, but no gradient can reach any parameter: {in_words(root)} {what} a fresh leaf, since {clause}"
    else:
        headline = f"{in_words(root)} has no gradient path: {clause}"
    twice = read_twice.of_cut(incident.journal, origin.cut, incident.call) if len(incident.names.optimizers()) > 1 else None
    reads = None if twice is None else read_twice.told(origin, twice, in_words(root))
    fixes = [patching.with_patch(wording.fix(origin, root), origin)]
    if reads is not None:
        culprit, fixes = reads.culprit, [reads.fix]
        related = [*reads.related, *related]
    elif twice is not None:
        fixes = [read_twice.without_cut(origin, in_words(root))]
    why = wording.explanation(origin, root)
    if inside is not None:
        why, fixes = inside.why, [with_grad(root, origin.place, incident.place)]
    return Diagnosis(
        code=code, name=NAMES[code], severity="warning" if lost.silent else "error", headline=headline, culprit=culprit, related=related,
        tensors=[facts(root, lost.root)], explanation=why, fixes=fixes, avoid=_avoid(lost, origin),
        notes=_notes(incident, lost), confidence="certain" if certain and len(lost.origins) == 1 else "likely",
    )  # fmt: skip


def story(origin: Origin) -> tuple[SourceSpan | None, list[SourceSpan]]:
    """The culprit and the places that belong to it."""
    related: list[SourceSpan] = []
    place = origin.place
    switch = origin.switch
    culprit: SourceSpan | None
    if (
        not origin.into_leaf
        and switch is not None
        and switch.how not in ("library", "caller")
        and wording.rule_of(origin) in ("GG301", "GG305")
    ):
        culprit = switch.span.model_copy(update={"label": wording.switch_label(origin), "role": "culprit"})
        related += switch.also
        if place is not None:
            related.append(shown(place).model_copy(update={"label": wording.label(origin), "role": "cut"}))
    else:
        culprit = None if place is None else shown(place).model_copy(update={"label": wording.label(origin), "role": "culprit"})
        if culprit is not None and switch is not None and switch.how == "caller" and switch.also:  # what calls could have been told not to
            related.append(culprit.model_copy(update={"role": "cut"}))
            culprit = switch.also[0]
    if origin.made is not None and not same_place(origin.made, place):
        whole = origin.made.node is None or getattr(origin.made.statement, "value", None) is origin.made.node
        inner = origin.inner if (origin.inner or "").replace(".", "").isidentifier() else None  # a list was not made there, its items were
        name = origin.made.targets[0] if origin.made.targets and whole else origin.made.text if origin.made.targets else inner
        related.insert(
            0, origin.made.span(f"`{short(name, 32)}` still has its graph here" if name else "up to here there is a graph", "made")
        )
    return culprit, related


def shown(place: ResolvedSite) -> SourceSpan:
    """The expression; its statement where that is one line and tells more."""
    return place.span()


def facts(name: str | None, tensor: torch.Tensor) -> TensorFacts:
    """What can be told of a tensor, odd kinds included."""
    try:
        shape: list[int] | None = list(tensor.shape)
    except internal_error():  # nested tensors have no sizes
        shape = None
    return TensorFacts(
        name=name,
        shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        requires_grad=tensor.requires_grad,
    )


def _called(origin: Origin, incident: Incident) -> ResolvedSite | None:
    """The call that led into the culprit's function, when nothing else in the story shows it."""
    outer = origin.outer
    if outer is None or same_place(outer, incident.place) or same_place(outer, origin.place):
        return None
    if origin.place is not None and outer.function == origin.place.function and outer.line == origin.place.line:
        return None
    return outer


def _toggle(incident: Incident, lost: LostPath) -> ResolvedSite | None:
    if not lost.silent:
        return None
    known = incident.journal.toggle_of(lost.root)
    return resolve(known[1]) if known is not None and known[0] else loss_expressions.toggle_in_source(incident)


def _avoid(lost: LostPath, origin: Origin) -> list[str]:
    root = lost.root_name
    done = "That is what was done here" if lost.silent else "It silences the error"
    return [
        f"`{bare(root)}.requires_grad_(True)` (or `Variable({bare(root)}, requires_grad=True)`) is no cure. {done}: {in_words(root)} "
        "becomes a leaf of its own, backward() fills `.grad` of it, and no parameter learns anything."
    ]


def _notes(incident: Incident, lost: LostPath) -> list[str]:
    notes = []
    others = [other for other in lost.origins[1:] if other.place is not None]
    if others:
        places = "; ".join(
            f"line {_line(other)} (`{short(wording.operation(other) if other.switch is None else other.switch.text, 40)}`)"
            for other in others[:3]
        )
        notes.append(f"The path is cut at other places too: {places}. A target or a mask may stay cut; what is to be trained may not.")
    if not lost.origins[0].certain:
        read = "The line was found by reading the source, not seen as it ran: check that it is the one."
        strict = " With `level: strict` (or GRADGUARD_LEVEL=strict) every step is recorded, and the line is certain."
        notes.append(read if incident.traced else read + strict)
    asked, switch = wording.condition(lost.origins[0]), lost.origins[0].switch
    if asked is not None and switch is not None:
        notes += _values(incident, switch.span.function, asked)
    if not lost.silent:
        notes += second_problem(lost.root, lost.root_name, incident)
    return notes


def _values(incident: Incident, function: str | None, expression: str) -> list[str]:
    """What the words and flags of a condition are, where the function that asks is still running."""
    name = (function or "<module>").rpartition(".")[2]
    view = next((view for view in incident.user_frames if view.frame.f_code.co_name == name), None)
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:  # cut in the middle
        return []
    found = []
    for node in inside(tree, ast.Name) if view is not None else ():
        value = view.locals.get(node.id) if view is not None else None
        if isinstance(value, (str, bool, int)) and len(repr(value)) <= 40:
            found.append(f"`{node.id}` is `{value!r}`")
    return [f"{', '.join(dict.fromkeys(found))} when backward() is called."] if found else []


def _line(origin: Origin) -> int:
    if origin.switch is not None and origin.switch.how not in ("library", "caller"):
        return origin.switch.span.line
    return origin.place.line if origin.place is not None else 0


def second_problem(root: torch.Tensor, name: str, incident: Incident) -> list[str]:
    """What backward() would complain of next."""
    notes = []
    try:
        count = root.numel()
    except internal_error():
        return []
    if not (root.is_floating_point() or root.is_complex()):
        notes.append(f"`{name}` is of dtype {str(root.dtype).removeprefix('torch.')}: only floating point values can have gradients.")
    if count != 1 and not _gives_gradient(incident):
        notes.append(
            f"A second problem waits behind this one: `{name}` has {count} elements (shape {list(root.shape)}), and backward() "
            f"without `gradient=` "
            f"needs a single number. Reduce it: `{name}.mean().backward()` or `{name}.sum().backward()`."
        )
    return notes


def _gives_gradient(incident: Incident) -> bool:
    place = incident.place
    call = place.call if place is not None else None
    if call is None:
        return False
    given = "grad_outputs" if incident.where == "grad" else "gradient"
    if any(keyword.arg in (given, "grad_tensors") for keyword in call.keywords):
        return True
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "backward"
        and bool(call.args)
        and incident.where == "backward"
        and loss_expressions.is_method(call)
    )
