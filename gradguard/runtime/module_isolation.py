"""Keeps the modules that gradguard imports and the program's own modules of the same name apart.

A program may have a `yaml.py` or a `statistics.py` beside its script. Python would find it for the program, because the
script's folder comes first on `sys.path`; and for gradguard too, whatever gradguard imports later. So where a folder has such
a module, all of gradguard is imported without that folder, and what the folder hides is dropped from `sys.modules`
afterwards: gradguard keeps what it has bound, and the program's own import finds what it would find without gradguard.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.machinery import FrozenImporter, ModuleSpec, PathFinder, all_suffixes
from types import ModuleType
from typing import Any

_TWICE_FAILS = {"torch", "gradguard"}  # two of them in one process do not work
_AT_START = {  # loaded by the interpreter before it puts the script's folder on the path
    "__main__", "_collections_abc", "_sitebuiltins", "abc", "codecs", "encodings", "genericpath", "io", "ntpath", "os", "posixpath", "site",
    "sitecustomize", "stat", "usercustomize", "zipimport",
}  # fmt: skip
_kept: list[ModuleType] = []  # dropped, and in use


def load_apart(folder: str) -> None:
    """Makes sure that a folder at the front of `sys.path` neither hides a module from gradguard nor is hidden by one.

    Args:
        folder: where the program's modules are looked for first; on `sys.path` or about to be put there.
    """
    hidden = {name: spec for name in _modules_in(folder) if (spec := _hides(name, folder)) is not None}
    if not hidden:
        return
    theirs = {name: sys.modules.pop(name) for name in _entries(hidden) if _is_from(sys.modules[name], folder)}
    path = sys.path
    sys.path = [entry for entry in path if os.path.realpath(entry or os.curdir) != os.path.realpath(folder)]
    try:
        _load_all()
    finally:
        sys.path = path
        for name in _entries(hidden):
            if _is_found(name, hidden):
                _kept.append(sys.modules.pop(name))
        sys.modules.update(theirs)


def received_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    """A spawned process's worker under a guard. Its modules are not there yet, and the parent's script's folder is on the path."""
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        load_apart(sys.path[0])
    guard = import_module("gradguard.runtime.guard").Guard
    worker: Any = import_module("gradguard.runtime.workers").GuardedWorker(guard, function, *arguments)
    return worker


def _modules_in(folder: str) -> Iterator[str]:
    """Names of the modules that stand in a folder."""
    try:
        entries = list(os.scandir(folder or os.curdir))
    except OSError:  # a zip file: no module in one hides another yet
        return
    suffixes = tuple(all_suffixes())
    for entry in entries:
        name = entry.name.partition(".")[0]
        if name.isidentifier() and (entry.name.endswith(suffixes) or "." not in entry.name):
            yield name


def _hides(name: str, folder: str) -> ModuleSpec | None:
    """The program's module, if Python would find it in `folder` before another that there is; None otherwise."""
    if name in _TWICE_FAILS | _AT_START or name in sys.builtin_module_names or FrozenImporter.find_spec(name) is not None:
        return None
    spec = PathFinder.find_spec(name, [folder or os.curdir])
    if spec is None or spec.loader is None:  # a plain folder is a module only where there is no other
        return None
    others = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != os.path.realpath(folder or os.curdir)]
    other = PathFinder.find_spec(name, others)
    return spec if other is not None and other.loader is not None and other.origin != spec.origin else None


def _entries(hidden: dict[str, ModuleSpec]) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in hidden]


def _is_from(module: ModuleType, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(file).startswith(os.path.join(os.path.realpath(folder or os.curdir), ""))


def _is_found(name: str, hidden: dict[str, ModuleSpec]) -> bool:
    """Whether the program's own package has this module. Where it has not, a late import inside the hidden package needs it."""
    top, *below = name.split(".")
    spec: ModuleSpec | None = hidden[top]
    for depth, _ in enumerate(below, 2):
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(".".join([top, *below][:depth]), spec.submodule_search_locations)
    return spec is not None


def _load_all() -> None:
    """All that gradguard may import later, so that nothing is looked for when the program's folder stands before it."""
    package = import_module("gradguard")
    for info in pkgutil.walk_packages(package.__path__, "gradguard."):
        if not info.name.startswith(("gradguard.examples", "gradguard.integrations", "gradguard.__main__")):
            import_module(info.name)
    import_module("gradguard.core.diagnosis").Diagnosis.model_json_schema()  # pydantic imports some of its own late
