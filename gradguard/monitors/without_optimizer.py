"""Parameters that get gradients in a run without any optimizer, and whether they ever change."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.findings import Finding, TraceNext
from gradguard.monitors.tensor_state import few_values, version_of

_BACKWARDS = 8  # without any optimizer, after which nothing has changed


_MOST = 256


class Unheld:
    """Parameters that get gradients in a run without any optimizer, and whether they ever change."""

    def __init__(self) -> None:
        self.first: list[tuple[weakref.ref[Any], int, list[float]]] = []
        self.began = 0
        self.over = False

    def look(self, backwards: int, leaves: list[torch.Tensor]) -> list[Finding]:
        """At a survey of a run in which no optimizer was made so far."""
        if self.over or not leaves:
            return []
        parameters = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)][:_MOST]
        if not self.first:
            self.first = [(TensorRef(p), version_of(p), few_values(p)) for p in parameters]
            self.began = backwards
            return []
        if any((p := ref()) is None or version_of(p) != version or few_values(p) != values for ref, version, values in self.first):
            self.over = True
        elif parameters and backwards - self.began >= _BACKWARDS:
            self.over = True
            return [TraceNext(None)]  # an update that is computed and dropped shows in a traced step
        return []
