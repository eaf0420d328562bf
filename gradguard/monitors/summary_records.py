"""What a closing summary tells: gradient norms by layer, which parameters moved. Only on where a summary was asked for."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

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
_MOST = 512  # norms kept of one layer; then every other one is dropped


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
    norms: dict[str, list[float]] = field(default_factory=dict)  # layer -> gradient norm at the recorded steps
    nonfinite: int = 0  # recorded steps with a gradient that is not finite


class Recorder(Monitor):
    """The records of a run's optimizers, in the order of their first steps."""

    PART = "record for the summary"

    def __init__(self) -> None:
        self.records: dict[int, OptimizerRecord] = {}

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
        squares: dict[str, float] = {}
        for i, ref in enumerate(record.refs):
            parameter = ref()
            if parameter is None:
                continue
            record.moved[i] = record.moved[i] or version_of(parameter) != record.versions[i]
            if parameter.grad is None:
                continue
            record.got_gradient[i] = True
            layer = record.names[i].rpartition(".")[0] or record.names[i]
            squares[layer] = squares.get(layer, 0.0) + _norm(parameter.grad) ** 2
        for layer, square in squares.items():
            values = record.norms.setdefault(layer, [])
            values.append(math.sqrt(square) if square == square else math.nan)
            if len(values) > _MOST:
                del values[1::2]
        record.nonfinite += any(not math.isfinite(square) for square in squares.values())


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


def _norm(gradient: torch.Tensor) -> float:
    try:
        return float(torch.linalg.vector_norm(own_part(gradient).detach().float()))
    except internal_error():  # sparse and wrapped gradients
        return 0.0
