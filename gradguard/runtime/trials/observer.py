"""What runs in a trial's process beside the program: counts steps, looks at gradients, writes down what is said and how it ends.

Facts go line by line into a file that the other process reads, so that those of a process that is killed are not lost.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradguard.config.settings import Settings
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.runtime.diagnoser import witnesses
from gradguard.runtime.guard import Guard
from gradguard.runtime.trials.confinement import confine
from gradguard.runtime.trials.order import Order
from gradguard.torch_compat.private_api import quiet

_LOOKED_AT = 8  # first steps whose gradients are all looked at; later, of parameters without one so far and at the end


class Observer:
    """Watches this process as a trial.

    Args:
        order: as the other process wrote it.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._began = time.monotonic()
        self._first_step = 0.0
        self._file = os.open(order.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._steps: Counter[int] = Counter()  # by optimizer
        self._parameters: dict[int, _Parameter] = {}
        self._guard: Guard | None = None
        self._ended = False

    @classmethod
    def of(cls, path: Path) -> Observer:
        """The observer that an order asks for."""
        return cls(Order.model_validate_json(path.read_text(encoding="utf-8")))

    def begin(self) -> Guard:
        """From here on the process is confined and watched; gives the guard for the program."""
        order = self._order
        atexit.register(self._end, "end")  # the first to be registered runs last
        _redirect_imports(order.roots)
        confine(order.folder, lambda kind, text: self._write(**{kind: text}))
        register_optimizer_step_post_hook(self._stepped)
        witnesses.append(lambda diagnosis: self._write(diagnosis=diagnosis.model_dump(mode="json")))
        threading.Thread(target=self._wait, daemon=True).start()
        self._guard = Guard(settings=Settings.model_validate(order.settings))
        return self._guard

    def raised(self, error: BaseException | None) -> None:
        """The program is over, perhaps with an exception."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return
        kind = next((known.__name__ for known in (PermissionError, ConnectionError, FileNotFoundError) if isinstance(error, known)), "")
        first = (str(error).strip().splitlines() or [""])[0][:300]
        self._write(error=f"{type(error).__name__}: {first}".removesuffix(": "), error_type=kind or type(error).__name__)

    def _write(self, **facts: Any) -> None:
        os.write(self._file, json.dumps(facts).encode() + b"\n")

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            with quiet():
                self._look(optimizer)
        except internal_error() as fault:
            self._write(unkept=f"gradients were not looked at ({type(fault).__name__}: {fault})")
        self._steps[id(optimizer)] += 1
        self._first_step = self._first_step or time.monotonic()
        steps = max(self._steps.values())
        if steps >= self._order.steps and time.monotonic() - self._first_step >= self._order.patience:
            self._end("enough")
            self._leave()

    def _look(self, optimizer: Any) -> None:
        early = self._steps[id(optimizer)] < _LOOKED_AT
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                known = self._parameters.get(id(parameter))
                if known is None or known.ref() is not parameter:
                    known = self._parameters[id(parameter)] = _Parameter(parameter)
                if early or not known.got or not known.finite:
                    known.look(parameter)

    def _wait(self) -> None:
        time.sleep(max(0.0, self._order.seconds - (time.monotonic() - self._began)))
        self._end("time")
        self._leave()

    def _end(self, ending: str) -> None:
        """Writes down how far the program came. By whichever thread is first."""
        if self._ended:
            return
        self._ended = True
        backwards = 0 if self._guard is None else self._guard.run.ledger.backwards
        steps = max(self._steps.values(), default=0)
        without = self._names(lambda known: not known.got)
        nonfinite = self._names(lambda known: known.got and not known.finite)
        self._write(ending=ending, steps=steps, backwards=backwards, without_gradient=without, nonfinite=nonfinite)

    def _names(self, wanted: Any) -> list[str]:
        from gradguard.analysis.live.names import Names

        found = [parameter for known in self._parameters.values() if wanted(known) and (parameter := known.ref()) is not None]
        if not found:
            return []
        names = Names([])
        return [state.path if (state := names.state(each)) is not None else f"a parameter of shape {list(each.shape)}" for each in found]

    def _leave(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except internal_error():
                pass
        os._exit(0)


class _Parameter:
    """A trainable parameter of an optimizer that has stepped."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.ref = TensorRef(parameter)
        self.got = False
        self.finite = True

    def look(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        self.got = True
        values = gradient.detach()
        self.finite = bool(torch.isfinite(values.coalesce().values() if values.is_sparse else values).all())


def _redirect_imports(roots: dict[str, str]) -> None:
    """Modules of the program's folders that are found by way of `sys.path`, or of an editable install, are those of the copy."""
    own = os.path.realpath(os.path.dirname(os.path.dirname(sys.modules["gradguard"].__file__ or "")))

    def moved(path: str) -> str:
        real = os.path.realpath(path)
        for root, place in roots.items():
            if path and real != own and (real == root or real.startswith(os.path.join(root, ""))):
                return place + real[len(root) :] if os.path.exists(place + real[len(root) :]) else path
        return path

    sys.path[:] = [moved(entry) for entry in sys.path]
    for finder in sys.meta_path:  # setuptools' editable finders are classes of generated modules with a mapping
        mapping = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None)
        if isinstance(mapping, dict) and own not in {os.path.dirname(os.path.realpath(str(path))) for path in mapping.values()}:
            for name, path in mapping.items():
                mapping[name] = moved(str(path))
