"""gradguard: training-loop guard middleware for PyTorch.

    from gradguard import gradguard

    with gradguard():
        loss = model(batch).mean()
        loss.backward()

When forward, `backward()` or the optimizer fails, the error names the line that is the bug. See README.md.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradguard.renamed import Finder

if TYPE_CHECKING:
    from gradguard.cli.rule_pages import explain
    from gradguard.config.settings import Settings
    from gradguard.config.suppressions import ignore
    from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts, Verification
    from gradguard.core.errors import ConfigError, GradGuardError, GradGuardWarning, UnknownRuleError
    from gradguard.core.memory_report import MemoryReport
    from gradguard.reporting.writers import Writer
    from gradguard.runtime.guard import Guard, gradguard
    from gradguard.runtime.summary import RunSummary

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Diagnosis",
    "Fix",
    "GradGuardError",
    "GradGuardWarning",
    "Guard",
    "MemoryReport",
    "RunSummary",
    "Settings",
    "SourceSpan",
    "TensorFacts",
    "UnknownRuleError",
    "Verification",
    "Writer",
    "explain",
    "gradguard",
    "ignore",
]

_HOMES = {
    "ConfigError": "core.errors",
    "Diagnosis": "core.diagnosis",
    "Fix": "core.diagnosis",
    "GradGuardError": "core.errors",
    "GradGuardWarning": "core.errors",
    "Guard": "runtime.guard",
    "MemoryReport": "core.memory_report",
    "RunSummary": "runtime.summary",
    "Settings": "config.settings",
    "SourceSpan": "core.diagnosis",
    "TensorFacts": "core.diagnosis",
    "UnknownRuleError": "core.errors",
    "Verification": "core.diagnosis",
    "Writer": "reporting.writers",
    "explain": "cli.rule_pages",
    "gradguard": "runtime.guard",
    "ignore": "config.suppressions",
}


def __getattr__(name: str) -> Any:
    # Late, because the pytest plugin stands in this package: a test run that has nothing to do with torch must not load it.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("`gradguard` is the module here: write `from gradguard import gradguard`, or `gradguard.gradguard(...)`")


sys.modules[__name__].__class__ = _Package
sys.meta_path.append(Finder())
