"""A network that is loaded with its own state, where another's was meant: it never follows. Part of GG611."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradguard.core.callsite import CallSite
from gradguard.core.safe_read import named_parameters
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.findings import Finding
from gradguard.monitors.monitor import Monitor
from gradguard.monitors.tensor_state import version_of

if TYPE_CHECKING:
    from gradguard.monitors.view import View

_TENSORS = (torch.Tensor, nn.Parameter)
_MOST = 64


@dataclass(frozen=True, eq=False)
class OwnState(Finding):
    """A module was loaded with its own state."""

    CODE = "GG611"

    module: weakref.ref[Any]
    site: CallSite | None


class OwnStates(Monitor):
    """Modules that were given their own state by `load_state_dict`: the versions of their parameters after it, and the step count."""

    PART = "watch of loaded states"

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], list[int], int]] = {}

    @barred
    def loaded(self, module: nn.Module, state: Any, view: View, site: CallSite | None) -> list[Finding]:
        """`load_state_dict` has returned.

        A state dict that was changed in place before it is loaded is its module's own, too. So it counts only where nobody has
        written the parameters since they were loaded the last time, with their own values then as well. And a script may save and
        load as often as it likes; only where optimizers step in between is there something that the module should have followed.
        """
        if type(state) not in (dict, OrderedDict) or not view.steps:
            return []
        parameters = dict(named_parameters(module))
        if not parameters or not all(_is_alias(state.get(name), parameter) for name, parameter in parameters.items()):
            return []
        versions = [version_of(parameter) for parameter in parameters.values()]
        known = self._known.pop(id(module), None)
        while len(self._known) >= _MOST:
            self._known.pop(next(iter(self._known)))
        self._known[id(module)] = UncountedRef(module), versions, view.steps
        if known is None or known[0]() is not module or known[2] == view.steps:
            return []
        again = versions == [version + 1 for version in known[1]]
        return [OwnState(None, UncountedRef(module), site)] if again else []


def _is_alias(given: Any, parameter: torch.Tensor) -> bool:
    if type(given) not in _TENSORS or type(parameter) not in _TENSORS or not parameter.numel():
        return False
    return bool(given.data_ptr() == parameter.data_ptr() and given.shape == parameter.shape and given.dtype == parameter.dtype)
