"""One trial: a process of its own that runs the program on a mirror of its files, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradguard.config.settings import Settings
from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.foreign_exceptions import internal_error
from gradguard.fixes.verification import Outcome
from gradguard.runtime.trials.confinement import can_hold
from gradguard.runtime.trials.mirror import Mirror, roots_of
from gradguard.runtime.trials.order import VARIABLE, Order

_PATIENCE = 5.0
_GRACE = 10.0  # seconds that a process gets to end by itself once its time is up
_DISTRIBUTED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


class NoTrialError(Exception):
    """The program cannot be run again; the message says why."""


@dataclass(frozen=True)
class Launch:
    """How the program was started.

    Attributes:
        target: a script, a folder with `__main__.py`, or a module's dotted name.
        folder: the working directory.
    """

    target: str
    arguments: tuple[str, ...] = ()
    as_module: bool = False
    folder: str = field(default_factory=os.getcwd)

    @classmethod
    def of_this_process(cls) -> Launch:
        """The launch of the program that runs here, as far as `__main__` tells.

        Raises:
            NoTrialError: it does not tell.
        """
        main = sys.modules.get("__main__")
        file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        if not isinstance(file, str):
            raise NoTrialError("the main script is not known: the program is not run from a file")
        if not USER_FILES[file]:
            raise NoTrialError(f"the main script is not known: the process was started by {os.path.basename(file)}")
        arguments = tuple(sys.argv[1:])
        if spec is not None:
            return cls(str(spec.name).removesuffix(".__main__"), arguments, as_module=True)
        return cls(os.path.abspath(file), arguments)

    def roots(self) -> list[str]:
        """The folders that the program consists of."""
        script = os.path.join(self.folder, self.target)
        return roots_of(self.folder if self.as_module else script if os.path.isdir(script) else os.path.dirname(script), self.folder)

    def script(self) -> dict[str, bytes]:
        """The script as it is: a link in its place would lead Python to the folder that it is a copy of."""
        path = os.path.join(self.folder, self.target)
        return {path: Path(path).read_bytes()} if not self.as_module and os.path.isfile(path) else {}

    def check(self) -> None:
        """Raises where it is known beforehand that the program cannot be run again.

        Raises:
            NoTrialError: with the reason.
        """
        if os.environ.get(VARIABLE):
            raise NoTrialError("this is a trial already")
        for name in _DISTRIBUTED:
            if os.environ.get(name, "1") not in ("", "1"):
                raise NoTrialError("the program runs in several processes, and a trial is one")
        if not self.as_module and not os.path.exists(os.path.join(self.folder, self.target)):
            raise NoTrialError(f"there is no {self.target} any more, or it is read from standard input")


def run_trial(launch: Launch, contents: Mapping[str, bytes], settings: Settings, steps: int, seconds: float) -> Outcome:
    """Runs the program with other contents in some of its files.

    Args:
        contents: by path.
        settings: the guard's.
        steps: enough of them.
        seconds: the time limit, for the whole process.

    Raises:
        NoTrialError: the trial cannot be made.
        OSError: there is no room for the copy.
    """
    with tempfile.TemporaryDirectory(prefix="gradguard-trial-", ignore_cleanup_errors=True) as given:
        folder = os.path.realpath(given)
        mirror = Mirror(folder, launch.roots(), link=can_hold())
        try:
            mirror.write({**launch.script(), **contents})
        except LookupError as error:
            raise NoTrialError(error.args[0]) from None
        events = os.path.join(folder, "events.jsonl")
        plain = settings.model_dump(mode="json", exclude={"report", "html", "verify", "summary", "color"})
        order = Order(
            settings=plain,
            folder=folder,
            events=events,
            roots=mirror.places,
            steps=steps,
            patience=min(_PATIENCE, seconds / 4),
            seconds=seconds,
        )
        Path(folder, "order.json").write_text(order.model_dump_json(), encoding="utf-8")
        os.mkdir(os.path.join(folder, "tmp"))
        began = time.monotonic()
        status = _run(launch, mirror, folder, seconds + _GRACE)
        outcome = _read(Path(events), mirror, status, Path(folder, "printed.txt"))
        outcome.seconds = time.monotonic() - began
        return outcome


def _run(launch: Launch, mirror: Mirror, folder: str, seconds: float) -> int:
    """Runs the process, and ends all that it has left running."""
    command = [sys.executable, *_interpreter_options(), "-m", "gradguard", "run", "--trial", os.path.join(folder, "order.json")]
    target = launch.target
    if launch.as_module:
        command.append("-m")
    else:
        given = os.path.join(launch.folder, target)
        place = mirror.place_of(given)
        target = given if place is None else place
    where = mirror.place_of(launch.folder)
    with open(os.path.join(folder, "printed.txt"), "wb") as printed:
        process = subprocess.Popen(
            [*command, target, *launch.arguments],
            cwd=where or folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            _end_all(process)


def _end_all(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its own group, whose number is taken as long as one of it lives
        except (ProcessLookupError, PermissionError):
            pass
    if process.poll() is None:
        process.kill()
        process.wait()


def _interpreter_options() -> list[str]:
    options: Any = getattr(subprocess, "_args_from_interpreter_flags", list)
    return list(options())


def _environment(folder: str) -> dict[str, str]:
    """The environment, with what programs write aside led into the trial's folder, and services told that there is no network."""
    temporary = os.path.join(folder, "tmp")
    environment = dict(os.environ) | {
        VARIABLE: "1",
        "TMPDIR": temporary,
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(temporary, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(temporary, "triton"),
        "MPLCONFIGDIR": temporary,
        "PYTHONDONTWRITEBYTECODE": "1",
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    paths = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.pop("GRADGUARD_VERIFY", None)
    environment.pop("GRADGUARD_REPORT", None)
    return environment


def _read(events: Path, mirror: Mirror, status: int, printed: Path) -> Outcome:
    outcome = Outcome()
    try:
        lines = events.read_text(encoding="utf-8").splitlines()
    except internal_error(OSError):
        lines = []
    for line in lines:
        try:
            fact = json.loads(line)
        except ValueError:  # cut off by the end of the process
            continue
        if "diagnosis" in fact:
            outcome.diagnoses.append(_own_paths(Diagnosis.model_validate(fact["diagnosis"]), mirror))
        for kind in ("refused", "unkept"):
            if kind in fact:
                getattr(outcome, kind).append(fact[kind])
        if "error" in fact:
            outcome.error, outcome.error_type = fact["error"], fact["error_type"]
        for kind in ("ending", "steps", "backwards", "without_gradient", "nonfinite"):
            if kind in fact:
                setattr(outcome, kind, fact[kind])
    outcome.left_out = mirror.left_out
    if outcome.error is not None:
        outcome.ending = "error"
    elif outcome.ending == "gone":
        outcome.error = _last_words(printed) or f"status {status}"
    elif outcome.ending == "end" and status != 0:
        outcome.ending, outcome.error = "error", f"status {status}"
    return outcome


def _own_paths(diagnosis: Diagnosis, mirror: Mirror) -> Diagnosis:
    """A diagnosis of the copy, with the paths of the original."""
    text = diagnosis.model_dump_json()
    for root, place in mirror.places.items():
        text = text.replace(json.dumps(place)[1:-1], json.dumps(root)[1:-1])
    return Diagnosis.model_validate_json(text)


def _last_words(printed: Path) -> str | None:
    try:
        lines = [line for line in printed.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except internal_error(OSError):
        return None
    return lines[-1].strip()[:300] if lines else None
