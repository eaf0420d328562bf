"""A network that is loaded with its own state: where another's was meant it never follows (part of GG611), where an earlier one's was
meant nothing is restored (part of GG615)."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from gradguard.core.callsite import CallSite
from gradguard.core.safe_read import named_parameters
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
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


@dataclass(frozen=True, eq=False)
class KeptState(Finding):
    """A module was loaded with a state that was kept for later and is its own memory: what has been written since stays."""

    CODE = "GG615"

    module: weakref.ref[Any]
    kept: CallSite | None
    site: CallSite | None
    steps: int  # since; 0 where another state was loaded in between


class Load(NamedTuple):
    """A call of `load_state_dict`: the versions of the module's parameters after it, and the count of steps."""

    module: weakref.ref[Any]
    versions: list[int]
    steps: int


class Loads:
    """The last call of each of some modules."""

    def __init__(self) -> None:
        self._known: dict[int, Load] = {}

    def replace(self, module: nn.Module, versions: list[int], steps: int) -> Load | None:
        """Remembers a call; gives the one before it."""
        before = self._known.pop(id(module), None)
        while len(self._known) >= _MOST:
            self._known.pop(next(iter(self._known)))
        self._known[id(module)] = Load(UncountedRef(module), versions, steps)
        return before if before is not None and before.module() is module else None


@dataclass
class _Taken:
    """A state that `state_dict()` has given out, as long as the tensors in it live."""

    module: weakref.ref[Any]
    tensor: weakref.ref[Any]  # its first
    site: CallSite | None
    steps: int  # when it was taken, or another state was loaded
    versions: list[int]  # of the parameters then
    overwritten: bool = False


class OwnStates(Monitor):
    """Modules that were given their own state by `load_state_dict`: the versions of their parameters after it, and the step count.
    And the states that modules gave out."""

    PART = "watch of loaded states"

    def __init__(self) -> None:
        self._own = Loads()
        self._taken: list[_Taken] = []

    @barred
    def taken(self, module: nn.Module, state: Any, view: View, site: CallSite | None) -> None:
        """`state_dict` has returned. Every call makes other tensors on the parameters' memory, which tell it from others."""
        parameters = dict(named_parameters(module))
        first = state.get(next(iter(parameters), "")) if type(state) in (dict, OrderedDict) else None
        if type(first) is not torch.Tensor:  # with `keep_vars` these are the parameters
            return
        versions = [version_of(parameter) for parameter in parameters.values()]
        alive = [each for each in self._taken if each.tensor() is not None]
        self._taken = [*alive[1 - _MOST :], _Taken(UncountedRef(module), TensorRef(first), site, view.steps, versions)]

    def _restored(self, module: nn.Module, state: Any, versions: list[int], view: View, site: CallSite | None) -> KeptState | None:
        """Whether a state of the module's own was meant to bring back what has been overwritten since.

        Who writes into the tensors of such a state, before it is loaded, writes the parameters. So it counts only where these have
        been written by what is known: by another state that was loaded, or as often in each step.
        """
        given = {id(value) for value in state.values()}
        taken = next((each for each in self._taken if each.module() is module and id(each.tensor()) in given), None)
        if taken is None:
            return None
        steps = view.steps - taken.steps
        writes = {now - 1 - then for now, then in zip(versions, taken.versions, strict=False)}
        if steps > 1:
            known = any(writes) and all(not count % steps for count in writes)  # what is frozen is not written
        else:
            known = not steps and taken.overwritten and writes == {0}
        return KeptState(None, taken.module, taken.site, site, steps) if known else None

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
        versions = [version_of(parameter) for parameter in parameters.values()]
        if not parameters or not all(_is_alias(state.get(name), parameter) for name, parameter in parameters.items()):
            for each in self._taken:
                if each.module() is module:
                    each.steps, each.versions, each.overwritten = view.steps, versions, True
            return []
        kept = self._restored(module, state, versions, view, site)
        if kept is not None:
            return [kept]
        before = self._own.replace(module, versions, view.steps)
        if before is None or before.steps == view.steps:
            return []
        again = versions == [version + 1 for version in before.versions]
        return [OwnState(None, UncountedRef(module), site)] if again else []


def _is_alias(given: Any, parameter: torch.Tensor) -> bool:
    if type(given) not in _TENSORS or type(parameter) not in _TENSORS or not parameter.numel():
        return False
    return bool(given.data_ptr() == parameter.data_ptr() and given.shape == parameter.shape and given.dtype == parameter.dtype)
