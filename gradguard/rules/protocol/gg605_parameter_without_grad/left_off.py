"""An optimizer's parameters are switched off while another steps, and not (or only some of them) switched on again. Part of GG605."""

from __future__ import annotations

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import parameters_in
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.tensor_state import version_of
from gradguard.rules import wording
from gradguard.rules.gradient_path import frozen_in_play
from gradguard.rules.gradient_path.in_play import AllFrozen

_AGAIN = 2  # times that requires_grad was switched off while it was off
_TIMES = 3  # changes of another parameter's requires_grad by the same statement: off, on, off


def told(incident: Incident, book: Book, frozen: list[torch.Tensor], code: str, name: str) -> Diagnosis | None:
    """One statement switches them off in each iteration; at the optimizer's own step only the others are on again, or none."""
    journal = incident.journal
    known = [journal.toggle_of(parameter) for parameter in frozen]
    sites = {each[1] for each in known if each is not None and not each[0] and each[1] is not None}
    if len(sites) != 1 or None in known:
        return None
    site = sites.pop()
    on = [p for p in book.parameters() if p.requires_grad]
    taking_turns = [p for p in on or frozen if journal.times_toggled(p) >= _TIMES]
    if not taking_turns or min(journal.set_again(parameter) for parameter in frozen) < _AGAIN:
        return None  # frozen once and for all: a stage of training
    optimizer = wording.optimizer_name(book, incident)
    modules = [(path, module) for path, module in incident.names.modules if path is not None and _is_all_of(module, frozen)]
    outermost = [(path, module) for path, module in modules if not any(path.startswith(f"{other}.") for other, _ in modules)]
    paths = [path for path, _ in outermost] or wording.parameter_names(frozen, incident.names)
    listed = short_list(paths, 3)
    many = len(paths) > 1
    switch, _ = frozen_in_play.switched_off(incident, AllFrozen(optimizer, frozen, [module for _, module in outermost], detached=False))
    place = resolve(site) if switch is None else switch.place
    again = (None if switch is None else switch.again) or f"{paths[0]}.requires_grad_(True)"
    beside = wording.listed(wording.parameter_names(taking_turns, incident.names), len(taking_turns))
    get, it = ("get", "them") if many else ("gets", "it")
    at_first = {id(p): version for ref, version in book.first_versions if (p := ref()) is not None}
    moved = any(at_first.get(id(p)) != version_of(p) for p in frozen)
    lacks = f"{get} no gradient any more" if moved else f"never {get} a gradient"
    filled = f"no backward fills a gradient of {it} any more" if moved else f"no backward has filled a gradient of {it}"
    related: list[SourceSpan] = wording.spans(
        wording.span(book.step_site, f"{listed} {'are' if many else 'is'} still frozen here", "context")
    )
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"{listed} {'are' if many else 'is'} in `{optimizer}` and {lacks}: "
        f"switched off while another optimizer steps, and {'not' if moved else 'never'} switched on again",
        culprit=None
        if place is None
        else place.statement_span(f"freezes {listed}; what follows switches {'only the rest' if on else 'nothing'} on again", "culprit"),
        related=related,
        tensors=wording.facts(frozen, incident.names),
        explanation=(
            f"requires_grad of {beside} is switched off and on again in each iteration; {listed} {'are' if many else 'is'} switched off "
            f"in each iteration, too, and still off when `{optimizer}` steps: {filled}."
            if on
            else f"requires_grad of {listed} was switched off and on again in the iterations before. Now it is only switched off, and "
            f"still off when `{optimizer}` steps: {filled}."
        ),
        fixes=[Fix(title=f"Switch all of it on again before the loss of `{optimizer}` is computed: `{again}`", safety="unsafe")],
        confidence="certain" if switch is not None else "likely",
    )


def _is_all_of(module: torch.nn.Module, frozen: list[torch.Tensor]) -> bool:
    own = list(parameters_in(module))
    ids = {id(parameter) for parameter in frozen}
    return bool(own) and all(id(parameter) in ids for parameter in own)
