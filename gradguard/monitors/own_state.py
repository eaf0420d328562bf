"""A network that is loaded with its own state, where another's was meant: it never follows. Part of GG611."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.analysis.places.source import resolve
from gradguard.analysis.incident import Incident
from gradguard.rules import wording
from gradguard.monitors.findings import Suspicion, version_of

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger
from gradguard.core.safe_read import named_parameters

_TENSORS = (torch.Tensor, nn.Parameter)
_MOST = 64


class OwnStates:
    """Modules that were given their own state by `load_state_dict`, and the versions of their parameters after it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], list[int]]] = {}

    def loaded(self, ledger: Ledger, module: nn.Module, state: Any, site: CallSite | None) -> None:
        """`load_state_dict` has returned.

        A state dict that was changed in place before it is loaded is its module's own, too. So it counts only where nobody has
        written the parameters since they were loaded the last time, with their own values then as well.
        """
        if type(state) not in (dict, OrderedDict) or not ledger.backwards:
            return
        parameters = dict(named_parameters(module))
        if not parameters or not all(_is_alias(state.get(name), parameter) for name, parameter in parameters.items()):
            return
        versions = [version_of(parameter) for parameter in parameters.values()]
        known = self._known.pop(id(module), None)
        while len(self._known) >= _MOST:
            self._known.pop(next(iter(self._known)))
        self._known[id(module)] = weakref.ref(module), versions
        if known is not None and known[0]() is module and versions == [version + 1 for version in known[1]]:
            ledger.found.append(Suspicion("GG611", None, {"kind": "own state", "module": weakref.ref(module), "site": site}))


def _is_alias(given: Any, parameter: torch.Tensor) -> bool:
    if type(given) not in _TENSORS or type(parameter) not in _TENSORS or not parameter.numel():
        return False
    return bool(given.data_ptr() == parameter.data_ptr() and given.shape == parameter.shape and given.dtype == parameter.dtype)


def told(incident: Incident, code: str, name: str) -> Diagnosis | None:
    """The call, and the one network of the same shapes that an optimizer trains."""
    module, place = incident.suspicion.data["module"](), resolve(incident.suspicion.data["site"])
    if module is None or place is None:
        return None
    receiver = place.receiver if (place.callee or "").endswith(".load_state_dict") else None
    shown = receiver or incident.names.module_path(module) or type(module).__name__
    shapes, known = _shapes(module), incident.memory["ledger"].survey.known()
    paths = [
        path
        for other in {id(m): m for _, root in incident.names.modules for m in root.modules()}.values()
        if other is not module
        and type(other) is type(module)
        and _shapes(other) == shapes
        and any(id(p) in known for p in other.parameters())
        and (path := incident.names.module_path(other)) is not None
    ]
    source = f"{paths[0]}.state_dict()" if len(paths) == 1 else "...state_dict()"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{shown}` is loaded with its own state: nothing changes, now and the time before",
        culprit=place.span(f"copies the values of `{shown}` onto themselves", "culprit"),
        tensors=wording.facts(module.parameters(), incident.names),
        explanation=f"Each tensor that is loaded lies in the memory of the very parameter it is copied to, and nothing has written "
        f"`{shown}` between this call and the one before. A target network that is refreshed like this never follows what is trained.",
        fixes=[Fix(title=f"Load the state of the network that it is to follow: `{shown}.load_state_dict({source})`", safety="unsafe")],
    )


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in named_parameters(module)]
