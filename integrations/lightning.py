"""gradguard for Lightning: `Trainer(callbacks=[GradGuardCallback(level="strict")])`.

Works with `pytorch_lightning` and with `lightning.pytorch`, whose Callback classes have nothing to do with each other: the
class made here inherits from the one the user has imported (both, if both are). Only one of the two need be installed.

Each batch is one step under the guard. Validation, test and prediction are left alone. A batch that fails untraced is run
again, traced, before the error leaves the loop (`Guard.step` says what a second run may and may not do), so the user sees one
error, the diagnosis, raised where the original was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradguard.diagnosis import Diagnosis
from gradguard.guard import Guard

_PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def _callback_bases() -> tuple[type, ...]:
    """The Callback classes to inherit from: those of the packages in use, else of those installed.

    Raises:
        ImportError: neither package is installed; the message says which to install.
    """
    loaded = [name for name in _PACKAGES if name in sys.modules]
    names = loaded or [name for name in _PACKAGES if find_spec(name.split(".", 1)[0]) is not None]
    if not names:
        raise ImportError("gradguard.integrations.lightning needs Lightning: pip install 'gradguard[lightning]'")
    return tuple(import_module(name).Callback for name in names)


class _GradGuardCallback:
    """Guards the training steps of a fit.

    Args:
        level: "off", "watch", "standard", "strict" or "forensic".
        config: a YAML file with settings.
        report: a file that gets one JSON object a diagnosis; by default `gradguard.jsonl` in the run's log folder, written
            only if there is something to write.
        log_every_n_steps: how often the number of diagnoses goes to the trainer's loggers; 0 for never.
        settings: further settings by name.

    Raises:
        ConfigError: a setting that does not exist or fit.
    """

    def __init__(
        self,
        level: str | None = None,
        config: str | os.PathLike[str] | None = None,
        report: str | os.PathLike[str] | None = None,
        log_every_n_steps: int = 50,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.guard = Guard(level=level, config=config, report=report, **settings)
        self.log_every_n_steps = log_every_n_steps
        self._own_report = self.guard.report is None
        self._entered = False
        self._restored: dict[str, Any] = {}
        self._wrapped: list[tuple[Any, str]] = []

    # -- what has been found ------------------------------------------------------------------------------------------

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """Everything found so far in this process, oldest first."""
        return self.guard.diagnoses

    @property
    def state_key(self) -> str:
        """The name under which the state stands in a checkpoint: the same whichever Lightning wrote it."""
        return "GradGuardCallback"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: how many steps the guard has seen, and what it has said."""
        run = self.guard.run
        return {"steps": run.depth.steps, "said": [diagnosis.model_dump(mode="json") for diagnosis in run.speaker.said()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes: what was said before the checkpoint is not said again."""
        self._restored = dict(state)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Puts the guard around the loop's steps, once the strategy stands."""
        if stage != "fit" or self.guard.level == "off":
            return
        self.guard.models[:] = [pl_module]
        if self._own_report and trainer.is_global_zero and self.guard.report is None:
            folder = trainer.log_dir or trainer.default_root_dir
            if folder is not None:
                self.guard.report_to(os.path.join(folder, "gradguard.jsonl"))
        if self._restored:
            self._resume()
        loop = trainer.fit_loop.epoch_loop
        for part in ("automatic_optimization", "manual_optimization"):
            optimization = getattr(loop, part, None)
            if optimization is not None:
                self._wrap(optimization, "run")
        for name in ("training_step", "optimizer_step"):
            self._wrap(trainer.strategy, name, again=False)

    def _resume(self) -> None:
        run = self.guard.run
        run.depth.steps = int(self._restored.get("steps", 0))
        for said in self._restored.get("said", []):
            run.speaker.remember(Diagnosis.model_validate(said))
        self._restored = {}

    def _wrap(self, owner: Any, name: str, again: bool = True) -> None:
        """Replaces a bound method on the instance; taken back in teardown."""
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None or name in vars(owner):
            return
        guard = self.guard

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self._entered:
                return original(*args, **kwargs)
            if again:
                return guard.step(original, *args, **kwargs)
            return guard.explaining(original, *args, **kwargs)

        vars(owner)[name] = guarded
        self._wrapped.append((owner, name))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *args: Any) -> None:
        """A step begins."""
        if self.guard.level != "off" and not self._entered:
            self.guard.__enter__()
            self._entered = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *args: Any) -> None:
        """A step ends."""
        self._leave()
        every = self.log_every_n_steps
        if every and trainer.global_step % every == 0 and trainer.loggers and self.guard.level != "off":
            counts = {"gradguard/diagnoses": float(len(self.diagnoses))}
            for logger in trainer.loggers:
                logger.log_metrics(counts, step=trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit ends with an error, which has been diagnosed where it arose."""
        self._leave(exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The fit ends well: bugs that only a whole run shows are said now."""
        if self.guard.level == "off":
            return
        self._leave()
        self.guard.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes back what setup replaced."""
        self._leave()
        while self._wrapped:
            owner, name = self._wrapped.pop()
            vars(owner).pop(name, None)

    def _leave(self, error: BaseException | None = None) -> None:
        if self._entered:
            self._entered = False
            self.guard.leave()


_made: dict[tuple[type, ...], type] = {}


def _make() -> type:
    bases = _callback_bases()
    made = _made.get(bases)
    if made is None:
        made = _made[bases] = type("GradGuardCallback", (_GradGuardCallback, *bases), {"__doc__": _GradGuardCallback.__doc__, "__module__": __name__})
    return made


def __getattr__(name: str) -> Any:
    # made when first asked for: by then the user has imported the Lightning they use
    if name == "GradGuardCallback":
        return _make()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
