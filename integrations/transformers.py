"""gradguard for transformers' `Trainer`: `Trainer(..., callbacks=[GradGuardCallback()])`.

Training steps run under the guard, evaluation and prediction do not. The callback hooks offered by `TrainerCallback` lie
around forward and backward of a step, so a failing step is diagnosed where it arises.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gradguard.diagnosis import Diagnosis
from gradguard.guard import Guard

if TYPE_CHECKING:
    _Base = object
else:
    try:
        from transformers import TrainerCallback as _Base
    except ImportError as error:
        raise ImportError("gradguard.integrations.transformers needs transformers: pip install transformers") from error


class GradGuardCallback(_Base):
    """Guards the training steps of a `transformers.Trainer`.

    Args:
        level: "off", "watch", "standard", "strict" or "forensic".
        config: a YAML file with settings.
        report: a file that gets one JSON object a diagnosis.
        settings: further settings by name.

    Raises:
        ConfigError: a setting that does not exist or fit.
    """

    def __init__(
        self,
        level: str | None = None,
        config: str | os.PathLike[str] | None = None,
        report: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        self.guard = Guard(level=level, config=config, report=report, **settings)
        self._entered = False

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """Everything found so far in this process, oldest first."""
        return self.guard.diagnoses

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Learns the model; the optimizer comes wrapped by accelerate and is met when it steps."""
        if model is not None:
            self.guard.models[:] = [model]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer step's first micro-batch begins."""
        self._enter()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between micro-batches the guard stays open."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        self._leave()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bugs that only a whole run shows are said now."""
        self._leave()
        if self.guard.level != "off":
            self.guard.close()

    def _enter(self) -> None:
        if not self._entered and self.guard.level != "off":
            self.guard.__enter__()
            self._entered = True

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self.guard.leave()
