"""Looks at a loss on an accelerator without waiting for it.

A flag that says whether the loss is finite is computed on the device and copied behind the computation; the answer is read
when it has arrived, a step or so later. No call here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from gradguard.core.foreign_exceptions import internal_error


class Deferred:
    """At most one question under way; holds one byte on the device and one in page-locked memory."""

    def __init__(self) -> None:
        self._event: Any = None
        self._flag: torch.Tensor | None = None
        self._here: torch.Tensor | None = None
        self._broken = False

    def look(self, root: torch.Tensor) -> float | None:
        """Asks about this root, unless a question is under way; the root's value is read (and waited for) only when the answer to an
        earlier question was "not finite"."""
        if self._broken or root.device.type != "cuda":
            return None
        try:
            if self._event is not None:
                if not self._event.query():
                    return None
                self._event = None
                if self._here is not None and not bool(self._here.item()):
                    return float(root.item())
            with torch.no_grad():
                self._flag = torch.isfinite(root.detach()).reshape(1)
                if self._here is None:
                    self._here = torch.empty(1, dtype=torch.bool, pin_memory=True)
                self._here.copy_(self._flag, non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(torch.cuda.current_stream(root.device))
        except internal_error():  # a capture of a CUDA graph is under way, or no page-locked memory is to be had
            self._broken = True
        return None
