"""# GG609 train-eval-mode

## What it is
A module with dropout or batch normalisation runs in the wrong mode: validation in train mode, training left in eval mode
after a validation, or the batch norms of a frozen network still in train mode. Or dropout is called as a function
(`F.dropout(x, 0.5)`) that does not ask for the mode, or as a module that `eval()` does not reach (`nn.Dropout(0.5)(x)` in
`forward`); or `net.training = False` was to do what only `net.eval()` does. Or a network with the old `spectral_norm` is trained in
eval mode, in which its estimate of the norm stays at random. Or a moving average or target network is updated over `parameters()`
alone, and runs in eval mode with batch norms whose running statistics, which are buffers, nothing has ever moved.

## Why it is wrong
In train mode dropout throws values away at random, and batch norm both normalises with the batch at hand and moves its
running statistics: validation is noisy and leaks into the model. In eval mode neither regularises nor learns statistics. A
frozen network whose batch norms are in train mode is not frozen: its outputs drift.

## Example
    @torch.no_grad()
    def validate(loader):
        for x, y in loader:
            logits = net(x)          # net is still in train mode

## Use instead
`net.eval()` before validating, `net.train()` after it; after `model.train()` put frozen parts back: `model.backbone.eval()`.

## Fix safety
Unsafe: results change, to what is meant.

## When it speaks, what silences it
At the third forward of a trained module without grad, in train mode and with different inputs, with no backward between;
calls whose result is thrown away (re-estimating batch norm) and the same input again and again (Monte Carlo dropout) are
silent, and so are modules in no optimizer (targets, teachers). At the fifth step in a row of an optimizer whose trained
modules are in eval mode since calls of `eval()` that were followed by forwards of them without grad. At the 24th step of an
optimizer, about batch norms in train mode whose own parameters are frozen and have not changed since its 12th. At the first
forward without grad in eval mode of a trained module whose forward, or a function that it calls in any case, calls a dropout
function without saying what `training` is, where that call has run; `training=True` says so. There too when a dropout or
batch norm in train mode, which is no part of the module, was made in the call or is kept in a plain list or dict. And at the
third such forward on different inputs of a module whose own flag is False while its parts are in train mode, if `eval()` was
not called and one statement sets a `training` to False. And at the 12th step of an optimizer, about a weight under
`torch.nn.utils.spectral_norm` in eval mode whose `u` and `v` are no singular vectors of it, which one forward in train mode
mends. And where a network that no optimizer has runs in eval mode with the running statistics that it was made with, although
its parameters have changed since training began and a trained network of the same class has moved its own statistics.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import as_code
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import modules_in, named_modules, parameters_in
from gradguard.fixes.at_places import put_after, put_around
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.initial_statistics import InitialStatistics
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.surveys import FrozenModesDue
from gradguard.monitors.tensor_state import few_values, version_of
from gradguard.monitors.train_modes import EvalOfOwnForward, ForwardsWithoutGrad, LeftInEval, OutOfReach
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.gg609_train_eval_mode import unconverged_norm, unfollowed_statistics
from gradguard.rules.protocol.gg609_train_eval_mode.bare_flag import bare_flag
from gradguard.rules.protocol.gg609_train_eval_mode.functional_dropout import functional_dropout
from gradguard.rules.protocol.gg609_train_eval_mode.left_in_eval import left_in_eval
from gradguard.rules.protocol.gg609_train_eval_mode.out_of_reach import out_of_reach
from gradguard.rules.protocol.gg609_train_eval_mode.telling import act, acting, uncalled

CODE, NAME = "GG609", "train-eval-mode"


def recognise(incident: Incident) -> Diagnosis | None:
    """The forward in the wrong mode, or the switch that put it there."""
    finding = incident.finding
    if isinstance(finding, FrozenModesDue):
        return _frozen(incident)
    if isinstance(finding, EvalOfOwnForward):
        module = finding.module()
        return None if module is None else functional_dropout(incident, module, CODE, NAME)
    if isinstance(finding, LeftInEval):
        return left_in_eval(incident, finding, CODE, NAME)
    if isinstance(finding, ForwardsWithoutGrad) and (root := finding.root()) is not None:
        return bare_flag(incident, root, finding.site, acting(root), CODE, NAME) if finding.bare else _validating(incident, finding, root)
    if isinstance(finding, OutOfReach):
        return out_of_reach(incident, finding, CODE, NAME)
    if isinstance(finding, InitialStatistics):
        return unfollowed_statistics.unfollowed_statistics(incident, finding, CODE, NAME)
    return None


def _validating(incident: Incident, finding: ForwardsWithoutGrad, root: nn.Module) -> Diagnosis | None:
    place = resolve(finding.site)
    if place is None or (isinstance(place.statement, ast.Expr) and place.statement.value is place.node):
        return None
    name = incident.names.of(root) or (place.callee if place.callee else None) or type(root).__name__
    what = acting(root)
    effects = []
    if "dropout" in what:
        effects.append("dropout is on")
    if "batch" in what:
        effects.append("batch norm uses the statistics of the batch and moves its running ones")
    outer = [view for view in incident.user_frames if view.site != finding.site]
    caller = wording.span(outer[0].site, "called from here", "context") if outer else None
    culprit: SourceSpan | None
    culprit = place.span(f"`{name}.training` is True: {what} {act(what)} as in training", "culprit")
    around = put_around(place, f"{name}.eval()", f"{name}.train()")
    fix = Fix(title=f"Call `{name}.eval()` before and `{name}.train()` after", safety="unsafe", patch=around)
    culprit, fix, told = uncalled(incident, name, "eval", culprit, fix)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` runs without grad in train mode: {' and '.join(effects)}",
        culprit=culprit,
        related=wording.spans(told, caller),
        explanation=(
            f"Several forwards in a row run with grad mode off, on different inputs, while `{name}` (which an optimizer trains) "
            "is in train mode. "
            "no_grad switches recording off, not the mode of the modules."
        ),
        fixes=[fix],
        avoid=["`torch.no_grad()` alone: it does not change what dropout and batch norm do"],
    )


def _frozen(incident: Incident) -> Diagnosis | None:
    """Batch norms of a frozen part in train mode."""
    book = incident.finding.book
    if not isinstance(book, Book) or book.steps not in (12, 24, 60, 150):
        return None
    roots = _roots(incident)
    unfollowed_statistics.survey(incident, roots)
    unconverged = unconverged_norm.find(book, roots)
    if unconverged is not None:
        return unconverged_norm.render(unconverged, incident, CODE, NAME)
    trained = {id(p) for p in book.parameters()}
    if not any(p.requires_grad for p in book.parameters()):
        return None  # it trains nothing, which is another rule's
    modes = incident.notes[Ledger].modes
    for name, root in roots:
        if not any(id(p) in trained for p in parameters_in(root)):
            continue
        drifting = [(path, module) for path, module in named_modules(root) if _drifts(modes.norms, book, module)]
        if drifting:
            return _drift_told(incident, book, name, root, drifting)
    return None


def _roots(incident: Incident) -> list[tuple[str, nn.Module]]:
    named = [(name, value) for name, value in incident.names.bindings if isinstance(value, nn.Module)]
    inner = {id(child) for _, value in named for child in modules_in(value) if child is not value}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in named:
        if id(value) not in inner:
            found.setdefault(id(value), (name, value))
    return list(found.values())


def _drifts(known: dict[int, tuple[Any, ...]], book: Book, module: nn.Module) -> bool:
    """Whether a batch norm has been frozen and moved its statistics since the survey before."""
    if not isinstance(module, _BatchNorm) or module.weight is None or module.running_mean is None or module.num_batches_tracked is None:
        return False
    if not module.training or module.weight.requires_grad:
        known.pop(id(module), None)
        return False
    state = (few_values(module.weight), few_values(module.running_mean))
    tracked = version_of(module.num_batches_tracked)
    before = known.get(id(module))
    if len(known) > 2000:
        known.clear()
    known[id(module)] = (book.key, *state, tracked)
    return before is not None and before[0] == book.key and before[1] == state[0] and before[2] != state[1] and tracked - before[3] >= 8


def _drift_told(incident: Incident, book: Book, name: str, root: nn.Module, drifting: list[tuple[str, nn.Module]]) -> Diagnosis:
    switches = [
        s
        for s in incident.notes[Ledger].modes.switches
        if s.mode and (m := s.ref()) is not None and any(c is drifting[0][1] for c in modules_in(m))
    ]
    switch = switches[-1] if switches else None
    place = None if switch is None else resolve(switch.site)
    paths = [path for path, _ in drifting]
    part = wording.common_prefix([path + ".x" for path in paths]) or name
    inner = dict(named_modules(root)).get(part, root)
    norms = {id(p) for _, module in drifting for p in parameters_in(module)}
    alone = any(p.requires_grad for p in parameters_in(inner) if id(p) not in norms)  # the rest of it is trained
    shown = part if part == name else f"{name}.{part}"
    toggles = incident.journal.toggle_of(drifting[0][1].weight)  # type: ignore[arg-type]
    frozen_at = wording.span(toggles[1], "its parameters are frozen here", "context") if toggles is not None else None
    culprit = place.span(f"puts the frozen batch norms of `{part}` into train mode, too", "culprit") if place is not None else None
    if culprit is None and frozen_at is not None:
        culprit = frozen_at.model_copy(update={"role": "culprit", "label": "freezes the parameters, not the running statistics"})
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{part}`, a frozen batch norm, is in train mode: its running statistics drift"
        if isinstance(inner, _BatchNorm)
        else f"the batch norms of `{part}` are frozen, but in train mode: their running statistics drift"
        if alone
        else f"`{part}` is frozen, but its batch norms are in train mode: their running statistics drift",
        culprit=culprit,
        related=wording.spans(frozen_at, wording.span(book.step_site, "the rest is trained here", "context")),
        explanation=(
            f"The parameters of {wording.listed([f'{name}.{path}' for path in paths], len(paths))} do not require grad and do not "
            "change, yet every forward normalises with the batch's "
            "statistics and moves `running_mean` and `running_var`. What is called frozen so changes; in eval mode it will act "
            "differently than in training."
        ),
        fixes=[
            Fix(
                title=f"Put the batch norms of `{shown}` back into eval mode after each `{name}.train()`"
                if alone
                else f"Call `{as_code(shown)}.eval()` after `{name}.train()`",
                safety="unsafe",
                detail="Or override `train()` in the module so that the frozen part stays in eval mode.",
                patch=None if alone or shown == name else put_after(place, f"{as_code(shown)}.eval()"),
            )
        ],
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="dropout or batch norm in the wrong mode: train and eval mixed up",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
