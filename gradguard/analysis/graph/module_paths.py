"""Which module made a graph node: told by the parameters that go into it, and by the `forward` that its line stands in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from gradguard.analysis.graph.walk import is_accumulate
from gradguard.analysis.live.names import Names
from gradguard.core.callsite import CallSite
from gradguard.core.safe_read import function_code, in_class, named_modules, store_of

Path = tuple[str, ...]
RESHAPED = frozenset(f"{kind}Backward0" for kind in ("T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze", "ToCopy"))


def leaf_behind(source: Any) -> Any:
    """The leaf that a source of a node is, or that it only gives another shape: a transposed weight; None for any other."""
    if type(source).__name__ in RESHAPED:
        source = next((each for each, _ in source.next_functions if each is not None), None)
    return getattr(source, "variable", None) if source is not None and is_accumulate(source) else None


class ModulePaths:
    """The modules alive, by their parameters and by the code of their `forward`."""

    def __init__(self, names: Names) -> None:
        self._owner: dict[int, Path | None] = {}  # of a parameter, by id; None where modules share it
        self._forwards: dict[CodeType, dict[Path, None]] = {}
        seen: set[int] = set()
        for variable, root in names.modules:
            for inner, module in named_modules(root):
                if id(module) in seen:
                    continue
                seen.add(id(module))
                path = tuple(part for part in (variable or "", *inner.split(".")) if part) or (type(module).__name__,)
                for parameter in store_of(module, "_parameters").values():
                    self._owner[id(parameter)] = None if id(parameter) in self._owner else path
                code = function_code(in_class(type(module), "forward"))
                if code is not None:
                    self._forwards.setdefault(code, {})[path] = None

    def of(self, nodes: Sequence[Any], sites: Mapping[Any, CallSite]) -> tuple[dict[Any, Path], dict[Any, Path]]:
        """The modules of nodes, given in forward order: those that are evident; and of all nodes, what to group them by.

        A node without evidence stands between two that have some: it is grouped with what both have in common.
        """
        evident = self._by_parameters(nodes)
        before = _carried(nodes, evident)
        after = _carried(nodes[::-1], evident)
        for node in nodes:
            site = sites.get(node)
            paths = None if site is None or node in evident else self._forwards.get(site.code)
            if paths:
                around = [path[:i] for path in (before.get(node, ()), after.get(node, ())) for i in range(len(path), 0, -1)]
                path = next(iter(paths)) if len(paths) == 1 else next((each for each in around if each in paths), ())
                if path:
                    evident[node] = path
        before, after = _carried(nodes, evident), _carried(nodes[::-1], evident)
        groups = {node: evident.get(node) or _common(before.get(node, ()), after.get(node, ())) for node in nodes}
        return evident, groups

    def _by_parameters(self, nodes: Sequence[Any]) -> dict[Any, Path]:
        found: dict[Any, Path] = {}
        for node in nodes:
            leaves = [leaf for source, _ in node.next_functions if (leaf := leaf_behind(source)) is not None]
            owners = {self._owner[id(leaf)] for leaf in leaves if id(leaf) in self._owner}
            kind = type(node).__name__
            if len(owners) != 1 or (len(node.next_functions) == 1 and not kind.startswith("Embedding") and kind not in RESHAPED):
                continue  # a penalty on the weights, say
            (owner,) = owners
            if owner is not None:
                found[node] = owner
        return found


def _carried(nodes: Sequence[Any], evident: Mapping[Any, Path]) -> dict[Any, Path]:
    """Of each node, the module of the last one before it that has one."""
    found: dict[Any, Path] = {}
    last: Path = ()
    for node in nodes:
        last = evident.get(node, last)
        if last:
            found[node] = last
    return found


def _common(one: Path, other: Path) -> Path:
    most = min(len(one), len(other))
    return one[: next((i for i in range(most) if one[i] != other[i]), most)]
