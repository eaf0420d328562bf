"""Parameters that an optimizer trains and `load_state_dict` overwrites with others that it trains, again and again. Part of GG613.

What is learnt between two copies is thrown away, so that nobody can mean both. A target network whose values go into a loss with
their graph is trained like this, where its optimizer was given the parameters of the whole agent.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradguard.analysis.graph.walk import leaves, root_nodes
from gradguard.core.callsite import CallSite
from gradguard.core.safe_read import named_parameters
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import UncountedRef
from gradguard.monitors.findings import Finding, TraceNext
from gradguard.monitors.monitor import Backward, Monitor
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.own_state import Loads
from gradguard.monitors.tensor_state import version_of

if TYPE_CHECKING:
    from gradguard.monitors.view import View

_LOOKS = 3  # steps in which it is looked where the copy is called
_TENSORS = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, eq=False)
class TrainedCopy(Finding):
    """A backward call gives gradient to a module whose parameters are overwritten with others of the same optimizer.

    Attributes:
        module: the one that is overwritten.
        followed: the parameters that it is overwritten with.
        loaded: the line that does.
    """

    CODE = "GG613"

    module: weakref.ref[Any]
    followed: list[weakref.ref[Any]]
    loaded: CallSite | None


class TrainedCopies(Monitor):
    """The modules that were loaded, and one that is looked for in the graphs of the next steps."""

    PART = "watch of overwritten parameters"

    def __init__(self) -> None:
        self._loads = Loads()
        self._suspect: TrainedCopy | None = None
        self._until = 0
        self._said = False

    @barred
    def loaded(self, module: nn.Module, state: Any, view: View, site: CallSite | None) -> list[Finding]:
        """`load_state_dict` has returned."""
        parameters = dict(named_parameters(module))
        if self._said or not parameters or type(state) not in (dict, OrderedDict):
            return []
        versions = [version_of(parameter) for parameter in parameters.values()]
        before = self._loads.replace(module, versions, view.steps)
        if before is None or view.steps < before.steps + 2 or len(before.versions) != len(versions):
            return []
        if not all(now > then + 1 for now, then in zip(versions, before.versions, strict=True)):  # loading itself writes once
            return []
        book, followed = _of_one_optimizer(parameters, state, view)
        if book is None:
            return []
        self._suspect = TrainedCopy(book, UncountedRef(module), [UncountedRef(each) for each in followed], site)
        self._until = view.steps + _LOOKS
        view.census_until = self._until
        view.wake()
        return [TraceNext(None)]

    def on_backward(self, event: Backward, view: View) -> list[Finding]:
        suspect = self._suspect
        if suspect is None or not event.call.traced:
            return []
        if view.steps > self._until:
            self._suspect = None
            return []
        module = suspect.module()
        own = {id(parameter) for _, parameter in named_parameters(module)} if module is not None else set()
        followed = {id(parameter) for ref in suspect.followed if (parameter := ref()) is not None}
        reached = {id(leaf) for leaf in leaves(root_nodes(event.roots))}
        if not own & reached or not followed & reached:
            return []
        self._suspect, self._said = None, True
        return [suspect]


def _of_one_optimizer(parameters: dict[str, nn.Parameter], state: Any, view: View) -> tuple[Book | None, list[torch.Tensor]]:
    """The optimizer that has a module's parameters and those in whose memory all that was loaded lies; and the latter."""
    own = {id(parameter) for parameter in parameters.values()}
    for book in view.books.values():
        trained = [parameter for parameter in book.parameters() if type(parameter) in _TENSORS and parameter.numel()]
        others = {parameter.data_ptr(): parameter for parameter in trained if id(parameter) not in own}
        if not own <= {id(parameter) for parameter in trained}:
            continue
        given = [state.get(name) for name in parameters]
        followed = [others.get(each.data_ptr()) for each in given if type(each) in _TENSORS and each.numel()]
        if len(followed) == len(parameters) and all(
            source is not None and source.shape == each.shape for source, each in zip(followed, given, strict=True)
        ):
            return book, [source for source in followed if source is not None]
    return None, []
