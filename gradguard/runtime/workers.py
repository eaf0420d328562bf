"""Worker processes of `torch.multiprocessing.spawn` run under the guard as well, when one is open where they are started.

The worker function is wrapped in an object that carries the settings; in the child it opens a guard of its own around the
function. What fails there reaches the parent as PyTorch has it: as text, now with the diagnosis in it.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from gradguard.core import ranks
from gradguard.core.errors import GradGuardError, mark_seen
from gradguard.probes.listeners import listener
from gradguard.runtime import rank_watch
from gradguard.runtime.module_isolation import received_worker

_folders: dict[str, int] = {}  # that are not removed yet, and the process that made each
_launched: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()  # by the context that waits for the workers

Divert = Callable[[Any, str, Callable[[Any], Any]], None]


class GuardedWorker:
    """A worker function and the settings to guard it with; can be pickled if the function can.

    Args:
        guard: the type of the guard.
        function: called as `function(index, *args)`.
        settings: the settings as JSON.
        report: the report file, None for no report.
        folder: a folder that the workers of one launch share.
    """

    def __init__(self, guard: type[Any], function: Callable[..., Any], settings: str, report: str | None, folder: str) -> None:
        self.guard = guard
        self.function = function
        self.settings = settings
        self.report = report
        self.folder = folder
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        return received_worker, (self.function, self.settings, self.report, self.folder)

    def __call__(self, index: int, *args: Any) -> Any:
        """Runs the worker.

        Raises:
            GradGuardError: the diagnosis of what the function raised.
        """
        os.environ[ranks.SHARED] = self.folder
        os.environ["GRADGUARD_WORKER"] = str(index)
        try:
            result = self._run(index, args)
        except BaseException as error:
            ranks.note_end("raised")
            rank_watch.failed(error)
            raise
        ranks.note_end("returned")
        rank_watch.finished()
        return result

    def _run(self, index: int, args: tuple[Any, ...]) -> Any:
        from gradguard.config.settings import Settings

        session = listener()
        if session is not None and session.guards:  # forked: the parent's guard came along
            return session.guards[-1].explaining(self.function, index, *args)
        guard = self.guard(settings=Settings.model_validate_json(self.settings))
        if self.report is not None:
            guard.report_to(self.report)
        try:
            with guard:
                return self.function(index, *args)
        except GradGuardError as error:  # without this function's frame: the parent is sent the text
            guard.diagnoser.shorten(error)
            raise


def install(divert: Divert) -> None:
    """Diverts the functions; `divert(owner, name, make)` keeps book of them."""
    module = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of this name
    divert(module, "start_processes", _start)
    divert(getattr(module, "ProcessContext", object), "join", _join)


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(fn: Any, *args: Any, **kwargs: Any) -> Any:
        session = listener()
        if session is None or isinstance(fn, GuardedWorker):
            return original(fn, *args, **kwargs)
        worker, folder = fn, None
        with session.lookout:
            guard = session.guards[-1]
            folder = tempfile.mkdtemp(prefix="gradguard-")
            _folders[folder] = os.getpid()
            report = None if guard.diagnoser.report is None else str(guard.diagnoser.report.path)
            worker = GuardedWorker(type(guard), fn, guard.settings.model_dump_json(), report, folder)
        context = None
        try:
            context = original(worker, *args, **kwargs)
        finally:
            if context is None:  # the workers were waited for, or have not started
                _remove(folder)
        if context is not None:
            with session.lookout:
                _launched[context] = folder
        return context

    return guarded


def _join(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        ended = True
        try:
            ended = original(*args, **kwargs)
        except GradGuardError:
            raise
        except Exception as error:
            mark_seen(error)  # the worker's own guard has diagnosed it
            raise
        finally:
            if ended and args:
                _remove(_launched.pop(args[0], None))
        return ended

    return guarded


def _remove(folder: str | None) -> None:
    if folder is not None and _folders.pop(folder, None) == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


@atexit.register
def _remove_all() -> None:
    """The process ends, and has not waited for its workers."""
    for folder in list(_folders):
        _remove(folder)
