"""Puts a function under a guard: plain functions, generators and coroutines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def decorated(function: Callable[P, R], guard: AbstractContextManager[Any]) -> Callable[P, R]:
    """The function, each call of which runs inside `guard`.

    A generator is inside while its own code runs, and not while it is suspended; a coroutine is until it is done.
    """
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            with guard:
                return await function(*args, **kwargs)

        return cast("Callable[P, R]", awaited)
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def resumed(*args: P.args, **kwargs: P.kwargs) -> Any:
            return (yield from _Resumed(guard, function(*args, **kwargs)))

        return cast("Callable[P, R]", resumed)

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        with guard:
            return function(*args, **kwargs)

    return guarded


class _Resumed(Generator[Any, Any, Any]):
    def __init__(self, guard: AbstractContextManager[Any], inner: Generator[Any, Any, Any]) -> None:
        self._guard = guard
        self._inner = inner

    def send(self, value: Any) -> Any:
        with self._guard:
            try:
                return self._inner.send(value)
            except StopIteration as stop:  # the regular end, and no incident
                ended = stop
        raise ended

    def throw(self, kind: Any, value: Any = None, tb: TracebackType | None = None) -> Any:
        with self._guard:
            try:
                return self._inner.throw(kind if value is None else value)
            except StopIteration as stop:
                ended = stop
        raise ended
