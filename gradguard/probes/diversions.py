"""Functions of torch that do something more while they stay the objects they are.

TorchScript finds builtins by the identity of a function, Dynamo has tables of functions and guards on those it has traced, libraries
compare and wrap them. So a function is not replaced: it is given other code, of the same signature, which calls gradguard's function
instead, and that one calls a copy of the function as it was. Aliases that a program made before are watched as well.

The code says that it stands where the function's own stands, so that rules by file name (what Dynamo skips, what TorchScript reads)
hold for it. Dynamo reads the branch that leads straight to the copy, and the tracer of TorchScript goes that way; they never see
gradguard's.
"""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any

from gradguard.torch_compat.private_api import is_compiling, jit_tracing, never_compile, unremarkable_is_compiling

_TARGET = "gradguard's function goes here"
_AROUND = "__gradguard_around_{}__"
_COMPILING = "__gradguard_compiling__"
_TRACING = "__gradguard_tracing__"

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)

originals: dict[CodeType, FunctionType] = {}
"""Copies of the diverted functions, by the code that stands in for theirs."""


class Diversion:
    """A diverted function.

    Args:
        function: of plain Python.
        make: given a copy of the function, returns what is called in its place, with the arguments as the signature sorts them.

    Attributes:
        function: the diverted one.

    Raises:
        ValueError: a function that cannot be diverted.
    """

    def __init__(self, function: FunctionType, make: Callable[[Any], Callable[..., Any]]) -> None:
        self.function = function
        code = self._code = function.__code__
        self._name = f"__gradguard_{function.__qualname__.replace('.', '_').replace('<', '').replace('>', '')}_{id(function)}__"
        copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__qualname__ = function.__qualname__
        copy.__module__ = function.__module__
        copy.__doc__ = function.__doc__
        copy.__dict__.update(function.__dict__)
        self._copy = copy
        self._detour = _detour(code, make(copy), self._name)
        never_compile(self._detour)

    def begin(self) -> None:
        """From here on the function does something more."""
        names = self.function.__globals__
        originals[self._detour] = self._copy
        names.setdefault(_COMPILING, is_compiling)
        names.setdefault(_TRACING, jit_tracing)
        names[self._name] = self._copy
        self.function.__code__ = self._detour

    def end(self) -> None:
        """The function does what it did; nothing happens if somebody else has given it other code since."""
        if self.function.__code__ is self._detour:
            self.function.__code__ = self._code
            self.function.__globals__.pop(self._name, None)


class Surrounding:
    """A function whose body runs inside a context, with no frame more on the stack and each line where it was: for those whose callers
    write the stack down, as the tracer of TorchScript does.

    Args:
        function: of plain Python, without closure, whose source is at hand.
        context: what makes the context of a call.

    Attributes:
        function: the surrounded one.

    Raises:
        OSError: there is no source.
        ValueError: the source is not that of the function, which may have a closure.
    """

    def __init__(self, function: FunctionType, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.function = function
        code = self._code = function.__code__
        self._name = _AROUND.format(function.__name__)
        lines, first = inspect.getsourcelines(function)
        module = ast.increment_lineno(ast.parse("".join(lines)), first - 1)
        if _outline(_compiled(module, code)) != _outline(code):
            raise ValueError(f"the source of {code.co_name} is another")
        call = ast.Call(ast.Name(self._name, ast.Load()), [], [])
        definition: Any = module.body[0]
        definition.body = [ast.With([ast.withitem(call)], definition.body)]
        self._context = context
        self._surrounded = _compiled(ast.fix_missing_locations(module), code)
        never_compile(self._surrounded)

    def begin(self) -> None:
        """From here on its body runs inside the context."""
        self.function.__globals__[self._name] = self._context
        self.function.__code__ = self._surrounded

    def end(self) -> None:
        """The function does what it did; nothing happens if somebody else has given it other code since."""
        if self.function.__code__ is self._surrounded:
            self.function.__code__ = self._code
            self.function.__globals__.pop(self._name, None)


def _compiled(module: ast.Module, code: CodeType) -> CodeType:
    """The code of the one function in a module, compiled as this code was."""
    consts = compile(module, code.co_filename, "exec", code.co_flags & _FUTURE, dont_inherit=True).co_consts
    (found,) = [const for const in consts if isinstance(const, CodeType) and const.co_name == code.co_name]
    return found


def _outline(code: CodeType) -> tuple[Any, ...]:
    return code.co_varnames, code.co_freevars, code.co_names, {line for _, _, line in code.co_lines()}


def prepare_for_dynamo() -> None:
    """Dynamo, which has been imported, is to compile diverted functions as if they were not."""
    ask = unremarkable_is_compiling()
    for copy in originals.values():
        copy.__globals__[_COMPILING] = ask


def _detour(code: CodeType, target: Callable[..., Any], copy: str) -> CodeType:
    """Code of the same signature that calls `target`, or while something compiles or TorchScript traces, and writes the stack into what
    it makes, the function called `copy`."""
    names = list(code.co_varnames)
    positional, keyword = names[: code.co_argcount], names[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    rest = names[code.co_argcount + code.co_kwonlyargcount :]
    formal = [*positional]
    if code.co_posonlyargcount:
        formal.insert(code.co_posonlyargcount, "/")
    given = [*positional]
    if code.co_flags & 4:
        formal.append(f"*{rest[0]}")
        given.append(f"*{rest.pop(0)}")
    elif keyword:
        formal.append("*")
    formal += keyword
    given += [f"{name}={name}" for name in keyword]
    if code.co_flags & 8:
        formal.append(f"**{rest[0]}")
        given.append(f"**{rest[0]}")
    call = f"({', '.join(given)})"
    free = "".join(f"    {name} = None\n" for name in code.co_freevars)
    kept = f" if 0: {', '.join(code.co_freevars)}" if code.co_freevars else " pass"
    source = (
        f"def outer():\n{free}"
        f"    def inner({', '.join(formal)}):\n"
        f"       {kept}\n"
        f"        if {_COMPILING}() or {_TRACING}(): return {copy}{call}\n"
        f"        _gradguard = {_TARGET!r}; return _gradguard{call}\n"
    )
    outer = next(const for const in compile(source, "<gradguard>", "exec", dont_inherit=True).co_consts if isinstance(const, CodeType))
    inner = next(const for const in outer.co_consts if isinstance(const, CodeType))
    if inner.co_freevars != code.co_freevars:
        raise ValueError(f"{code.co_name} cannot be diverted")
    return inner.replace(
        co_consts=tuple(target if const == _TARGET else const for const in inner.co_consts),
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        **({"co_qualname": code.co_qualname} if hasattr(code, "co_qualname") else {}),
    )
