"""Reads the user's objects without running a line of the user's code.

Whatever looks at an object of the program's does so through here: dictionaries, slots and the stores of modules are read; properties,
other descriptors, `__getattr__`, overridden methods of containers, comparisons and representations are not. Where only running
something could tell, the answer is UNKNOWN.

Some objects run code on the most innocent questions: `isinstance()` and `vars()` ask for `__class__` and `__dict__`, which a class may
compute (proxies, mocks). Such an object is never handed out; UNKNOWN stands in its place. Of everything else that comes from here, the
type, `isinstance()` and `vars()` may be asked.
"""

from __future__ import annotations

import ctypes
import dis
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from functools import cached_property, partialmethod
from itertools import islice
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn


class _Unknown:
    """Stands for what cannot be read."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<unknown>"


UNKNOWN: Any = _Unknown()
_mro = type.__dict__["__mro__"].__get__  # not `kind.__mro__`: a metaclass may have its own
_names = type.__dict__["__dict__"].__get__
name_of_class = type.__dict__["__name__"].__get__
_CLASS = object.__dict__["__class__"]
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_SHORT = 80  # bytes of the code of a property that gives back something stored
_STORES = ("_parameters", "_buffers", "_modules")
_PYTHON: tuple[int, ...] = sys.version_info[:2]
_OPTIMIZED = 0x1  # of a code object's flags: its variables are in the frame, not in a dictionary


def in_class(kind: type, name: str) -> Any:
    """What a class or its bases have under a name, as it stands there; UNKNOWN where they have nothing."""
    for base in _mro(kind):
        found = _names(base).get(name, UNKNOWN)
        if found is not UNKNOWN:
            return found
    return UNKNOWN


def _answers_itself(kind: type) -> bool:
    """Whether Python answers for the objects of a class when it is asked for their attributes, their dictionary and their class."""
    return (
        in_class(kind, "__class__") is _CLASS
        and isinstance(in_class(kind, "__getattribute__"), WrapperDescriptorType)
        and (in_class(kind, "__dict__") is UNKNOWN or isinstance(in_class(kind, "__dict__"), (GetSetDescriptorType, MemberDescriptorType)))
        and all(kind is not each for each in _PROXIES)
    )


def _is_plain(metaclass: type) -> bool:
    """Whether classes of a metaclass can be looked at, compared and be keys of dictionaries."""
    return _answers_itself(metaclass) and all(in_class(metaclass, name) is getattr(type, name) for name in ("__eq__", "__hash__"))


def is_quiet(value: Any) -> bool:
    """Whether nothing of the user's runs when an object is asked for its class and its own dictionary."""
    kind = type(value)
    return kind is type or (_answers_itself(kind) and (type(kind) is type or _is_plain(type(kind))))


def unless_loud(value: Any) -> Any:
    """The object, or UNKNOWN where merely looking at it may run something."""
    return value if is_quiet(value) else UNKNOWN


def own_dict(value: Any) -> dict[str, Any] | None:
    """The very dictionary that an object keeps its attributes in; None where it has none, and for classes."""
    if not is_quiet(value) or isinstance(value, type):
        return None
    descriptor = in_class(type(value), "__dict__")
    try:
        found = None if descriptor is UNKNOWN else descriptor.__get__(value, type(value))
    except AttributeError:  # a slot that is empty
        return None
    return found if isinstance(found, dict) else None


def namespace(names: Any) -> dict[str, Any]:
    """A copy of a dictionary of names."""
    return {key: unless_loud(value) for key, value in dict.items(names) if type(key) is str} if isinstance(names, dict) else {}


def attributes(value: Any) -> dict[str, Any]:
    """What an object's own dictionary holds, copied."""
    return namespace(own_dict(value))


def class_attributes(kind: type) -> dict[str, Any]:
    """What stands in the body of a class, copied; functions, properties and other descriptors as they are."""
    return {key: unless_loud(value) for key, value in _names(kind).items() if type(key) is str} if is_quiet(kind) else {}


def code_of_member(member: Any) -> CodeType | None:
    """The code of what stands in the body of a class: of a function, a property, or what a decorator of Python's own wraps."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    elif isinstance(member, (cached_property, partialmethod)):
        member = member.func
    return function_code(member)


def function_code(function: Any) -> CodeType | None:
    """The code of a function or method; None for other callables."""
    function = unless_loud(function)
    if isinstance(function, MethodType):
        function = unless_loud(function.__func__)
    return function.__code__ if isinstance(function, FunctionType) else None


def name_of(function: Any) -> str:
    """What a function or method is called; "" for other callables."""
    code = function_code(function)
    return "" if code is None else code.co_name


def unwrapped(function: Any) -> Any:
    """The function that decorators have been put around with `functools.wraps`."""
    seen: set[int] = set()
    while isinstance(function, FunctionType) and id(function) not in seen and "__wrapped__" in function.__dict__:
        seen.add(id(function))
        function = unless_loud(function.__dict__["__wrapped__"])
    return function


def _own(value: Any, name: str) -> Any:
    held = own_dict(value)
    if held is None:
        return UNKNOWN
    found = _plain_get(held, name)
    if found is UNKNOWN and isinstance(value, nn.Module):
        for store in _STORES:
            found = _plain_get(_plain_get(held, store), name)
            if found is not UNKNOWN:
                break
    return found


def _plain_get(held: Any, name: str) -> Any:
    if not isinstance(held, dict):
        return UNKNOWN
    try:
        if all(type(key) is str for key in dict.keys(held)):
            return unless_loud(dict.get(held, name, UNKNOWN))
        return namespace(held).get(name, UNKNOWN)  # a key of another type may have its own `__eq__`, which a look-up would ask
    except RuntimeError:  # another thread adds to it
        return UNKNOWN


def peek(value: Any, name: str, default: Any = UNKNOWN) -> Any:
    """An object's attribute, where it is stored as a value: in its dictionary, a slot, a module's stores, or its class.

    A function of the class comes as a bound method. What a property or another descriptor would compute is `default`; a property that
    only gives back what is stored elsewhere is followed there.
    """
    if not is_quiet(value):
        return default
    if isinstance(value, type):
        found = in_class(value, name)
        if isinstance(found, staticmethod):
            return unless_loud(found.__func__)
        if isinstance(found, classmethod):
            return MethodType(found.__func__, value)
        return default if found is UNKNOWN or _computes(found) else unless_loud(found)
    if isinstance(value, ModuleType):
        found = _own(value, name)
        return default if found is UNKNOWN else found
    kind = type(value)
    stands = in_class(kind, name)
    if isinstance(stands, MemberDescriptorType):
        try:
            return unless_loud(stands.__get__(value, kind))
        except AttributeError:
            return default
    if isinstance(value, tuple):
        fields = in_class(kind, "_fields")
        if type(fields) is tuple and name in fields:
            return unless_loud(tuple.__getitem__(value, fields.index(name))) if tuple.__len__(value) == len(fields) else default
    if type(stands) is property:
        found = _given_back(stands.fget, value)
        return default if found is UNKNOWN else found
    if stands is not UNKNOWN and in_class(type(stands), "__set__") is not UNKNOWN:  # it goes before the object's own dictionary
        return default
    found = _own(value, name)
    if found is not UNKNOWN:
        return found
    if isinstance(stands, staticmethod):
        return unless_loud(stands.__func__)
    if isinstance(stands, classmethod):
        return MethodType(stands.__func__, kind)
    if isinstance(stands, FunctionType):
        return MethodType(stands, value)
    computed = stands is UNKNOWN or isinstance(stands, MethodDescriptorType) or _computes(stands)
    return default if computed else unless_loud(stands)


def _given_back(getter: Any, value: Any) -> Any:
    """What a property gives whose code does nothing but `return self.a.b`, or returns a constant: read, not run."""
    code = function_code(getter)
    if code is None or code.co_argcount != 1 or len(code.co_code) > _SHORT:
        return UNKNOWN
    start, *steps = [each for each in dis.get_instructions(code) if each.opname not in ("RESUME", "NOP")]
    if start.opname == "RETURN_CONST":
        return start.argval if not steps else UNKNOWN
    if not steps or steps.pop().opname != "RETURN_VALUE":
        return UNKNOWN
    if start.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return start.argval if not steps else UNKNOWN
    if not start.opname.startswith("LOAD_FAST") or start.argval != code.co_varnames[0]:
        return UNKNOWN
    if not steps or any(each.opname != "LOAD_ATTR" for each in steps) or code.co_name in (each.argval for each in steps):
        return UNKNOWN
    try:
        return follow(value, ".".join(each.argval for each in steps))
    except RecursionError:  # properties that give back each other
        return UNKNOWN


def _computes(found: Any) -> bool:
    """Whether what stands in a class makes the value when it is asked for, rather than being it."""
    if isinstance(found, (FunctionType, MethodDescriptorType)):
        return False
    return isinstance(found, cached_property) or in_class(type(found), "__get__") is not UNKNOWN


def follow(value: Any, path: str) -> Any:
    """What `.a.b.c` of an object is, read as `peek` does; UNKNOWN where that ends."""
    for part in path.split("."):
        value = peek(value, part) if value is not UNKNOWN else UNKNOWN
    return value


def elements(value: Any, most: int | None = None) -> list[Any]:
    """The items of a list, tuple, set or deque, and the values of a dictionary, whatever its class makes of them; of others none."""
    iterate: Any = next(
        (walk for kinds, walk in _WALKS if is_quiet(value) and isinstance(value, kinds)),
        None,
    )
    try:
        return [] if iterate is None else [unless_loud(item) for item in islice(iterate(value), most)]
    except RuntimeError:  # another thread changes it
        return []


_WALKS: tuple[tuple[Any, Any], ...] = (
    (list, list.__iter__),
    (tuple, tuple.__iter__),
    (dict, lambda held: iter(dict.values(held))),
    (deque, deque.__iter__),
    (set, set.__iter__),
    (frozenset, frozenset.__iter__),
)


def pairs(value: Any, most: int | None = None) -> list[tuple[Any, Any]]:
    """The keys and values of a dictionary, whatever its class makes of them; of others none."""
    if not is_quiet(value) or not isinstance(value, dict):
        return []
    try:
        return [(unless_loud(key), unless_loud(item)) for key, item in islice(dict.items(value), most)]
    except RuntimeError:
        return []


def item_of(value: Any, key: Any) -> Any:
    """`value[key]` of a list, tuple or dictionary, by a key of a built-in type; also of the modules that hold others."""
    if isinstance(value, nn.Module) and is_quiet(value):
        children = store_of(value, "_modules")
        if isinstance(value, (nn.Sequential, nn.ModuleList)) and type(key) in (int, slice):
            value, key = list(children.values()), key
        elif isinstance(value, (nn.ModuleDict, nn.Sequential, nn.ModuleList)):
            value = children
    try:
        if type(key) is int or (type(key) is slice and all(type(end) in (int, type(None)) for end in (key.start, key.stop, key.step))):
            if isinstance(value, list):
                return unless_loud(list.__getitem__(value, key))
            if isinstance(value, tuple):
                return unless_loud(tuple.__getitem__(value, key))
    except (IndexError, ValueError):
        return UNKNOWN
    if type(key) in (str, int, float, bool, bytes, type(None)):
        return next((found for known, found in pairs(value) if type(known) is type(key) and known == key), UNKNOWN)
    return UNKNOWN


# -- modules -------------------------------------------------------------------------------------------------------------


def store_of(module: Any, which: str) -> dict[str, Any]:
    """A module's parameters, buffers or children by name (`_parameters`, `_buffers`, `_modules`), without those that are None."""
    return {name: value for name, value in namespace(_plain_get(own_dict(module), which)).items() if value is not None}


def in_training(module: nn.Module) -> bool:
    """A module's flag; modules are born with it set."""
    return _plain_get(own_dict(module), "training") is not False


def named_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that a module holds directly, each once."""
    held = {id(child): (name, child) for name, child in reversed(store_of(module, "_modules").items()) if isinstance(child, nn.Module)}
    return list(reversed(held.values()))


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and all in it with their dotted paths, as `nn.Module.named_modules()` gives them where nobody has overridden it."""
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        inner = [(f"{path}.{name}" if path else name, child) for name, child in store_of(module, "_modules").items()]
        pending += [(name, child) for name, child in reversed(inner) if isinstance(child, nn.Module)]


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """A module and all in it."""
    return (module for _, module in named_modules(root))


def _members(root: nn.Module, which: str, recurse: bool, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for path, module in named_modules(root) if recurse else [("", root)]:
        for name, tensor in store_of(module, which).items():
            if isinstance(tensor, torch.Tensor) and not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor


def named_parameters(root: nn.Module, recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module with their dotted paths."""
    return _members(root, "_parameters", recurse, remove_duplicate)  # type: ignore[return-value]


def parameters_in(root: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """The parameters of a module."""
    return (parameter for _, parameter in named_parameters(root, recurse))


def buffers_in(root: nn.Module) -> Iterator[torch.Tensor]:
    """The buffers of a module."""
    return (tensor for _, tensor in _members(root, "_buffers", True))


# -- exceptions ----------------------------------------------------------------------------------------------------------


def message_of(error: BaseException) -> str:
    """What an exception says; nothing where saying it is the user's code."""
    own = in_class(type(error), "__str__")
    said = BaseException.__dict__["args"].__get__(error)
    if not isinstance(own, WrapperDescriptorType) or not all(type(each) in (str, int, float, bool, bytes, type(None)) for each in said):
        return ""
    return str(error)


# -- variables of frames -------------------------------------------------------------------------------------------------


def own_variable(frame: FrameType, name: str) -> Any:
    """A variable of a frame of PyTorch's, whose code does not call `locals()`: read at little cost; None where it is not bound."""
    held = frame.f_locals
    found = held.get(name)
    if _PYTHON < (3, 13):
        held.clear()  # the frame keeps this dictionary, and with it the arguments
    return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables.

    Up to Python 3.12 a frame has one dictionary of them, made or brought up to date when it is asked for. If the program has called
    `locals()`, it holds that dictionary, and would see it change; if not, the dictionary would keep the variables alive. So it is
    taken off the frame while the variables are read.
    """
    if _PYTHON >= (3, 13):
        held: Any = frame.f_locals
        return {key: unless_loud(value) for key, value in held.items()} if frame.f_code.co_flags & _OPTIMIZED else namespace(held)
    if not frame.f_code.co_flags & _OPTIMIZED:  # a file or the body of a class: its namespace itself
        return namespace(frame.f_locals)
    slot = _slot(frame)
    if slot is None:
        held = frame.f_locals
        found = namespace(held)
        if not {"locals", "vars", "eval", "exec", "dir"} & set(frame.f_code.co_names):
            held.clear()
        return found
    before = slot.value
    slot.value = None
    try:
        return namespace(frame.f_locals)
    finally:
        made = _slot_at(frame).value
        slot.value = before
        if made is not None and made != before:
            ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(made))


def _slot(frame: FrameType) -> ctypes.c_void_p | None:
    """The place in a frame where the dictionary of its variables is kept; None where this Python lays frames out otherwise."""
    return _slot_at(frame) if _layout_is_known() else None


def _slot_at(frame: FrameType) -> ctypes.c_void_p:
    word = ctypes.sizeof(ctypes.c_void_p)
    head = object.__basicsize__
    if _PYTHON < (3, 11):  # PyFrameObject: a length, then f_back, f_code, f_builtins, f_globals, f_locals
        return ctypes.c_void_p.from_address(id(frame) + head + 5 * word)
    inner = ctypes.c_void_p.from_address(id(frame) + head + word).value  # PyFrameObject: f_back, f_frame
    assert inner is not None
    return ctypes.c_void_p.from_address(inner + (3 if _PYTHON < (3, 12) else 5) * word)


_known: list[bool] = []


def _layout_is_known() -> bool:
    if not _known:
        _known.append(sys.implementation.name == "cpython" and not hasattr(sys, "getobjects") and _fits())
    return _known[0]


def _fits() -> bool:
    """Whether the place is where it is expected to be."""
    own = locals()
    return _slot_at(sys._getframe()).value == id(own)
