"""A target network that the optimizer trains, and that is overwritten with the one it follows. Part of GG613."""

from __future__ import annotations

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import parameters_in
from gradguard.fixes.at_places import detached
from gradguard.fixes.edits import replaced
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.trained_copies import TrainedCopy
from gradguard.rules import wording


def told(incident: Incident, finding: TrainedCopy, book: Book, code: str, name: str) -> Diagnosis | None:
    """The call whose result goes into the loss with its graph, where there is but one."""
    module = finding.module()
    followed = [parameter for ref in finding.followed if (parameter := ref()) is not None]
    if module is None or not followed:
        return None
    parameters = list(parameters_in(module))
    shown = incident.names.module_path(module) or f"the {type(module).__name__}"
    source = wording.common_prefix(wording.parameter_names(followed, incident.names))
    whose = f"`{source}`" if source else "other parameters"
    optimizer = wording.optimizer_name(book, incident)
    call, loaded = resolve(incident.notes[Ledger].only_site(module)), resolve(finding.loaded)
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{shown}` is trained by `{optimizer}`, and then overwritten with {whose}: its value goes into the loss with its graph",
        culprit=None if call is None else call.span(f"`{shown}` is computed with its graph: backward fills its gradients, too", "culprit"),
        related=wording.spans(
            None if loaded is None else loaded.span(f"copies {whose} over what `{shown}` has learnt", "context"),
            wording.span(book.made, f"`{optimizer}` has the parameters of both", "declared"),
            wording.span(book.step_site, "moves both", "context"),
        ),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"Every step moves `{shown}` as well as {whose}, and `load_state_dict` throws away what it has learnt. A network that "
        "follows another one is to stand still between two copies: else the target moves towards the prediction.",
        fixes=[
            Fix(
                title=f"Compute what `{shown}` gives without its graph: `.detach()`, or `with torch.no_grad():` around it",
                safety="unsafe",
                reason="it trains otherwise",
                patch=_patch(call),
            ),
            Fix(title=f"Give `{optimizer}` only the parameters that it is to train"),
        ],
        confidence="likely",
    )


def _patch(call: ResolvedSite | None) -> str | None:
    """The call detached, where a tensor's own method or arithmetic follows it."""
    node = None if call is None else call.call
    if call is None or call.source is None or node is None:
        return None
    above = call.source.parents.get(node)
    attribute = getattr(above, "attr", None)
    if attribute is None or not hasattr(torch.Tensor, attribute):
        return None
    text = detached(call.source, node)
    return None if text is None else replaced(call.source, [(node, text)])
