"""What a closing summary and the HTML report tell: gradient norms by layer, which parameters moved. On only where one is asked for."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradguard.core.callsite import CallSite
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.monitor import Monitor, Step
from gradguard.monitors.tensor_state import version_of
from gradguard.torch_compat.private_api import own_part

if TYPE_CHECKING:
    from gradguard.monitors.optimizer_books import Book
    from gradguard.monitors.view import View

_EVERY_STEP = 16  # of an optimizer's first steps, then one in sixteen
_MOST_ZEROINGS = 64
_MOST = 512  # norms kept of one layer; then every other one is dropped


class Zeroed(NamedTuple):
    """One call of zero_grad()."""

    clock: int
    step: int
    site: CallSite | None
    owner: str  # the type of the optimizer or module


@dataclass
class OptimizerRecord:
    """One optimizer's parameters: names and norms, taken while they lived."""

    type_name: str
    steps: int = 0
    names: list[str] = field(default_factory=list)
    refs: list[weakref.ref[Any]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)
    got_gradient: list[bool] = field(default_factory=list)
    norms: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # layer -> recorded steps and the gradient norm at each
    nonfinite: int = 0  # recorded steps with a gradient that is not finite

    def norms_now(self) -> dict[str, float]:
        """The gradient norm of each layer that has a gradient at this moment."""
        gradients = ((name, getattr(ref(), "grad", None)) for name, ref in zip(self.names, self.refs, strict=True))
        return by_layer((name.rpartition(".")[0] or name, _norm(gradient)) for name, gradient in gradients if gradient is not None)


class Recorder(Monitor):
    """The records of a run's optimizers, in the order of their first steps."""

    PART = "record for the summary"

    def __init__(self) -> None:
        self.records: dict[int, OptimizerRecord] = {}
        self.zeroings: deque[Zeroed] = deque(maxlen=_MOST_ZEROINGS)

    def on_step(self, event: Step, view: View) -> tuple[()]:
        self.look(event.book)
        return ()

    @barred
    def look(self, book: Book) -> None:
        """Takes the norms of one step, before its gradients are cleared."""
        record = self.records.get(id(book))
        if record is None:
            record = self.records[id(book)] = _begin(book)
        record.steps = book.steps
        if book.steps > _EVERY_STEP and book.steps % 16:
            return
        for i, ref in enumerate(record.refs):
            parameter = ref()
            if parameter is not None:
                record.moved[i] = record.moved[i] or version_of(parameter) != record.versions[i]
                record.got_gradient[i] = record.got_gradient[i] or parameter.grad is not None
        now = record.norms_now()
        for layer, norm in now.items():
            values = record.norms.setdefault(layer, [])
            values.append((book.steps, norm))
            if len(values) > _MOST:
                del values[1::2]
        record.nonfinite += any(not math.isfinite(norm) for norm in now.values())


def _begin(book: Book) -> OptimizerRecord:
    from gradguard.analysis.live.names import Names

    names = Names([])
    record = OptimizerRecord(book.type_name)
    first = {id(p): version for ref, version in book.first_versions if (p := ref()) is not None}
    for i, parameter in enumerate(book.parameters()):
        state = names.state(parameter)
        record.names.append(state.path if state is not None else f"parameter {i}")
        record.refs.append(TensorRef(parameter))
        record.versions.append(first.get(id(parameter), -1))
        record.moved.append(False)
        record.got_gradient.append(False)
    return record


def by_layer(norms: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The norm of each layer, of those of its parameters."""
    squares: dict[str, float] = {}
    for layer, norm in norms:
        squares[layer] = squares.get(layer, 0.0) + norm * norm
    return {layer: math.sqrt(square) if square == square else math.nan for layer, square in squares.items()}


def _norm(gradient: torch.Tensor) -> float:
    try:
        return float(torch.linalg.vector_norm(own_part(gradient).detach().float()))
    except internal_error():  # sparse and wrapped gradients
        return 0.0
