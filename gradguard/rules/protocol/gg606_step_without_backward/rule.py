"""# GG606 step-without-backward

## What it is
An optimizer steps though no backward has given it a gradient since its last step: it applies the same gradient again, or has
none at all.

## Why it is wrong
A second `step()` on one gradient doubles the update (momentum and Adam's averages count it twice), at parameters where that
gradient was never computed. A step without any gradient does nothing: then `backward()` is missing.

## Example
    def update(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    update(optimizer, loss)
    optimizer.step()          # once more, on the same gradient

## Use instead
One `step()` for each set of gradients.

## Fix safety
Unsafe: updates become half as large, which is right.

## When it speaks, what silences it
At the second step in which every gradient is the very one an earlier step has used, unchanged; at the third step in a row
without any gradient and without any backward (`autograd.grad` returns gradients and fills none); or at the tenth step in a row
of an optimizer whose parameters no backward has ever given a gradient, though backward ran; or at the fifth step in a row on
gradients that were set by hand and are the same tensors with the same values, though backward ran in between. Steps with a closure
(LBFGS), other gradients set by hand and parameters that are frozen do not count.
"""

from __future__ import annotations

import ast
import weakref
from typing import Any

from gradguard.analysis.history import cut_origins
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import elements
from gradguard.fixes.at_places import taken_out
from gradguard.fixes.edits import respelt
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.ledger_verdicts import GradientsKept, NoBackward, NoPath
from gradguard.monitors.optimizer_books import Book, Prepared
from gradguard.rules import lightning_manual, wording
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import gg741_lightning_no_loss_returned
from gradguard.rules.protocol import leaving
from gradguard.rules.protocol.blocked import blocked
from gradguard.rules.protocol.cut_off import of_calls, the_cut
from gradguard.rules.protocol.gg606_step_without_backward import closures, kept_by_hand
from gradguard.rules.protocol.gg606_step_without_backward.exchanged import exchanged
from gradguard.rules.protocol.gg606_step_without_backward.written_aside import written_aside
from gradguard.rules.protocol.new_leaves import CALLED_WITH, new_leaf
from gradguard.rules.spans import named_not_called
from gradguard.rules.told import Told

CODE, NAME = "GG606", "step-without-backward"


def recognise(incident: Incident) -> Diagnosis | None:
    """The superfluous step, and the one that had used the gradients."""
    finding = incident.finding
    book: Book = finding.book
    if incident.args[1:]:
        return None
    parameters = [p for p in book.parameters() if p.requires_grad]
    if not parameters:
        return _toggled(incident, book) if isinstance(finding, NoPath) else None
    if isinstance(finding, GradientsKept):
        return kept_by_hand.told(incident, book, CODE, NAME)
    name = wording.optimizer_name(book, incident)
    step = resolve(book.step_site)
    if isinstance(finding, NoBackward):
        if any(p.grad is not None for p in parameters):
            return None
        skipped = gg741_lightning_no_loss_returned.automatic_step(incident)
        if skipped is not None:  # a batch without a loss is skipped by design; it is a bug if there never is one, which the end will tell
            ledger = weakref.ref(incident.notes[Ledger])
            told = gg741_lightning_no_loss_returned.told(*skipped)
            book.prepared.append(Prepared(told.code, told, lambda: (alive := ledger()) is not None and not alive.backwards))
            return None
        bare = _bare_backward(step)
        taken = None if bare is not None else _returned(incident, book)
        aside = None if bare is not None else written_aside(incident, book, parameters, CODE, NAME)
        if aside is not None:
            return aside
        if taken is not None:
            return _unassigned(taken, step, book, name, len(parameters))
        closure = None if bare is not None else closures.without_backward(step)
        if closure is not None:
            bare, fix = closure
        elif bare is not None:
            patch = respelt(bare, bare.text, f"{bare.text}()") if bare.text is not None else None
            fix = Fix(title=f"Call it: `{bare.text}()`", safety="unsafe", patch=patch)
        else:
            fix = Fix(title=f"Call `{_backward(incident)}` on the loss before the step", safety="unsafe")
        return Diagnosis(
            code=CODE,
            name=NAME,
            severity="warning",
            headline=f"`{name}.step()` does nothing: no parameter has a gradient, and backward() was not called since the step before",
            culprit=bare or (None if step is None else step.span("no gradient to apply: no backward() runs before this step", "culprit")),
            related=[] if bare is None or step is None else [step.span("no gradient to apply", "context")],
            explanation=f"All {len(parameters)} parameters of `{name}` have `.grad` None at {book.empty} steps in a row, and no backward "
            "ran between them. Optimizers skip such parameters silently.",
            fixes=[fix],
        )
    if isinstance(finding, NoPath):
        return _no_path(incident, book, finding.fresh, name, parameters)
    used = [p for p in parameters if p.grad is not None]
    if not used or not any(bool(p.grad.any()) for p in used[:8] if p.grad is not None):
        return None
    earlier = next((fact for fact in reversed(list(incident.journal.steps)[:-1]) if fact.optimizer() is book.ref()), None)
    before = (
        None
        if earlier is None or earlier.site == book.step_site
        else wording.span(earlier.site, "this step has already applied them", "context")
    )
    backward = None if book.last_part is None else wording.span(book.last_part.call.site, "made these gradients", "backward")
    culprit = None if step is None else step.span("applies gradients that the step before has applied", "culprit")
    detail = "One step for each set of gradients."
    fix = Fix(title="Remove this second `step()`", safety="unsafe", detail=detail, patch=None if before is None else taken_out(step))
    if before is None and earlier is not None:  # one line has run twice, in a function or a loop
        fix = Fix(title="Run this `step()` once for each backward()", safety="unsafe")
        caller = next((view.site for view in incident.user_frames if view.site != book.step_site), None)
        before = wording.span(caller, "called from here, a second time", "context")
    clipped = wording.span(finding.clipped, "clips them in between", "context")
    first = None if clipped is None or earlier is None or earlier.site == book.step_site else resolve(earlier.site)
    if first is not None and culprit is not None:  # the one that is meant comes after the clipping
        before = culprit.model_copy(update={"role": "context", "label": "applies them a second time, clipped"})
        culprit = first.span("applies the gradients before they are clipped", "culprit")
        title = "Remove this first `step()`: the one after the clipping is enough"
        fix = fix.model_copy(update={"title": title, "patch": taken_out(first)})
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}.step()` applies the same gradients a second time: no backward ran since its last step",
        culprit=culprit,
        related=wording.spans(backward, clipped, before),
        tensors=wording.facts(used, incident.names),
        explanation=(
            f"At this step `.grad` of all {len(used)} parameters of `{name}` holds what the optimizer's previous step has used. "
            "The update is applied twice, at parameters where this gradient was never computed, and running averages count it "
            "twice."
        ),
        fixes=[fix],
    )


def _returned(incident: Incident, book: Book) -> ResolvedSite | None:
    """The autograd.grad call before this step whose result is the gradients of what the optimizer holds, by its argument's name."""
    calls = [call for call in incident.notes[Ledger].calls() if call.kind == "grad" and not call.nested and call.site is not None]
    if not calls or calls[-1].create_graph:
        return None
    place = resolve(calls[-1].site)
    inputs = None if place is None or place.call is None else [*place.call.args[1:2]]
    if place is None or place.call is None or inputs is None:
        return None
    inputs += [keyword.value for keyword in place.call.keywords if keyword.arg == "inputs"]
    held = {id(p) for p in book.parameters()}
    text = None if len(inputs) != 1 else dotted(inputs[0])
    if text is not None:
        values = [elements(value) for name, value in incident.names.bindings if name == text and isinstance(value, (list, tuple))]
        return place if any(value and all(id(item) in held for item in value) for value in values) else None
    # `list(model.parameters())`: a call about parameters
    about = inputs[0] if len(inputs) == 1 else None
    return place if about is not None and any(isinstance(n, ast.Attribute) and n.attr == "parameters" for n in ast.walk(about)) else None


def _unassigned(taken: ResolvedSite, step: ResolvedSite | None, book: Book, name: str, number: int) -> Diagnosis:
    """The gradients were computed and returned, and the step looks for them in `.grad`."""
    into = taken.targets[0] if len(taken.targets) == 1 and taken.targets[0].isidentifier() else None
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}.step()` does nothing: `autograd.grad` returns the gradients, and no parameter has one in `.grad`",
        culprit=None if step is None else step.span("no gradient to apply: `.grad` of every parameter is None", "culprit"),
        related=[taken.span(f"returns the gradients{f', which end in `{into}`,' if into else ''} and leaves `.grad` alone", "backward")],
        explanation="`torch.autograd.grad` gives gradients to its caller; only `backward()` puts them into `.grad`, where an optimizer "
        f"looks. All {number} parameters of `{name}` have `.grad` None at {book.empty} steps in a row. Optimizers skip such parameters "
        "silently.",
        fixes=[
            Fix(
                title=f"Put them in place before the step: `for p, g in zip(parameters, {into or 'grads'}): p.grad = g`",
                safety="unsafe",
                detail="Or call `backward()` on the loss, and clip with `clip_grad_norm_`.",
            )
        ],
    )


def _backward(incident: Incident) -> str:
    """What backward is called around the incident: in a LightningModule `manual_backward`."""
    return (
        "self.manual_backward(...)"
        if any(lightning_manual.is_module(view.locals.get("self")) for view in incident.frames)
        else "backward()"
    )


def _toggled(incident: Incident, book: Book) -> Diagnosis | None:
    """Everything that it holds is frozen while it steps: toggled off for another optimizer, and never toggled back."""
    parameters = book.parameters()
    toggle = lightning_manual.toggled_off(incident, parameters) if parameters and not book.frozen_at_first else None
    if toggle is None:
        return None
    name = wording.optimizer_name(book, incident)
    step = resolve(book.step_site)
    other = (dotted(toggle.call.args[0]) if toggle.call is not None and toggle.call.args else None) or "..."
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}.step()` does nothing: its parameters are frozen, toggled off for another optimizer and never untoggled",
        culprit=toggle.span("freezes what the other optimizers hold, and nothing switches it on again", "culprit"),
        related=[] if step is None else [step.span("no parameter has a gradient here", "context")],
        tensors=wording.facts(parameters, incident.names),
        explanation=f"`toggle_optimizer` sets requires_grad to False for what only other optimizers hold; `untoggle_optimizer` takes it "
        f"back. All {len(parameters)} parameters of `{name}` are still off when it steps, and none has ever had a gradient.",
        fixes=[Fix(title=f"Call `{toggle.receiver}.untoggle_optimizer({other})` after the step of `{other}`", safety="unsafe")],
    )


def _bare_backward(step: ResolvedSite | None) -> SourceSpan | None:
    """The one statement of the step's function that is `loss.backward`, without a call."""
    scope = None if step is None or step.source is None else step.enclosing_function or step.source.tree
    if step is None or step.source is None or scope is None:
        return None
    return named_not_called(step.source, scope, "backward")


def _no_path(incident: Incident, book: Book, fresh: bool, name: str, parameters: list[Any]) -> Diagnosis | None:
    """backward() runs, and nothing that it goes through leads to what this optimizer holds."""
    if any(p.grad is not None for p in parameters) or "orphaned" in book.gathered or incident.notes[Told].fresh_leaf:
        return None
    replaced = exchanged(incident, book, parameters)
    if replaced is not None:
        return replaced
    roots = wording.roots_of(parameters, incident.names)
    whose = f"`{roots[0]}`" if len(roots) == 1 else f"its {len(parameters)} parameters"
    ledger = incident.notes[Ledger]
    last = next((call for call in reversed(ledger.calls()) if call.kind == "backward"), None)
    cuts = ledger.severed.cuts([p for slot in book.active if (p := slot.ref()) is not None], last)
    found = cut_origins.merged(cut_origins.of_cut(incident, each) for each in cuts)
    active = [p for slot in book.active if (p := slot.ref()) is not None]
    between = ledger.severed.blocked(active)
    twice = None if last is None or not cuts else of_calls(incident.journal, ledger.severed.read_by(cuts), last, book.ref())
    cut = the_cut(found or leaving.left(incident, active), twice, whose) if between is None else blocked(between)
    step = wording.span(book.step_site, f"no parameter of `{name}` has a gradient here", "context")
    headline = f"`{name}.step()` does nothing: no backward() has ever given {whose} a gradient"
    fix = Fix(title=f"Compute the loss that is to train {whose} from what it computes, with its graph", safety="manual")
    culprit, related = None, list[SourceSpan]()
    if cut is not None:
        culprit, related, fix = cut.culprit, cut.related, cut.fix
        headline += f": {cut.clause}"
    elif last is not None and (leaf := ledger.severed.new_leaf(last)) is not None and (switched := resolve(leaf.site)) is not None:
        culprit = switched.span("a new leaf in each step, which no module and no optimizer has: the gradient ends in it", "culprit")
        related = wording.spans(wording.span(last.site, "reaches that leaf and nothing else", "backward"))
        headline += ": its loss is computed from a tensor made anew in each step, whose requires_grad is switched on by hand"
        fix = Fix(
            title=f"Compute the loss from what {whose} computes: a list of tensors becomes one, with its graph, by `torch.stack`",
            safety="manual",
        )
    elif fresh and (made := new_leaf(incident)) is not None:
        culprit = made.statement_span("a new leaf in each step: no gradient leads from it back to what it is made of", "culprit")
        headline += ": what is trained are Parameters made anew in each step"
        fix = CALLED_WITH
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=[*related, *wording.spans(step)],
        tensors=wording.facts(parameters, incident.names),
        explanation=f"All {len(parameters)} parameters of `{name}` have had `.grad` None at {book.empty} steps in a row, while backward() "
        "ran in between and filled others. Optimizers skip such parameters silently.",
        fixes=[fix],
        confidence="likely",
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a step without new gradients: the same gradient twice, or none",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
