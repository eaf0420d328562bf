"""`gradguard doctor`: versions, what is patched while a guard is on, and which probes work here, tried on tiny broken programs.

What it prints can be pasted into a bug report: no file of the user's is read, and no path is told but that of a settings file.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from gradguard.core.diagnosis import Diagnosis
from gradguard.core.foreign_exceptions import internal_error

_PACKAGES = (
    *("accelerate", "jinja2", "lightning", "mlflow", "numpy", "pydantic", "pytorch-lightning", "rich", "tensorboard", "transformers"),
    *("typer", "wandb"),
)
_HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\nx = torch.ones(4, requires_grad=True)\n"
_LOOP = """model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = model(torch.randn(8, 4)).pow(2).mean()
    {before}loss.backward()
    optimizer.step()
"""
_WRITTEN = "y = torch.sigmoid(x)\ny += 1\ny.sum().backward()\n"


class _Trial(NamedTuple):
    """A broken program, and what a guard that works says of it.

    Attributes:
        name: of the probe.
        lost: what a guard does without it.
        level: of the guard.
        program: below a few lines that all have.
        code: of the diagnosis.
        culprit: the marked expression; None where it need not be known.
        tensor: a name that is told.
    """

    name: str
    lost: str
    level: str
    program: str
    code: str
    culprit: str | None = None
    tensor: str | None = None


_TRIALS = (
    _Trial("operators", "the lines that made, saved and wrote a tensor, and silent bugs by line", "strict", _WRITTEN, "GG101", "y += 1"),
    _Trial("saved tensors of the live graph", "writes in steps that are not traced (GG101)", "watch", _WRITTEN, "GG101"),
    _Trial(
        "saved tensors' contents",
        "writes through numpy and `.data`, which PyTorch does not count",
        "standard",
        "y = torch.sigmoid(x)\ny.detach().numpy()[0] = 5.0\ny.sum().backward()\n",
        "GG1",
    ),
    _Trial("backward calls", "graphs that are used twice (GG2)", "strict", "y = x.exp().sum()\ny.backward()\ny.backward()\n", "GG2"),
    _Trial("step protocol, names", "gradients that are not cleared, and names of parameters", "standard", _LOOP.format(before=""), "GG601",
           "optimizer.step()", "model.weight"),
    _Trial("cut paths", "where a gradient's path is cut (GG3)", "strict", "y = (x * 2).detach()\n(y * 3).sum().backward()\n", "GG302",
           "(x * 2).detach()"),
    _Trial("results, op by op", "the line of the first value that is not finite (GG501)", "forensic",
           "y = torch.log(x - 1)\n(y * y).sum().backward()\n", "GG50", "torch.log(x - 1)"),
    _Trial("nodes of backward", "the line whose derivative is not finite (GG502)", "forensic",
           "w = nn.Parameter(torch.zeros(4))\noptimizer = torch.optim.SGD([w], lr=0.1)\ny = torch.sqrt(w)\n(y * 0).sum().backward()\n"
           "optimizer.step()\n", "GG502", "torch.sqrt(w)"),
)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """What came of trying a probe.

    Attributes:
        name: of the probe.
        works: whether what it should see was seen.
        seen: what was said instead; empty where it works.
        lost: what a guard does without it.
    """

    name: str
    works: bool
    seen: str
    lost: str


@dataclass(frozen=True)
class Checkup:
    """All that `gradguard doctor` knows; versions and settings by name.

    Attributes:
        missing: private names of torch that this release does not have.
        patched: functions of torch that do something more while a guard is on; they stay the objects they are.
        unwatched: functions that could not be, with the reason.
        faults: what gradguard logged of faults of its own on the way.
    """

    versions: dict[str, str]
    settings: dict[str, str]
    probes: list[Probe]
    missing: list[str]
    patched: list[str]
    unwatched: list[str]
    faults: list[str]

    @property
    def healthy(self) -> bool:
        """Whether everything works."""
        return all(probe.works for probe in self.probes) and not self.unwatched and not self.faults


def run(as_json: bool) -> int:
    """Prints the checkup; gives the exit status."""
    found = examine()
    print(json.dumps({"schema_version": 1, "healthy": found.healthy, **asdict(found)}, indent=2) if as_json else as_text(found))
    return 0 if found.healthy else 1


def examine() -> Checkup:
    """Tries everything, in this process."""
    from gradguard.probes import torch_functions
    from gradguard.torch_compat import private_api

    with tempfile.TemporaryDirectory(prefix="gradguard-doctor-") as folder, _logged() as faults:
        probes = [*(_tried(trial, Path(folder)) for trial in _TRIALS), _memory(Path(folder))]
        return Checkup(
            _versions(),
            _settings(),
            probes,
            sorted(private_api.missing()),
            sorted(set(torch_functions.patched())),
            sorted(set(torch_functions.unwatched())),
            list(dict.fromkeys(faults)),
        )


def as_text(found: Checkup) -> str:
    """The checkup for people, as wide as the terminal."""
    from gradguard.reporting.terminal.layout import wrap
    from gradguard.reporting.terminal.render import terminal_width

    width = terminal_width(sys.stdout)
    lines = ["gradguard doctor", ""]

    def listed(title: str, items: list[str], empty: str) -> None:
        lines.extend(["", *wrap(f"{title}: {empty}" if not items else f"{title} ({len(items)})", width)])
        lines.extend(f"  {line}" for line in (wrap(", ".join(items), width - 2) if items else ()))

    column = max(map(len, found.versions))
    for name, value in {**found.versions, **found.settings}.items():
        first, *rest = wrap(value, max(20, width - column - 2))
        lines += [f"{name:<{column}}  {first}", *(f"{'':<{column}}  {line}" for line in rest)]
    lines += ["", "probes, each tried on a broken program"]
    for probe in found.probes:
        lines.append(f"  {'ok  ' if probe.works else 'FAIL'}  {probe.name}")
        if not probe.works:
            lines += [f"        {line}" for line in wrap(f"{probe.seen}; lost: {probe.lost}", width - 8)]
    listed("private names that this PyTorch does not have", found.missing, "none")
    listed("functions that cannot be watched in this PyTorch", found.unwatched, "none")
    listed("faults of gradguard's own", found.faults, "none")
    listed("watched while a guard is on; the functions stay the objects they are", found.patched, "none")
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    import torch

    import gradguard

    accelerators = [name for name, there in (("CUDA", torch.version.cuda), ("HIP", torch.version.hip)) if there]
    built = ", ".join(f"{name} {getattr(torch.version, name.lower())}" for name in accelerators) or "CPU only"
    found = {
        "gradguard": gradguard.__version__,
        "python": f"{platform.python_version()} {platform.python_implementation()}",
        "system": f"{platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__} ({built}; {torch.get_num_threads()} threads)",
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _settings() -> dict[str, str]:
    from gradguard.config.settings import load_settings
    from gradguard.core.errors import ConfigError

    try:
        settings = load_settings()
        found = {"level": f"{settings.level} ({settings.sources['level']})"}
    except ConfigError as error:
        found = {"level": f"the settings in force here are wrong: {error}"}
    given = sorted(name for name in os.environ if name.startswith(("GRADGUARD_", "TORCH_", "PYTORCH_")))
    return {**found, "environment": ", ".join(given)} if given else found


def _tried(trial: _Trial, folder: Path) -> Probe:
    try:
        found = _said(trial.program, trial.level, folder)
        seen = _differs(trial, found)
    except internal_error() as error:  # whatever it is, it is what is asked for
        seen = f"{type(error).__name__}: {error}"
    return Probe(trial.name, not seen, seen, trial.lost)


def _differs(trial: _Trial, found: list[Diagnosis]) -> str:
    """In what the diagnoses are not what they should be; empty where they are."""
    fitting = [diagnosis for diagnosis in found if diagnosis.code.startswith(trial.code)]
    if not fitting:
        return f"{', '.join(diagnosis.code for diagnosis in found) or 'nothing'} was said, not {trial.code}"
    (diagnosis, *_) = fitting
    culprit = None if diagnosis.culprit is None else diagnosis.culprit.text
    if trial.culprit is not None and culprit != trial.culprit:
        return f"{diagnosis.code} was said of {culprit or 'no line'}, not of {trial.culprit}"
    if trial.tensor is not None and trial.tensor not in [tensor.name for tensor in diagnosis.tensors]:
        return f"{diagnosis.code} does not name {trial.tensor}"
    return ""


def _memory(folder: Path) -> Probe:
    name, lost = "saved-tensor hooks", "`gradguard memory` by line, and what the graph hides at level forensic (needs PyTorch 2.8)"
    try:
        lines: list[str] = []
        _said(_LOOP.format(before="optimizer.zero_grad(); "), "watch", folder, lambda guard: lines.extend(
            held.text for held in guard.memory().lines), memory=True)  # fmt: skip
        seen = "" if any("model(" in line for line in lines) else "no line was told that holds memory"
    except internal_error() as error:
        seen = f"{type(error).__name__}: {error}"
    return Probe(name, not seen, seen, lost)


def _said(program: str, level: str, folder: Path, ask: Callable[[Any], object] | None = None, **settings: Any) -> list[Diagnosis]:
    """What a guard says of a program, which runs in this process as a module of its own.

    Args:
        ask: is called with the guard, once the program has ended.
    """
    from gradguard.config.settings import Settings
    from gradguard.core.errors import GradGuardError
    from gradguard.runtime.guard import Guard

    name = f"gradguard_doctor_{len(os.listdir(folder))}"
    path = folder / f"{name}.py"
    path.write_text(_HEAD + program)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # the bare preset: what is set for the project here is no business of a probe's
    guard = Guard(settings=Settings.model_validate({"level": level, **settings, "verbosity": "quiet"}))
    guard.made_at = None  # a run of its own
    raised: list[Diagnosis] = []
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            with guard:
                spec.loader.exec_module(module)
                if ask is not None:
                    ask(guard)
    except GradGuardError as error:
        raised = [error.diagnosis]
    except internal_error(RuntimeError):  # PyTorch's own, which no rule has explained
        pass
    finally:
        sys.modules.pop(name, None)
        with redirect_stderr(io.StringIO()):  # what a run tells at its end
            guard.run.broken_off()
    return raised or guard.diagnoses


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Keeps what gradguard logs off the terminal; gives its faults."""
    faults: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR and not hasattr(record, "diagnosis"):
                faults.append(record.getMessage())

    logger, handler = logging.getLogger("gradguard"), Keep()
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield faults
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
