"""gradguard for Lightning: `Trainer(callbacks=[GradGuardCallback(level="strict")])`.

Works with `pytorch_lightning` and with `lightning.pytorch`, whose Callback classes have nothing to do with each other: the
class made here inherits from the one the user has imported (both, if both are). Only one of the two need be installed.

Each batch is one step under the guard. Validation, test and prediction are left alone. A batch that fails untraced is run
again, traced, before the error leaves the loop (`Guard.step` says what a second run may and may not do), so the user sees one
error, the diagnosis, raised where the original was.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import ConfigError
from gradguard.monitors.lightning_fits import Fit, IdleFit, NoLossReturned
from gradguard.runtime.guard import Guard
from gradguard.runtime.metric_writing import counts
from gradguard.runtime.session import current_session

logger = logging.getLogger("gradguard")
_NO_LOSS_BATCHES = 5
_PACKAGES = ("pytorch_lightning", "lightning.pytorch")
_HOOKS = (  # of every batch; none of them is used here
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


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
        level: "off", "watch", "standard", "strict" or "forensic"; False is "off", which is what YAML makes of a bare `off`.
        config: a YAML file with settings.
        report: a file that gets one JSON object a diagnosis; by default `gradguard.jsonl` in the run's log folder, written
            only if there is something to write.
        log_every_n_steps: how often the number of diagnoses goes to the trainer's loggers; 0 for never.
        gradient_norms: whether gradient norms by layer go there too, which waits for the device once each time.
        trace: which steps are traced in full, such as `{"every": 500}`.
        rules: by rule code, rule name or family prefix: an action, or a mapping of action and options.
        settings: further settings by name.

    Raises:
        ConfigError: a setting that does not exist or fit.
    """

    def __init__(
        self,
        level: str | Literal[False] | None = None,
        config: str | os.PathLike[str] | None = None,
        report: str | os.PathLike[str] | None = None,
        log_every_n_steps: int = 50,
        gradient_norms: bool = False,
        trace: dict[str, Any] | None = None,
        rules: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        given = {
            "level": "off" if level is False else level,
            "config": config,
            "report": report,
            "trace": trace,
            "rules": rules,
            **settings,
        }
        self._arguments = {"log_every_n_steps": log_every_n_steps, "gradient_norms": gradient_norms, **given}
        self._norms: dict[str, float] = {}  # that the loggers are yet to be told
        if gradient_norms and log_every_n_steps:
            given |= {"writer": self._keep_norms, "write_every": log_every_n_steps}
        # Only what was given, and by way of a mapping: LightningCLI reads in this source where the settings go, and would offer
        # the guard's ready-made `settings` too, beside which a level is not looked at.
        self.guard = Guard(**{name: value for name, value in given.items() if value is not None})
        self.guard.made_at = None  # each callback is a run of its own, also where one line makes several
        self.log_every_n_steps = log_every_n_steps
        self._own_report = self.guard.diagnoser.report is None
        self._fetching = False  # between two steps
        self._entered = False
        self._restored: dict[str, Any] = {}
        self._wrapped: list[tuple[Any, str]] = []
        self._without_loss: int | None = 0  # batches whose training_step returned None; None once one returned a loss
        self._fit: Fit | None = None  # under manual optimization: is the loss that is returned ever applied?
        self._looking = False
        self._traced = 0
        self._logged = (0, 0)  # the step and the number of diagnoses that the loggers were told last

    def __reduce__(self) -> tuple[Any, ...]:
        # spawned ranks get a copy; a guard holds code objects and the class is made on the spot, neither can be pickled
        return _rebuilt, (self._arguments, self._restored)

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
        current_session().catch_up()
        return {"steps": run.depth.steps, "said": [diagnosis.model_dump(mode="json") for diagnosis in run.speaker.said()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes: what was said before the checkpoint is not said again."""
        self._restored = dict(state)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Puts the guard around the loop's steps, once the strategy stands."""
        if stage != "fit" or self.guard.level == "off":
            return
        self._without_loss = 0
        self._logged = (0, len(self.diagnoses))
        self.guard.models[:] = [pl_module]
        if self._own_report:
            self._report_to(trainer)
        loop = trainer.fit_loop.epoch_loop
        for part in ("automatic_optimization", "manual_optimization"):
            optimization = getattr(loop, part, None)
            if optimization is not None:
                self._wrap(optimization, "run", self.guard.step, always=True)
        self._leave_out_hooks()
        self._wrap(trainer.strategy, "training_step", partial(self._training_step, pl_module))
        self._wrap(trainer.strategy, "optimizer_step", self.guard.explaining)
        if self._wrap(loop, "advance", partial(self._advance, trainer), always=True):
            self._wrap(getattr(trainer, "_logger_connector", None), "on_batch_start", self._enter, always=True)

    def _leave_out_hooks(self) -> None:
        """Lightning passes over a hook that is None; one that does nothing costs it some 10 µs, which is half of a guarded step."""
        for name in _HOOKS:
            own = getattr(type(self), name, None)
            if any(own is getattr(base, name, None) for base in type(self).__mro__ if base.__name__ == "Callback"):
                vars(self)[name] = None

    def _report_to(self, trainer: Any) -> None:
        folder = trainer.log_dir  # a collective under a distributed strategy: every rank has to ask
        if not trainer.fast_dev_run:  # which promises to leave no files behind
            try:
                self.guard.report_to(os.path.join(folder or trainer.default_root_dir, "gradguard.jsonl"))
            except ConfigError as error:  # a name that nobody asked for is no reason to stop the training
                logger.warning("no report is written: %s", error)

    def _training_step(self, module: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.guard.explaining(function, *args, **kwargs)
        if self._without_loss is not None and module.automatic_optimization:
            self._without_loss = self._without_loss + 1 if output is None else None
            if self._without_loss == _NO_LOSS_BATCHES:
                self._no_loss(module)
        if self._looking and self._fit is not None:
            self._looking = not self._fit.look(output)
        return output

    def _no_loss(self, module: Any) -> None:
        step: Any = getattr(type(module), "training_step", None)
        while hasattr(step, "__wrapped__"):
            step = step.__wrapped__
        code = getattr(step, "__code__", None)
        if code is not None:
            finding = NoLossReturned(None, type(module).__name__, code, self._without_loss)
            self._without_loss = None
            current_session().judge(finding, sys._getframe(1))

    def _wrap(self, owner: Any, name: str, call: Callable[..., Any], always: bool = False) -> bool:
        """Replaces a bound method on the instance, if there is one; taken back when the fit ends.

        Args:
            always: False where it is to do what it did unless a step is under way.
        """
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None or name in vars(owner):
            return False

        def guarded(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return call(original, *args, **kwargs) if always or self._entered else original(*args, **kwargs)

        vars(owner)[name] = guarded
        self._wrapped.append((owner, name))
        return True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Resumes from a checkpoint, whose state Lightning hands over after `setup`."""
        self._looking = self.guard.level != "off" and not pl_module.automatic_optimization
        self._fit = Fit(pl_module, self.guard.run.ledger) if self._looking else None
        for optimizer in trainer.optimizers if self._looking else ():
            self.guard.run.ledger.book_of(optimizer)  # before a toggle freezes what it holds
        if self._restored:
            run = self.guard.run
            run.depth.steps = int(self._restored.get("steps", 0))
            for said in self._restored.get("said", []):
                run.speaker.remember(Diagnosis.model_validate(said))
            self._restored = {}

    def _advance(self, trainer: Any, function: Callable[..., Any], *args: Any) -> None:
        """The loop goes on to the next batch: the step ends with the last of its hooks."""
        __tracebackhide__ = True
        self._fetching = True
        try:
            function(*args)
        finally:
            self._fetching = False
            self._leave()
        if self.log_every_n_steps and trainer.loggers:
            self._log(trainer)

    def _enter(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """The batch has come, and the first of its hooks is about to be called: the step begins. Or it is one of an evaluation's."""
        function(*args, **kwargs)
        if self._fetching:
            self._fetching = False
            self.guard.__enter__()
            self._entered = True
            self._traced += current_session().tracing

    def _keep_norms(self, metrics: dict[str, float], step: int) -> None:
        """In the course of a batch, before Lightning counts its step."""
        self._norms = {name: value for name, value in metrics.items() if name.startswith("gradguard/grad_norm/")}

    def _log(self, trainer: Any) -> None:
        step, found = trainer.global_step, len(self._found())
        due = step != self._logged[0] and step % self.log_every_n_steps == 0
        if not due and found == self._logged[1] and not self._norms:
            return
        self._logged = (step, found)
        facts = {**counts(self.guard.run), "gradguard/traced_batches": float(self._traced), **self._norms}
        self._norms = {}
        for logger in trainer.loggers:
            logger.log_metrics(facts, step=step)

    def _found(self) -> list[Diagnosis]:
        return self.guard.run.speaker.said()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit ends with an error, which has been diagnosed where it arose; `teardown` will not be called."""
        self._leave()
        self._unwrap()
        if self.guard.level != "off":
            self.guard.diagnoser.shorten(exception)
            self.guard.run.broken_off()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The fit ends well: bugs that only a whole run shows are said now."""
        self._leave()
        if self.guard.level == "off":
            return
        if self._without_loss:
            with self.guard:
                self._no_loss(pl_module)
        if self._fit is not None and self._fit.idle(self.guard.run.ledger):
            with self.guard:
                current_session().judge(IdleFit(None, self._fit), sys._getframe())
        self.guard.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes back what setup replaced."""
        self._leave()
        self._unwrap()

    def _unwrap(self) -> None:
        while self._wrapped:
            owner, name = self._wrapped.pop()
            vars(owner).pop(name, None)
        for name in _HOOKS:
            vars(self).pop(name, None)

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self.guard.leave()


def _rebuilt(arguments: dict[str, Any], restored: dict[str, Any]) -> Any:
    """A callback from what another process sent."""
    callback = _make()(**arguments)
    callback._restored = restored
    return callback


_made: dict[tuple[type, ...], Any] = {}


def _make() -> Any:
    bases = _callback_bases()
    made = _made.get(bases)
    if made is None:
        names = {"__doc__": _GradGuardCallback.__doc__, "__module__": __name__}
        made = _made[bases] = type("GradGuardCallback", (_GradGuardCallback, *bases), names)
    return made


def __getattr__(name: str) -> Any:
    # made when first asked for: by then the user has imported the Lightning they use
    if name == "GradGuardCallback":
        return _make()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
