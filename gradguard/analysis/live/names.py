"""Names for tensors, parameters, modules and optimizers, as the user would write them.

Looked up when a diagnosis is made: in the variables of the frames around the incident, in the attributes of the objects
there, and in every module alive (`gc`), so that nothing has to be handed to the guard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gradguard.analysis.live.alive_tensors import alive
from gradguard.analysis.live.frames import FrameView
from gradguard.core.callsite import USER_FILES
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import (
    UNKNOWN,
    attributes,
    buffers_in,
    elements,
    in_class,
    named_modules,
    own_dict,
    pairs,
    parameters_in,
    store_of,
)
from gradguard.torch_compat.private_api import storage_key

_LITERALS = (str, int, float, bool, bytes, type(None), torch.device, torch.dtype)
_MAX_ITEMS = 256  # of one container; names deeper in are of no use to a reader


@dataclass(frozen=True)
class StateName:
    """A parameter or buffer of a module."""

    path: str  # dotted within its root module, such as "encoder.0.weight"
    root: nn.Module
    owner: nn.Module  # the module that holds it directly
    variable: str | None  # what the root module is called in the frames, such as "model"
    is_buffer: bool

    @property
    def full(self) -> str:
        """`model.encoder.0.weight` where the variable is known, else the dotted path."""
        return f"{self.variable}.{self.path}" if self.variable else self.path


class Names:
    """Finds names around one incident.

    Args:
        frames: innermost first.
        models: modules given to the guard, preferred as roots of dotted names.
    """

    def __init__(self, frames: Sequence[FrameView], models: Sequence[nn.Module] = ()) -> None:
        self.frames = [view for view in frames if view.is_user] or list(frames)
        self.models = list(models)

    # -- variables ----------------------------------------------------------------------------------------------------

    @cached_property
    def bindings(self) -> list[tuple[str, Any]]:
        """Everything nameable: (expression, object), innermost frame first, variables before attributes before items."""
        found: list[tuple[str, Any]] = []
        seen_scopes: set[int] = set()
        for view in self.frames:
            variables = [(name, value) for name, value in view.locals.items() if not name.startswith("__") and value is not UNKNOWN]
            if view.scope not in seen_scopes and not view.is_module_level:
                referenced = set(view.frame.f_code.co_names)
                variables += [(name, view.globals[name]) for name in referenced if view.globals.get(name, UNKNOWN) is not UNKNOWN]
            if view.is_module_level:
                seen_scopes.add(view.scope)
            found.extend(variables)
            for name, value in variables:
                found.extend(_inside(name, value))
        for view in self.frames:  # the rest of the module-level names, last
            if view.scope not in seen_scopes:
                seen_scopes.add(view.scope)
                rest = [(name, value) for name, value in view.globals.items() if not name.startswith("__") and value is not UNKNOWN]
                found.extend(rest)
                for name, value in rest:
                    found.extend(_inside(name, value))
        return found

    def tensor_bindings(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every named tensor around the incident."""
        for name, value in self.bindings:
            if isinstance(value, torch.Tensor):
                yield name, value

    def of(self, obj: Any) -> str | None:
        """The name of this very object."""
        return next((name for name, value in self.bindings if value is obj), None)

    def of_node(self, node: Any, output: int | None = None) -> str | None:
        """The name of a tensor that this graph node made."""
        for name, tensor in self.tensor_bindings():
            if (
                not _is_wrapped(tensor)
                and tensor.grad_fn is not None
                and tensor.grad_fn is node
                and (output is None or tensor.output_nr == output)
            ):
                return name
        return None

    def of_storage(self, key: int | None) -> list[str]:
        """The names of the tensors that live in this memory."""
        if key is None:
            return []
        names = []
        for name, tensor in self.tensor_bindings():
            if storage_key(tensor) == key and name not in names:
                names.append(name)
        return names

    # -- modules ------------------------------------------------------------------------------------------------------

    @cached_property
    def modules(self) -> list[tuple[str | None, nn.Module]]:
        """Root modules with their variable names: the guard's, those in the frames, then every other one alive."""
        roots: list[tuple[str | None, nn.Module]] = []
        known: set[int] = set()

        def add(name: str | None, module: nn.Module) -> None:
            if id(module) not in known:
                known.add(id(module))
                roots.append((name, module))

        named = [(name, value) for name, value in self.bindings if isinstance(value, nn.Module)]
        for model in self.models:
            add(next((name for name, value in named if value is model), None), model)
        owners = [obj for obj in alive(nn.Module) if "_modules" in obj.__dict__]
        children = {id(child) for module in owners for child in store_of(module, "_modules").values()}
        tops = [module for module in owners if id(module) not in children]
        for name, module in named:
            if id(module) not in children:
                add(name, module)
        for module in tops:
            add(None, module)
        for name, module in named:  # a submodule held in a variable is a poorer root, but better than none
            add(name, module)
        return roots

    @cached_property
    def _state(self) -> tuple[dict[int, StateName], dict[int, StateName]]:
        by_id: dict[int, StateName] = {}
        by_storage: dict[int, StateName] = {}
        for variable, root in self.modules:
            for prefix, owner in named_modules(root):
                tensors = [(name, value, False) for name, value in store_of(owner, "_parameters").items()]
                tensors += [(name, value, True) for name, value in store_of(owner, "_buffers").items()]
                for name, value, is_buffer in tensors:
                    entry = StateName(f"{prefix}.{name}" if prefix else name, root, owner, variable, is_buffer)
                    by_id.setdefault(id(value), entry)
                    key = storage_key(value)
                    if key is not None:
                        by_storage.setdefault(key, entry)
        return by_id, by_storage

    def state(self, tensor: torch.Tensor | None = None, storage: int | None = None) -> StateName | None:
        """The parameter or buffer that this tensor is, or that lives in this memory."""
        by_id, by_storage = self._state
        if tensor is not None:
            found = by_id.get(id(tensor))
            if found is not None:
                return found
            storage = storage_key(tensor)
        return by_storage.get(storage) if storage is not None else None

    def leaf(self, tensor: torch.Tensor) -> str | None:
        """A leaf's path within its module, or the variable that holds it."""
        state = self.state(tensor)
        return state.full if state is not None else self.of(tensor)

    def is_a_modules(self, tensor: torch.Tensor) -> bool:
        """Whether this very object is a module's parameter or buffer, not only on the memory of one."""
        return id(tensor) in self._state[0]

    def states(self) -> Iterator[torch.Tensor]:
        """The parameters and buffers of every module."""
        for _, root in self.modules:
            yield from parameters_in(root)
            yield from buffers_in(root)

    def module_path(self, module: nn.Module) -> str | None:
        """Where a module sits, such as `model.blocks.0.act` or `blocks.0.act`."""
        for variable, root in self.modules:
            for path, child in named_modules(root):
                if child is module:
                    return ".".join(part for part in (variable, path) if part) or None
        return None

    def optimizer(self, optimizer: Any) -> str:
        """The optimizer by its variable name, or by its type."""
        return self.optimizer_variable(optimizer) or type(optimizer).__name__

    def optimizer_variable(self, optimizer: Any) -> str | None:
        """The variable that is stepped: of an optimizer inside another (Lightning's, Accelerate's), the outer one."""
        name = self.of(optimizer)
        outer = (name or "").rpartition(".")[0]
        holder = next((value for other, value in self.bindings if other == outer), None) if outer else None
        wraps = all(in_class(type(holder), method) is not UNKNOWN for method in ("step", "zero_grad"))
        return outer if wraps else name

    def optimizers(self) -> list[Any]:
        """Every optimizer alive."""
        return alive(torch.optim.Optimizer)

    def tensor(self, tensor: torch.Tensor) -> str | None:
        """The best name: a variable, a parameter or buffer, a variable on the same node."""
        name = self.of(tensor)
        if name is not None:
            return name
        state = self.state(tensor)
        if state is not None:
            return state.full
        node = tensor.grad_fn
        return self.of_node(node, tensor.output_nr) if node is not None else None


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The items and attributes one level in, of containers and of the user's own objects."""
    if isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(elements(value, _MAX_ITEMS)):
            yield f"{name}[{i}]", item
    elif isinstance(value, dict):
        for key, item in pairs(value, _MAX_ITEMS):
            text = _key(key)
            if text is not None:
                yield f"{name}[{text}]", item
    elif isinstance(value, nn.Module):
        yield from _attributes(name, value)
        for key, item in store_of(value, "_modules").items():
            if name == "self":
                yield f"{name}.{key}", item
    elif isinstance(value, ModuleType):  # what a library's holds is nobody's variable, and some of it warns when it is asked
        if USER_FILES[attributes(value).get("__file__") or "<frozen >"]:
            yield from _attributes(name, value)
    elif own_dict(value) is not None and not isinstance(value, torch.Tensor) and not callable(value):
        yield from _attributes(name, value)


def _key(key: Any) -> str | None:
    """A dictionary's key as code; None for objects (an optimizer's state has parameters for keys), whose repr is none and may be long."""
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{attributes(key).get('_name_')}"
    if type(key) in (tuple, frozenset) and len(key) <= 4:
        return repr(key) if all(type(each) in _LITERALS for each in key) else None
    return repr(key) if type(key) in _LITERALS else None


def _attributes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    for key, item in list(attributes(value).items())[:_MAX_ITEMS]:
        if key in ("_parameters", "_buffers"):
            for inner, tensor in pairs(item):
                yield f"{name}.{inner}", tensor
        elif not key.startswith("__") and key != "_modules" and item is not UNKNOWN:
            yield f"{name}.{key}", item
            if isinstance(item, (list, tuple, dict, deque)):
                yield from _inside(f"{name}.{key}", item)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is None
    except internal_error():
        return True


def as_code(path: str) -> str:
    """A module's dotted path as it is written in a program: `net[1].bn` of `net.1.bn`."""
    return "".join(f"[{part}]" if part.isdigit() and i else f".{part}" if i else part for i, part in enumerate(path.split(".")))


def short_list(names: Iterable[str], most: int = 5) -> str:
    """`a, b, c and 12 more`."""
    items = list(names)
    if len(items) <= most:
        return ", ".join(f"`{item}`" for item in items)
    return ", ".join(f"`{item}`" for item in items[:most]) + f" and {len(items) - most} more"
