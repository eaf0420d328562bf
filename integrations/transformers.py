"""gradguard for transformers' `Trainer`: `Trainer(..., callbacks=[GradGuardCallback()])`.

Training steps run under the guard, evaluation and prediction do not. A step that fails untraced is run again, traced
(`Guard.step` says what a second run may and may not do).
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from gradguard.core.diagnosis import Diagnosis
from gradguard.runtime.guard import Guard

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
        log_every_n_steps: how often the numbers of diagnoses and gradient norms by layer go to `Trainer.log`, which hands them to
            TensorBoard, Weights & Biases, MLflow and the log history; each time waits for the device once. 0, the default, for never.
        settings: further settings by name.

    Raises:
        ConfigError: a setting that does not exist or fit.
    """

    def __init__(
        self,
        level: str | None = None,
        config: str | os.PathLike[str] | None = None,
        report: str | os.PathLike[str] | None = None,
        log_every_n_steps: int = 0,
        **settings: Any,
    ) -> None:
        self._metrics: dict[str, float] = {}  # that the Trainer is yet to be told
        if log_every_n_steps:
            settings |= {"writer": lambda metrics, step: self._metrics.update(metrics), "write_every": log_every_n_steps}
        self.guard = Guard(level=level, config=config, report=report, **settings)
        self.guard.made_at = None  # each callback is a run of its own, also where one line makes several
        self._entered = False
        self._trainer: Any = None

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """Everything found so far in this process, oldest first."""
        return self.guard.diagnoses

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Learns the model; the optimizer comes wrapped by accelerate and is met when it steps."""
        self._end()  # of a training that an error ended: there is no hook for that
        if model is not None:
            self.guard.models[:] = [model]
        if self.guard.level != "off":
            self._wrap(_calling_trainer(sys._getframe(1)))

    def _wrap(self, trainer: Any) -> None:
        """Puts the guard around forward and backward of the Trainer: an error is explained where it arises, and ends the guarding."""
        if trainer is None or "training_step" in vars(trainer):
            return
        original = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                return self.guard.step(self.guard.explaining, original, *args, **kwargs) if self._entered else original(*args, **kwargs)
            except BaseException:
                self._end()
                raise

        trainer.training_step = training_step
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer step's first micro-batch begins; the guard stays open until its last."""
        if not self._entered and self.guard.level != "off":
            self.guard.__enter__()
            self._entered = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        self._leave()
        if self._metrics and self._trainer is not None:
            metrics, self._metrics = self._metrics, {}
            self._trainer.log(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bugs that only a whole run shows are said now."""
        self._end()
        if self.guard.level != "off":
            self.guard.close()

    def _end(self) -> None:
        self._leave()
        if self._trainer is not None:
            vars(self._trainer).pop("training_step", None)
            self._trainer = None

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self.guard.leave()


def _calling_trainer(frame: FrameType | None) -> Any:
    """The Trainer whose training begins: callbacks are not handed it, but it stands a few frames out."""
    from transformers import Trainer

    for _ in range(8):
        if frame is None:
            break
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    return None
