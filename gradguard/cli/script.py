"""Runs a program under the guard exactly as `python SCRIPT ARGS` or `python -m MODULE ARGS` would run it.

The program gets a `__main__` module of its own, so that pickling, multiprocessing (fork and spawn), `inspect.getsource` and
`if __name__ == "__main__"` work as they do without gradguard. Exit codes, `atexit` handlers, the wait for other threads and
the death by SIGINT are left to Python itself: what the program raises is let through to the interpreter, with an
`excepthook` in place that shows the user's frames alone (`gradguard.reporting.tracebacks`).
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import linecache
import os
import sys
import traceback
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from gradguard.core.errors import ConfigError, GradGuardError, GradGuardWarning
from gradguard.reporting.terminal.render import Verbosity
from gradguard.reporting.tracebacks import show_user_frames_only
from gradguard.runtime.module_isolation import load_apart

MakeGuard = Callable[[], AbstractContextManager[Any]]
Finish = Callable[[BaseException | None], None]


class LaunchError(Exception):
    """The program cannot be started; `status` is the exit status Python has for the same mistake."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Program:
    """Compiled code and the `__main__` module that it runs in."""

    code: CodeType
    module: ModuleType


def run_program(
    target: str,
    arguments: list[str],
    make_guard: MakeGuard,
    *,
    as_module: bool = False,
    color: bool | None = None,
    finish: Finish | None = None,
) -> None:
    """Run the program to its end in this process. Meant to be the last thing that a process does.

    `target` is a script, a folder or zip file with a `__main__.py`, `-` for standard input, or, with `as_module`, a
    module's dotted name. `make_guard` builds the guard when the program is ready to start. `finish` is called when the program is
    over, with what leaves it, before that is shown.

    Raises:
        SystemExit: the program could not be started (2, or 1 for a module that is not found, as Python has it).
        BaseException: whatever leaves the program.
    """
    shield = _Shield(make_guard)
    try:
        program = _load_module(target, arguments) if as_module else _load_script(target, arguments)
        sys.modules["__main__"] = program.module
        with shield:
            exec(program.code, program.module.__dict__)
        _call(finish, None)
    except LaunchError as error:
        print(f"gradguard run: {error}", file=sys.stderr)
        raise SystemExit(error.status) from None
    except SystemExit as error:
        _call(finish, error)
        raise
    except BaseException as error:
        _call(finish, error)
        if shield.traceback == "user":
            show_user_frames_only(color, shield.verbosity)
        raise


class _Shield(AbstractContextManager[None]):
    """The guard around the program. A failure inside gradguard is reported and never becomes the program's failure."""

    def __init__(self, make_guard: MakeGuard) -> None:
        self._make_guard = make_guard
        self._guard: AbstractContextManager[Any] | None = None
        self.traceback = "user"
        self.verbosity: Verbosity = "normal"

    def __enter__(self) -> None:
        try:
            guard = self._make_guard()
            guard.__enter__()
        except ConfigError as error:
            raise LaunchError(str(error)) from None
        except Exception as error:
            _report_own_failure("the program runs unguarded", error)
        else:
            self._guard = guard
            settings = getattr(guard, "settings", None)
            self.traceback = getattr(settings, "traceback", "user")
            self.verbosity = getattr(settings, "verbosity", "normal")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._guard is None:
            return
        try:
            self._guard.__exit__(kind, error, trace)
        except (GradGuardError, GradGuardWarning):  # a diagnosis that the policy raises
            raise
        except Exception as failure:
            if failure is not error:
                _report_own_failure("while closing the guard", failure)


def _call(finish: Finish | None, error: BaseException | None) -> None:
    try:
        if finish is not None:
            finish(error)
    except Exception as failure:
        _report_own_failure("after the program's end", failure)


def _report_own_failure(where: str, error: Exception) -> None:
    print(f"gradguard: internal error, {where}: {type(error).__name__}: {error}", file=sys.stderr)
    if os.environ.get("GRADGUARD_DEBUG"):
        traceback.print_exception(error)


def _load_script(target: str, arguments: list[str]) -> Program:
    """A program from a file, a folder, a zip file or standard input; sets `sys.argv` and `sys.path[0]`."""
    if target == "-":
        sys.argv = ["-", *arguments]
        _set_first_path("")
        return _from_stdin()
    if not os.path.exists(target):
        raise LaunchError(f"can't open file {target!r}: no such file")
    sys.argv = [target, *arguments]
    if _is_importable(target):
        return _from_container(target)
    path = os.path.join(os.getcwd(), target)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    module = _main_module(file=path)
    if path.endswith(".pyc"):
        module.__loader__ = sourceless = SourcelessFileLoader("__main__", path)
        return Program(_loaded_code(sourceless, "__main__", target), module)
    module.__loader__ = SourceFileLoader("__main__", path)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise LaunchError(f"can't open file {target!r}: {error.strerror}") from None
    # this module's own `from __future__` imports must not leak into the program
    return Program(compile(source, path, "exec", dont_inherit=True), module)


def _from_stdin() -> Program:
    source = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read() if hasattr(sys.stdin, "buffer") else sys.stdin.read()
    # no file holds these lines: without this neither a traceback nor a diagnosis could show them
    linecache.cache["<stdin>"] = (len(source), None, source.splitlines(keepends=True), "<stdin>")
    module = _main_module(file="<stdin>")
    return Program(compile(source, "<stdin>", "exec", dont_inherit=True), module)


def _is_importable(target: str) -> bool:
    """Whether Python would look inside for a `__main__.py`: a folder or a zip file."""
    if os.path.isdir(target):
        return True
    return not target.endswith((".py", ".pyc")) and zipfile.is_zipfile(target)


def _from_container(target: str) -> Program:
    path = os.path.join(os.getcwd(), target)
    _set_first_path(path)
    spec = PathFinder.find_spec("__main__", [path])
    if spec is None:
        raise LaunchError(f"can't find '__main__' module in {target!r}", status=1)
    return Program(_code_of(spec, target), _main_module(spec=spec))


def _load_module(name: str, arguments: list[str]) -> Program:
    """A program from a module, or from a package's `__main__`; sets `sys.argv` and `sys.path[0]`."""
    sys.argv = ["-m", *arguments]
    _set_first_path(os.getcwd())
    spec = _find_module(name)
    if spec.submodule_search_locations is not None:
        try:
            spec = _find_module(f"{name}.__main__")
        except LaunchError:
            raise LaunchError(f"No module named {name}.__main__; {name!r} is a package and cannot be run itself", status=1) from None
    code = _code_of(spec, name)
    if spec.origin is not None:
        sys.argv[0] = spec.origin
    return Program(code, _main_module(spec=spec))


def _find_module(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # a package on the way that is missing is a mistyped name; an import that fails inside a package is the program's error
        if error.name is not None and error.name != name and not name.startswith(error.name + "."):
            raise
        raise LaunchError(f"No module named {name} ({error})", status=1) from None
    except ValueError as error:
        raise LaunchError(f"No module named {name} ({error})", status=1) from None
    if spec is None:
        raise LaunchError(f"No module named {name}", status=1)
    return spec


def _code_of(spec: ModuleSpec, target: str) -> CodeType:
    return _loaded_code(spec.loader, spec.name, target)


def _loaded_code(loader: object, name: str, target: str) -> CodeType:
    get_code = getattr(loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if not isinstance(code, CodeType):
        raise LaunchError(f"no code to run in {target}", status=1)
    return code


def _main_module(*, file: str | None = None, spec: ModuleSpec | None = None) -> ModuleType:
    """A fresh `__main__` with the attributes that Python gives it."""
    module = ModuleType("__main__")
    names = module.__dict__
    names.update(__builtins__=builtins, __cached__=None, __package__=None, __file__=file)
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    if spec is not None:
        names.update(__spec__=spec, __loader__=spec.loader, __package__=spec.parent, __file__=spec.origin, __cached__=spec.cached)
    return module


def _set_first_path(entry: str) -> None:
    """Put the program's folder where Python put gradguard's own (nowhere under `-P`, `-I` and PYTHONSAFEPATH)."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return
    load_apart(entry)
    sys.path[0] = entry
