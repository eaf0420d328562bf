"""Who keeps a tensor: the variable, attribute or container through which a value lives on from one step to the next.

Looked up through the garbage collector when a diagnosis is made, so that a value deep inside the user's own objects (a
distribution in an attribute, a deque in a memory bank) is found as well.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CellType, FrameType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from gradguard.analysis.live.frames import FrameView
from gradguard.core.callsite import USER_FILES
from gradguard.core.safe_read import attributes, class_attributes, code_of_member, is_quiet, own_dict, peek

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
        return None if self.owner is None or isinstance(self.owner, FunctionType) else type(self.owner).__name__


def holdings(tensors: Sequence[torch.Tensor], frames: Sequence[FrameView], ignore: Collection[int] = ()) -> list[list[Holding]]:
    """How each of these tensors is held by the user's program: variables of the given frames first, then attributes, then the rest.

    Args:
        ignore: ids of objects of gradguard's own that hold them, too.
    """
    surroundings = _Surroundings(frames, {id(view.frame) for view in frames}, {view.scope for view in frames})
    searches = [_Search(tensor, {id(tensor), id(tensors), id(frames), *ignore}) for tensor in tensors]
    for _ in range(_DEPTH):  # in step with each other, since each look at the heap costs some 50 ms however many objects it is for
        going_on = [search for search in searches if search.level and not search.found]
        referrers = _referrers([step.obj for search in going_on for step in search.level])
        for search in going_on:
            search.go_on(referrers, surroundings)
        del referrers  # it would itself refer to the objects looked for next
    return [search.found for search in searches]


def held_by_objects(tensors: Sequence[torch.Tensor], ignore: Collection[int]) -> list[torch.Tensor]:
    """Those of the tensors that some object of the program's holds: not by the graph alone, which keeps their Python side alive, too."""
    wanted = {id(tensor) for tensor in tensors}
    held: set[int] = set()
    for referrer in gc.get_referrers(*tensors) if tensors else ():
        if id(referrer) not in ignore and referrer is not tensors and is_quiet(referrer) and not _is_own(referrer):
            held |= wanted & {id(obj) for obj in gc.get_referents(referrer)}
    return [tensor for tensor in tensors if id(tensor) in held]


class _Step(NamedTuple):
    """An object on the way from the tensor to who holds it."""

    obj: Any
    through: tuple[str, ...]
    inner: Any  # what it holds in turn


class _Surroundings(NamedTuple):
    """The frames whose variables are looked at first, the ids of these frames, and those of their dicts of globals."""

    frames: Sequence[FrameView]
    looked_at: set[int]
    scopes: set[int]


class _Search:
    """From a tensor outwards, one level of referrers a time, until somebody has a name for what is held."""

    def __init__(self, tensor: torch.Tensor, seen: set[int]) -> None:
        self.tensor = tensor
        self.seen = seen
        self.level = [_Step(tensor, (), None)]
        self.found: list[Holding] = []

    def go_on(self, referrers: dict[int, list[Any]], around: _Surroundings) -> None:
        """One level further out; the nearest holders name it best, so that further ones are looked for only where there are none."""
        tensor, found, following = self.tensor, self.found, []
        for step in self.level:
            for holding in _variables(step, tensor, around.frames):
                if not any((holding.name, holding.frame) == (known.name, known.frame) and holding.owner is known.owner for known in found):
                    found.append(holding)
        for referrer, step in self._next(referrers):
            here = _attributes(referrer, step, tensor, around.scopes)
            found.extend(here)
            frame = referrer.gi_frame if isinstance(referrer, GeneratorType) else referrer
            if isinstance(frame, FrameType):
                if id(frame) not in around.looked_at and USER_FILES[frame.f_code.co_filename]:
                    found.extend(_in_frame(frame, step, tensor))
            elif (
                not here and not isinstance(referrer, (ModuleType, type, FunctionType, GeneratorType)) and id(referrer) not in around.scopes
            ):
                # a library's object: look further, its dict is no container
                through = step.through[1:] if own_dict(referrer) is step.obj else step.through
                following.append(_Step(referrer, (type(referrer).__name__, *through), step.obj))
        near = [obj for step in self.level for obj in (step.obj, step.inner)]  # a method's wrapper stands in its class's dict
        wrapper = next((obj for obj in near if "lru_cache" in type(obj).__name__), None)
        if wrapper is not None:
            found[:] = [replace(holding, wrapper=wrapper) for holding in found]
        self.level = following

    def _next(self, referrers: dict[int, list[Any]]) -> Iterator[tuple[Any, _Step]]:
        count = 0
        for step in self.level:
            for referrer in referrers.get(id(step.obj), ()):
                if id(referrer) not in self.seen:
                    self.seen.add(id(referrer))
                    count += 1
                    if count > _BREADTH * len(self.level):
                        return
                    yield referrer, step


def _referrers(objects: list[Any]) -> dict[int, list[Any]]:
    """What refers to each of the objects, by its id; one pass over the heap for all of them."""
    wanted = {id(obj) for obj in objects}
    found: dict[int, list[Any]] = {}
    for referrer in gc.get_referrers(*objects) if objects else ():
        if referrer is not objects and is_quiet(referrer) and not _is_own(referrer):
            for key in wanted.intersection(map(id, gc.get_referents(referrer))):
                found.setdefault(key, []).append(referrer)
    return found


def _is_own(obj: Any) -> bool:
    """Lists, frames and generators of this very search."""
    if isinstance(obj, FrameType):
        return not USER_FILES[obj.f_code.co_filename]
    if isinstance(obj, GeneratorType):
        return not USER_FILES[obj.gi_code.co_filename]
    kind = type(obj)
    return kind.__module__.startswith("gradguard.") or kind.__name__ in ("list_iterator", "SavedTensor")


def _variables(step: _Step, tensor: torch.Tensor, frames: Sequence[FrameView]) -> Iterator[Holding]:
    for view in frames:
        if not view.is_user:
            continue
        for name, value in view.locals.items():
            if value is step.obj and not name.startswith("__"):
                yield Holding(name, name, None, view.frame, step.through, tensor)


def _in_frame(frame: FrameType, step: _Step, tensor: torch.Tensor) -> list[Holding]:
    return [Holding(name, name, None, frame, step.through, tensor) for name, value in FrameView(frame).locals.items() if value is step.obj]


def _attributes(referrer: Any, step: _Step, tensor: torch.Tensor, scopes: set[int]) -> list[Holding]:
    """What a referrer makes of it: an attribute of an instance or class, a module-level variable, a closure's variable."""
    obj, through = step.obj, step.through
    if isinstance(referrer, dict):
        if id(referrer) in scopes or ("__name__" in referrer and "__builtins__" in referrer):
            names = [key for key, value in list(dict.items(referrer)) if value is obj and type(key) is str and not key.startswith("__")]
            return [Holding(name, name, None, None, through, tensor) for name in names]
        return []  # an instance's own dict, or a container: who refers to it tells, one step on
    if isinstance(referrer, type):
        if isinstance(obj, dict) and _is_users(referrer):
            names = [key for key, value in list(dict.items(obj)) if value is step.inner]
            return [Holding(f"{referrer.__name__}.{name}", name, referrer, None, through[1:], tensor) for name in names]
        return []
    if isinstance(referrer, FunctionType):
        return _of_function(referrer, step, tensor)
    if isinstance(referrer, CellType):
        return _in_closure(referrer, through, tensor)
    if isinstance(referrer, (list, tuple, set, frozenset, FrameType, MethodType, torch.Tensor)):
        return []
    held = own_dict(referrer)
    if held is not None:
        if held is obj:
            return _of_instance(referrer, held, step.inner, through[1:], tensor)
        return _of_instance(referrer, held, obj, through, tensor)
    slots = [name for kind in type(referrer).__mro__ for name, slot in vars(kind).items() if isinstance(slot, MemberDescriptorType)]
    return [Holding(f"self.{name}", name, referrer, None, through, tensor) for name in slots if peek(referrer, name) is obj]


def _of_function(function: FunctionType, step: _Step, tensor: torch.Tensor) -> list[Holding]:
    """An attribute of a function of the user's, as decorators keep them: by the name that its own code has for it."""
    kept, written = vars(function), function.__code__.co_name
    if kept is not step.obj or not USER_FILES[function.__code__.co_filename]:
        return []
    names = [name for name, value in kept.items() if value is step.inner]
    return [Holding(f"{written}.{name}", name, function, None, step.through[1:], tensor) for name in names]


def _in_closure(cell: CellType, through: tuple[str, ...], tensor: torch.Tensor) -> list[Holding]:
    for closure in gc.get_referrers(cell):
        if isinstance(closure, tuple):
            for function in gc.get_referrers(closure):
                if isinstance(function, FunctionType) and function.__closure__ is closure:
                    names = [name for name, other in zip(function.__code__.co_freevars, closure, strict=False) if other is cell]
                    return [Holding(name, name, None, None, through, tensor) for name in names]
    return []


def _of_instance(owner: Any, held: dict[str, Any], obj: Any, through: tuple[str, ...], tensor: torch.Tensor) -> list[Holding]:
    """An attribute of the user's object; an object of a library's is itself looked for in turn."""
    names = [name for name, value in list(dict.items(held)) if value is obj and type(name) is str]
    if not names or not _is_users(owner):
        return []
    kind = owner.__name__ if isinstance(owner, (type, ModuleType)) else "self"
    if names in (["_buffers"], ["_parameters"]) and isinstance(obj, dict):
        names = [key for key, value in dict.items(obj) if value is tensor]
        through = through[1:]
    return [Holding(f"{kind}.{name}", name, owner, None, through, tensor) for name in names]


def _is_users(owner: Any) -> bool:
    """Whether the object is of a class (or is a class or module) that the user wrote."""
    if isinstance(owner, ModuleType):
        file = attributes(owner).get("__file__")
        return file is None or USER_FILES[file]
    kind = owner if isinstance(owner, type) else type(owner)
    for member in class_attributes(kind).values():
        code = code_of_member(member)
        if code is not None and not code.co_filename.startswith("<"):
            return USER_FILES[code.co_filename]
    file = attributes(sys.modules.get(kind.__module__)).get("__file__")
    return kind.__module__ == "__main__" if file is None else USER_FILES[file]
