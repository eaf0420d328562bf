"""Old names of modules that programs import: they lead to where the modules are now, with a DeprecationWarning.

CHANGELOG.md has the whole map; what is not listed here was internal.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NOW_AT = {
    "gradguard.diagnosis": "gradguard.core.diagnosis",
    "gradguard.errors": "gradguard.core.errors",
    "gradguard.guard": "gradguard.runtime.guard",
    "gradguard.reporters": "gradguard.reporting",
    "gradguard.reporters.html": "gradguard.reporting.html.page",
    "gradguard.reporters.jsonl": "gradguard.reporting.jsonl",
    "gradguard.reporters.notebook": "gradguard.reporting.notebook",
    "gradguard.reporters.terminal": "gradguard.reporting.terminal.render",
    "gradguard.settings": "gradguard.config.settings",
}


class _Renamed(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []  # nothing is looked for on disk below an old name
        return module

    def exec_module(self, module: ModuleType) -> None:
        now_at = _NOW_AT[module.__name__]
        warnings.warn(f"`{module.__name__}` is now `{now_at}`", DeprecationWarning, stacklevel=2)
        if module.__name__ != "gradguard.reporters":
            sys.modules[module.__name__] = import_module(now_at)  # which the import statement then gives


class Finder(MetaPathFinder):
    """Stands last in `sys.meta_path`: asked only for what nobody else has."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Renamed()) if fullname in _NOW_AT else None
