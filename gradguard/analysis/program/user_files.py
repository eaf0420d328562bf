"""Which modules and which of the user's files take part in an incident.

A process holds more than the step that failed: models of earlier notebook cells, a second network, other tests. What is read
from source only counts when it is read in files that can have run; the failed graph's leaves and the frames tell which those are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import nn

from gradguard.analysis.graph.walk import leaves
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.names import Names
from gradguard.analysis.program.syntax import Source, load
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import attributes, class_attributes, code_of_member, modules_in


def roots_taking_part(names: Names, nodes: Iterable[Any]) -> list[nn.Module]:
    """The root modules of an incident: those in the frames' reach, and those with a parameter among the leaves of the graph.

    Every root alive where there is no graph to tell by and the frames have none.
    """
    owners: dict[int, None] = {}
    found_leaves = leaves(nodes)
    for leaf in found_leaves:
        state = names.state(leaf)
        if state is not None:
            owners.setdefault(id(state.root))
    found = [root for variable, root in names.modules if variable is not None or id(root) in owners or root in names.models]
    return found if found or found_leaves else [root for _, root in names.modules]


def files_of(frames: Iterable[FrameView], roots: Iterable[nn.Module]) -> list[str]:
    """The user's files: those of the frames' code, innermost first, then those the modules' classes are written in."""
    files: dict[str, None] = {}
    for view in frames:
        files.setdefault(view.frame.f_code.co_filename)
    kinds = dict.fromkeys(base for root in roots for module in modules_in(root) for base in type(module).__mro__)
    for kind in kinds:
        file = file_of_class(kind)
        if file and USER_FILES[file]:
            files.setdefault(file)
    return list(files)


def file_of_class(kind: type) -> str | None:
    """The file a class was written in: that of its methods' code (a notebook cell or exec'd code has no module file)."""
    for value in class_attributes(kind).values():
        code = code_of_member(value)
        if code is not None and str(getattr(code, "co_qualname", kind.__qualname__)).startswith(kind.__qualname__):
            return code.co_filename
    return attributes(sys.modules.get(kind.__module__)).get("__file__")


# Modules that are not the user's, by name: thousands in a large process, which are asked for once.
_others: dict[str, int] = {}


def loaded_files() -> tuple[str, ...]:
    """The user's files that modules were imported from."""
    files: dict[str, None] = {}
    others = _others
    for name, module in list(sys.modules.items()):
        if others.get(name) == id(module):
            continue
        # not getattr(): modules that load lazily run code for every name they are asked for, which takes ten times as long
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and file.endswith(".py") and USER_FILES[file]:
            files[file] = None
        elif name != "__main__":  # which gets its file late
            others[name] = id(module)
    return tuple(files)


def sources_of(files: Iterable[str]) -> list[Source]:
    """The files that could be read and parsed."""
    found = (load(file) for file in files)
    return [source for source in found if source is not None and source.tree is not None]
