"""Numbers of a run for a writer of the user's: how often each cause was met, and gradient norms by layer.

What it costs is paid only where a writer is given, at one optimizer step in so many: a norm a parameter, and of each device one copy to
the host, which waits for the device. In between a step costs a comparison. Norms are those of this rank, of the gradients that the step
used; DTensors, whose norm would communicate, sparse tensors and tensors of other classes have none, nor has a step inside the capture of
a CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from gradguard.analysis.live.names import Names
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.fault_barrier import barred
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.monitors.summary_records import by_layer
from gradguard.reporting.writers import Write, tag
from gradguard.torch_compat.private_api import has_memory

if TYPE_CHECKING:
    from torch import nn

    from gradguard.monitors.gradient_ledger import Ledger
    from gradguard.monitors.optimizer_books import Book
    from gradguard.reporting.user_warnings import Speaker

_LOGGER = logging.getLogger("gradguard")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Layers = list[tuple[TensorRef, str]]


class Findings(Protocol):
    """What is read of a `Run`."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def speaker(self) -> Speaker: ...

    @property
    def raised(self) -> Mapping[str, int]: ...


class MetricWriting:
    """What one run tells its writer.

    Args:
        writer: the user's.
        write: hands numbers to it.
        every: optimizer steps between two writings; the first step is one.
        models: for names.
    """

    PART = "writer of metrics"

    def __init__(self, writer: object, write: Write, every: int, models: Sequence[nn.Module]) -> None:
        self.failed = False
        self.writer = writer
        self._write = write
        self._every = every
        self._models = [UncountedRef(model) for model in models]  # a run outlives its guard
        self._layers: dict[int, Layers] = {}  # by the optimizer's id
        self._counted: dict[str, float] = {}  # as they were written last

    def ahead(self, ledger: Ledger) -> int:
        """How many optimizer steps from here on the next one is that has to be seen."""
        return min((self._every - book.steps % self._every for book in ledger.books.values()), default=1)

    def due(self, book: Book | None) -> bool:
        """Whether numbers are written after this step of an optimizer."""
        return book is not None and not self.failed and (book.steps == 1 or not book.steps % self._every)

    @barred
    def norms(self, book: Book) -> dict[str, float]:
        """The gradient norms of an optimizer's layers, read before anything clears the gradients."""
        found: list[tuple[str, float]] = []
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for ref, layer in self._layers_of(book):
            parameter = ref()
            gradient = parameter.grad if parameter is not None and type(parameter) in _PLAIN else None
            if gradient is None or type(gradient) not in _PLAIN:
                continue
            if gradient.layout is torch.strided and gradient.numel() and has_memory(gradient):
                if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
                    return {}
                by_device.setdefault(gradient.device, []).append((layer, gradient.detach()))
        for gradients in by_device.values():
            norms = torch.stack([_norm(gradient) for _, gradient in gradients]).tolist()
            found += zip((layer for layer, _ in gradients), norms, strict=True)
        return {tag("grad_norm", layer): norm for layer, norm in by_layer(found).items()}

    def tell(self, run: Findings, step: int, norms: dict[str, float] | None) -> None:
        """Hands numbers to the writer. One that raises is left alone from then on, and training goes on."""
        if self.failed:
            return
        metrics = {**counts(run), **(norms or {})}
        self._counted = counts(run)
        try:
            self._write(metrics, step)
        except internal_error() as error:
            self.failed = True
            _LOGGER.error("gradguard: writer= raised %s: %s; it is told nothing more, and training goes on", type(error).__name__, error)

    def tell_rest(self, run: Findings) -> None:
        """The run is over: what was found since the numbers were written last."""
        if counts(run) != self._counted:
            self.tell(run, max((book.steps for book in run.ledger.books.values()), default=run.ledger.steps), None)

    def _layers_of(self, book: Book) -> Layers:
        parameters = book.parameters()
        known = self._layers.get(id(book))
        if known is None or len(known) != len(parameters) or any(ref() is not p for (ref, _), p in zip(known, parameters, strict=True)):
            names = Names([], [model for ref in self._models if (model := ref()) is not None])
            known = self._layers[id(book)] = []
            for i, parameter in enumerate(parameters):
                state = names.state(parameter)
                path = f"parameter {i}" if state is None else state.path
                known.append((TensorRef(parameter), path.rpartition(".")[0] or path))
        return known


def counts(run: Findings) -> dict[str, float]:
    """How many causes were found so far, and how often each rule's were met."""
    found: dict[str, float] = {}
    said = run.speaker.said()
    for code, times in [(title.split()[0], times) for title, times in run.raised.items()] + [
        (each.code, each.repeats + 1) for each in said
    ]:
        found[tag("found", code)] = found.get(tag("found", code), 0.0) + times
    return {tag("diagnoses"): float(len(said) + len(run.raised)), **found}


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    whole = gradient.is_complex() or gradient.dtype is torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=None if whole else torch.float32)
    return norm.float()
