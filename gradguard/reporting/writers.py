"""Where numbers go: TensorBoard, Weights & Biases, MLflow, Lightning's loggers, or a function (`gradguard(writer=...)`).

A writer is told by the one method that it has, looked up once, in this order:

- `add_scalar(tag, value, step)`: a `SummaryWriter` of TensorBoard;
- `log_metrics(metrics, step=step)`: a logger of Lightning, the module `mlflow`;
- `log(metrics, step=step)`: a run of Weights & Biases, the module `wandb`, an `Accelerator`;
- the object itself, called as `writer(metrics, step)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

Write = Callable[[dict[str, float], int], object]


class ScalarWriter(Protocol):
    """As TensorBoard's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Takes one number."""


class MetricsWriter(Protocol):
    """As Lightning's loggers and `mlflow`."""

    def log_metrics(self, metrics: dict[str, float], /, *, step: int) -> object:
        """Takes the numbers of one step."""


class RunWriter(Protocol):
    """As a run of Weights & Biases."""

    def log(self, data: dict[str, float], /, *, step: int) -> object:
        """Takes the numbers of one step."""


Writer = ScalarWriter | MetricsWriter | RunWriter | Write

_OTHER = re.compile(r"[^\w./ -]")  # MLflow's names have no others


def tag(*parts: str) -> str:
    """The name of a number, in characters that all of them take."""
    return _OTHER.sub("_", "/".join(("gradguard", *parts)))


def as_function(writer: Any) -> Write:
    """The function that hands numbers to a writer.

    Raises:
        TypeError: an object that takes none.
    """
    if not isinstance(writer, type):
        if callable(add := getattr(writer, "add_scalar", None)):
            return lambda metrics, step: [add(name, value, step) for name, value in metrics.items()]
        log = getattr(writer, "log_metrics", None) or getattr(writer, "log", None)
        if callable(log):
            return lambda metrics, step: log(metrics, step=step)
        if callable(writer):
            return lambda metrics, step: writer(metrics, step)
    raise TypeError(
        f"writer= takes an object with add_scalar(tag, value, step), log_metrics(metrics, step=) or log(metrics, step=), or a function "
        f"of metrics and step, not {f'the class {writer.__name__}' if isinstance(writer, type) else type(writer).__name__}"
    )
