"""Who keeps a tensor: the variable, attribute or container through which a value lives on from one step to the next.

Looked up through the garbage collector when a diagnosis is made, so that a value deep inside the user's own objects (a
distribution in an attribute, a deque in a memory bank) is found as well.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from gradguard.callsite import USER_FILES
from gradguard.evidence.frames import FrameView

_DEPTH = 6  # tensor <- tuple <- list <- dict <- attribute <- object, at most
_BREADTH = 24  # referrers followed of one object


@dataclass(frozen=True)
class Holding:
    """One way a tensor is held.

    Attributes:
        name: as written by the one who holds it: a variable, `self.bank`, or a module-level name.
        owner: the object whose attribute it is (None for variables).
        attribute: the owner's attribute, or the variable's name.
        frame: the frame whose variable it is, if it is one.
        through: names of the types of containers and objects between, outermost first: `("deque", "tuple")`.
        tensor: the tensor itself.
    """

    name: str
    attribute: str
    owner: Any
    frame: FrameType | None
    through: tuple[str, ...]
    tensor: torch.Tensor
    wrapper: Any = None  # the memoized function, where a cache of functools holds it

    @property
    def owner_type(self) -> str | None:
        return None if self.owner is None else type(self.owner).__name__


def live_tensors(nodes: Collection[Any]) -> list[torch.Tensor]:
    """Every tensor alive that one of these graph nodes made."""
    found = []
    wanted = set(nodes)
    for obj in gc.get_objects():
        if torch.Tensor not in getattr(type(obj), "__mro__", ()):
            continue
        try:
            node = obj.grad_fn
        except Exception:
            continue
        if node is not None and node in wanted:
            found.append(obj)
    return found


def holdings(tensor: torch.Tensor, frames: Sequence[FrameView], ignore: Collection[int] = ()) -> list[Holding]:
    """How this tensor is held by the user's program: variables of the given frames first, then attributes, then the rest.

    Args:
        ignore: ids of objects of gradguard's own that hold it, too.
    """
    views = {id(view.frame): view for view in frames}
    scopes = _scopes(frames)
    found: list[Holding] = []
    seen = {id(tensor), id(frames), *ignore}
    level: list[tuple[Any, tuple[str, ...]]] = [(tensor, ())]
    reached: list[tuple[Any, tuple[str, ...]]] = []
    for _ in range(_DEPTH):
        following: list[tuple[Any, tuple[str, ...]]] = []
        reached = level
        for obj, through in level:
            for holding in _variables(obj, through, tensor, frames):
                if not any(holding.name == known.name and holding.owner is known.owner for known in found):
                    found.append(holding)
            for referrer in _referrers(obj, seen):
                found_here = _attributes(referrer, obj, through, tensor, scopes)
                if found_here:
                    found.extend(found_here)
                elif isinstance(referrer, FrameType):
                    if id(referrer) not in views and USER_FILES[referrer.f_code.co_filename]:
                        found.extend(_in_frame(referrer, obj, through, tensor))
                    continue
                if isinstance(referrer, (ModuleType, type, FunctionType)) or id(referrer) in scopes:
                    continue
                if not isinstance(referrer, dict) or not found_here:
                    following.append((referrer, (type(referrer).__name__, *through)))
        level = following
        if found:
            wrappers = [obj for obj, _ in reached if "lru_cache" in type(obj).__name__]
            if wrappers:
                found = [replace(holding, wrapper=wrappers[0]) for holding in found]
            break  # the nearest holders name it best; what holds them in turn adds nothing
    return found


def _referrers(obj: Any, seen: set[int]) -> Iterator[Any]:
    count = 0
    for referrer in gc.get_referrers(obj):
        if id(referrer) in seen or _is_own(referrer):
            continue
        seen.add(id(referrer))
        count += 1
        if count > _BREADTH:
            return
        yield referrer


def _is_own(obj: Any) -> bool:
    """Lists, frames and generators of this very search."""
    if isinstance(obj, FrameType):
        return not USER_FILES[obj.f_code.co_filename]
    kind = type(obj)
    return kind.__module__.startswith("gradguard.") or kind.__name__ in ("list_iterator", "generator", "SavedTensor")


def _scopes(frames: Sequence[FrameView]) -> dict[int, str]:
    """ids of namespaces of modules: what stands in them is a variable."""
    return {id(view.globals): "module" for view in frames}


def _variables(obj: Any, through: tuple[str, ...], tensor: torch.Tensor, frames: Sequence[FrameView]) -> Iterator[Holding]:
    for view in frames:
        if not view.is_user:
            continue
        for name, value in view.locals.items():
            if value is obj and not name.startswith("__"):
                yield Holding(name, name, None, view.frame, through, tensor)


def _in_frame(frame: FrameType, obj: Any, through: tuple[str, ...], tensor: torch.Tensor) -> list[Holding]:
    return [Holding(name, name, None, frame, through, tensor) for name, value in FrameView(frame).locals.items() if value is obj]


def _attributes(referrer: Any, obj: Any, through: tuple[str, ...], tensor: torch.Tensor, scopes: dict[int, str]) -> list[Holding]:
    """What a referrer makes of it: an attribute of an instance, a module-level variable, a closure's variable."""
    if isinstance(referrer, dict):
        if id(referrer) in scopes or "__name__" in referrer and "__builtins__" in referrer:
            return [Holding(str(key), str(key), None, None, through, tensor) for key, value in list(referrer.items()) if value is obj and isinstance(key, str)
                    and not key.startswith("__")]  # fmt: skip
        for owner in gc.get_referrers(referrer):
            if isinstance(owner, type) and owner.__dict__.get("__module__") == referrer.get("__module__") and _is_users(owner):
                return [Holding(f"{owner.__name__}.{key}", key, owner, None, through, tensor) for key, value in list(referrer.items()) if value is obj]
            if getattr(owner, "__dict__", None) is referrer and not isinstance(owner, (FrameType, dict)):
                return _of_instance(owner, referrer, obj, through, tensor)
        return []
    if isinstance(referrer, CellType):
        for function in gc.get_referrers(referrer):
            if isinstance(function, tuple):
                for holder in gc.get_referrers(function):
                    if isinstance(holder, FunctionType) and holder.__closure__ is function:
                        names = [name for name, cell in zip(holder.__code__.co_freevars, function, strict=False) if cell is referrer]
                        return [Holding(name, name, None, None, through, tensor) for name in names]
        return []
    if isinstance(referrer, (list, tuple, set, frozenset, FrameType, FunctionType, MethodType, torch.Tensor)):
        return []
    attributes = getattr(referrer, "__dict__", None)
    if isinstance(attributes, dict):
        return _of_instance(referrer, attributes, obj, through, tensor)
    slots = [name for kind in type(referrer).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    return [Holding(f"self.{name}", name, referrer, None, through, tensor) for name in slots if getattr(referrer, name, None) is obj]


def _of_instance(owner: Any, attributes: dict[str, Any], obj: Any, through: tuple[str, ...], tensor: torch.Tensor) -> list[Holding]:
    """An attribute of the user's object; an object of a library's is itself looked for in turn."""
    names = [name for name, value in list(attributes.items()) if value is obj]
    if not names or not _is_users(owner):
        return []
    kind = owner.__name__ if isinstance(owner, (type, ModuleType)) else "self"
    if names in (["_buffers"], ["_parameters"]) and isinstance(obj, dict):
        names = [key for key, value in obj.items() if value is tensor]
        through = through[1:]
    return [Holding(f"{kind}.{name}", name, owner, None, through, tensor) for name in names]


def _is_users(owner: Any) -> bool:
    """Whether the object is of a class (or is a class or module) that the user wrote."""
    if isinstance(owner, ModuleType):
        file = getattr(owner, "__file__", None)
        return file is None or USER_FILES[file]
    kind = owner if isinstance(owner, type) else type(owner)
    for member in vars(kind).values():
        code = getattr(getattr(member, "__func__", None) or getattr(member, "fget", None) or getattr(member, "func", None) or member, "__code__", None)
        if code is not None and not code.co_filename.startswith("<"):
            return USER_FILES[code.co_filename]
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" if file is None else USER_FILES[file]
