"""Which module a parameter belongs to, also where the module does not know of it: kept in a list, or a plain tensor."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gradguard.analysis.live.names import Names
from gradguard.core.safe_read import UNKNOWN, attributes, elements, in_class, named_modules, own_dict, pairs

_MOST = 512  # items of one container
_SHORT = 5  # operations between a parameter and the attribute computed from it


@dataclass(frozen=True)
class Owner:
    """Where a parameter is found.

    Attributes:
        path: as a user would write it, such as `model.convs[0].weight`.
        module: the module that has it as an attribute (registered or not), or holds the container its module is in.
        attribute: that module's attribute.
        root: the outermost module.
        registered: whether `root.parameters()` gives it.
        variable: what the root is called, where known.
        computed: whether the attribute is what was computed from the parameter, which nothing else holds.
    """

    path: str
    module: nn.Module
    attribute: str
    root: nn.Module
    registered: bool
    variable: str | None
    computed: bool = False


class Owners:
    """Looks for owners among all modules alive."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._plain: dict[int, tuple[str, nn.Module, nn.Module, str | None, str]] = {}
        self._modules: dict[int, tuple[str, nn.Module, nn.Module, str | None, str]] = {}
        self._behind: dict[int, tuple[str, nn.Module, nn.Module, str | None, str]] = {}
        for variable, root in names.modules:
            for path, module in named_modules(root):
                for key, value in attributes(module).items():
                    if key in ("_parameters", "_buffers", "_modules") or key.startswith("__"):
                        continue
                    for name, item in _items(key, value):
                        full = ".".join(part for part in (variable, path, name) if part)
                        table = self._modules if isinstance(item, nn.Module) else self._plain
                        table.setdefault(id(item), (full, module, root, variable, key))
                        parameter = None if isinstance(item, nn.Module) else _behind(item)
                        if parameter is not None:
                            self._behind.setdefault(id(parameter), (full, module, root, variable, key))

    def of(self, parameter: torch.Tensor) -> Owner | None:
        """The owner; None for tensors that are no module's."""
        plain = self._plain.get(id(parameter))
        if plain is not None:
            full, module, root, variable, key = plain
            return Owner(full, module, key, root, False, variable)
        state = self._names.state(parameter)
        if state is None:
            behind = self._behind.get(id(parameter))
            if behind is None:
                return None
            full, module, root, variable, key = behind
            return Owner(full, module, key, root, False, variable, computed=True)
        held = self._modules.get(id(state.root))
        if held is not None and held[1] is not state.root:
            full, module, root, variable, key = held
            return Owner(f"{full}.{state.path}", module, key, root, False, variable)
        return Owner(state.full, state.owner, state.path.rpartition(".")[2], state.root, True, state.variable)


def _items(key: str, value: Any) -> list[tuple[str, Any]]:
    """Modules and leaves in a plain attribute, two levels deep."""
    if isinstance(value, nn.Module) or (isinstance(value, torch.Tensor) and value.requires_grad):
        return [(key, value)]
    if isinstance(value, (list, tuple)) and len(held := elements(value, _MOST + 1)) <= _MOST:
        return [found for i, item in enumerate(held) for found in _items(f"{key}[{i}]", item)]
    if isinstance(value, dict) and len(named := pairs(value, _MOST + 1)) <= _MOST:
        return [found for name, item in named if type(name) in (str, int) for found in _items(f"{key}[{name!r}]", item)]
    if is_record(value):
        return [found for name, item in attributes(value).items() for found in _items(f"{key}.{name}", item)]
    return []


def _behind(tensor: torch.Tensor) -> nn.Parameter | None:
    """The one parameter that an attribute was made from, by an operation or two: `nn.Parameter(...).unsqueeze(0)`."""
    nodes = [tensor.grad_fn] if tensor.grad_fn is not None else []
    for _ in range(_SHORT):
        if len(nodes) != 1 or nodes[0] is None:
            return None
        leaf = getattr(nodes[0], "variable", None)
        if leaf is not None:
            return leaf if isinstance(leaf, nn.Parameter) else None
        nodes = [node for node, _ in nodes[0].next_functions if node is not None]
    return None


def is_record(value: Any) -> bool:
    """Whether it is a dataclass or a namespace: it holds things by name, and no module knows of them."""
    return own_dict(value) is not None and (
        in_class(type(value), "__dataclass_fields__") is not UNKNOWN or isinstance(value, SimpleNamespace)
    )
