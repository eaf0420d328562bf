"""Exceptions that PyTorch raises because a value is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gradguard.analysis.graph.node_values import health, plain
from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import elements
from gradguard.monitors.numerics import Numbers
from gradguard.rules.numerics.explosion import diverged
from gradguard.rules.numerics.gg501_nonfinite_forward.forward_diagnosis import describe, investigate
from gradguard.rules.numerics.gg501_nonfinite_forward.outside import poisoned
from gradguard.rules.numerics.ranges import kinds
from gradguard.torch_compat.private_api import grad_fn_of

MESSAGES = (
    "nan",
    "non-finite",
    "nonfinite",
    "not finite",
    "inf",
    "all elements of input should be between 0 and 1",
    "found invalid values",
    "failed to converge",
    "probability tensor contains",
    "invalid multinomial",
    "input is not positive-definite",
    "singular",
    "should be between 0 and 1",
)


def recognise(incident: Incident, numbers: Numbers) -> Diagnosis | None:
    """The diagnosis of an error whose arguments are not finite; None where they are (the error then has another cause)."""
    found = next(iter(_bad_tensors(incident)), None)
    if found is None:
        return None
    name, root = found
    subject = f"`{name}`" if name else "what the failing call got"
    earlier = numbers.told or numbers.pending
    if earlier is not None:  # one cause, one diagnosis: what was said of it stands
        note = f"by now {subject} is {kinds(health(root))}: it has reached the weights"
        return earlier.model_copy(update={"severity": "error", "notes": [*earlier.notes, note]})
    values, origin = investigate(incident, numbers, root)
    if origin is None:
        origin = _outside_of(root)
        if origin is None:
            return None
    result = diverged(incident, numbers, values, origin, root)
    if result is None:
        result = (
            describe(incident, numbers, root, values, origin, subject, "error")
            if origin.kind == "op"
            else poisoned(incident, numbers, root, values, origin, subject, "error")
        )
    return None if result is None else result.model_copy(update={"severity": "error"})


def _outside_of(root: torch.Tensor) -> Any:
    from gradguard.rules.numerics.first_nonfinite import Origin

    return Origin("leaf" if root.requires_grad and root.grad_fn is None else "constant", None, health(root), tensor=root)


def _bad_tensors(incident: Incident) -> Iterator[tuple[str | None, torch.Tensor]]:
    """The non-finite tensors that the failing call got, those with a graph first; by the user's name where they have one."""
    seen: list[torch.Tensor] = []

    def look(value: Any) -> None:
        for item in elements(value) if isinstance(value, (tuple, list, dict)) else (value,):
            if (
                isinstance(item, torch.Tensor)
                and plain(item) is not None
                and item.is_floating_point()
                and all(item is not other for other in seen)
                and not health(item).finite
            ):
                seen.append(item)

    look(incident.args)
    look(incident.kwargs)
    for view in incident.frames:
        if seen:
            break
        for value in list(view.locals.values())[:64]:
            try:
                look(value)
            except internal_error():
                continue
    seen.sort(key=lambda tensor: (grad_fn_of(tensor) is None, not tensor.requires_grad))
    for tensor in seen:
        yield incident.names.tensor(tensor), tensor
