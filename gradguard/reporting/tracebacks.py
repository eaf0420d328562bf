"""What a user sees of an exception that left their program: their own frames, as Python would have shown them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, TracebackType

import torch.overrides

from gradguard.core.callsite import USER_FILES, is_torch_or_own
from gradguard.core.errors import GradGuardError
from gradguard.probes.diversions import originals
from gradguard.reporting.notebook_cells import cell_name
from gradguard.reporting.terminal.render import Verbosity, print_diagnosis, render
from gradguard.torch_compat.private_api import call_alone

_TORCH_DIR = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def show_user_frames_only(color: bool | None = None, verbosity: Verbosity = "normal") -> None:
    """Let the next uncaught exception be shown without gradguard's frames, by the program's own `sys.excepthook` if it has one.

    Called while the exception is on its way out, so that a program never meets a foreign `sys.excepthook`.
    """
    take_back_hook()
    hook = sys.excepthook
    launcher = sys._getframe(1)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        error.__traceback__ = _below(launcher, trace)
        _hide_own_frames(error)
        sys.last_traceback = error.__traceback__
        if hook is not sys.__excepthook__:
            if _adds_nothing(hook):
                _say_diagnoses_once(error)
            _call(hook, kind, error)
        elif isinstance(error, GradGuardError):
            _print_diagnosed(error, color, verbosity)
        else:
            _say_diagnoses_once(error)
            hook(kind, error, error.__traceback__)

    sys.excepthook = show


class _ShownOnce:
    """Shows a diagnosed error that nothing catches as `gradguard run` does, and every other as Python does."""

    def __init__(self, hook: Callable[..., object], color: bool | None, verbosity: Verbosity) -> None:
        self.hook = hook
        self._color = color
        self._verbosity: Verbosity = verbosity

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        take_back_hook()
        if any(isinstance(each, GradGuardError) for each in _chain(error)):
            for each in _chain(error):
                shorten(each)
            trace = sys.last_traceback = error.__traceback__
            if isinstance(error, GradGuardError) and self.hook is sys.__excepthook__:
                _print_diagnosed(error, self._color, self._verbosity)
                return
            _say_diagnoses_once(error)
        self.hook(kind, error, trace)


def show_if_uncaught(color: bool | None, verbosity: Verbosity = "normal") -> None:
    """A diagnosed error is about to be raised; where the program has its own `sys.excepthook`, that one shows it."""
    if _adds_nothing(sys.excepthook) and not hasattr(sys, "ps1"):
        sys.excepthook = _ShownOnce(sys.excepthook, color, verbosity)


def take_back_hook() -> None:
    """The error was shown, or caught."""
    if isinstance(sys.excepthook, _ShownOnce):
        sys.excepthook = sys.excepthook.hook


def _adds_nothing(hook: Callable[..., object]) -> bool:
    """Whether a hook is Python's own, or that of torch.distributed, which puts the rank before each line of it."""
    return hook is sys.__excepthook__ or (type(hook) is FunctionType and hook.__module__ == "torch.distributed.distributed_c10d")


def shorten(error: BaseException | None, trace: TracebackType | None = None) -> None:
    """Leaves a diagnosed error, on its way out, with the program's frames; without any it is left as it is.

    Args:
        error: anything; only a `GradGuardError` is touched.
        trace: the frames of the error that it explains, where it was caught outside of them.
    """
    if not isinstance(error, GradGuardError):
        return
    cause = error.__cause__
    found = _users(trace)
    if found is None:
        found = _users(error.__traceback__)
        if cause is not None:  # a hook's frame, or that of a custom Function's backward
            cause.__traceback__ = _users(cause.__traceback__)
    elif cause is not None:
        cause.__traceback__ = None
    error.__traceback__ = found or error.__traceback__


def _users(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    for entry in _entries(trace):
        if USER_FILES[entry.tb_frame.f_code.co_filename]:
            if kept and kept[-1].tb_frame is entry.tb_frame:  # left by way of a `with`
                kept.pop()
            kept.append(entry)
    return _linked(kept)


def for_cell(error: GradGuardError) -> list[str]:
    """The lines of what is shown below a cell of IPython or a notebook; the error itself is left as it is."""
    entries = list(_entries(_end_at_user(_without_own_frames(error.__traceback__)) or _end_at_user(_cause_trace(error))))
    while entries and not USER_FILES[entries[0].tb_frame.f_code.co_filename]:
        del entries[0]  # IPython's own, which ran the cell
    frames = traceback.extract_tb(_linked(entries))
    for frame in frames:
        frame.filename = cell_name(frame.filename) or frame.filename
    try:
        text = render(error.diagnosis, color=not os.environ.get("NO_COLOR"), unicode=True)
    except Exception:  # drawing it failed: its text, made when it was raised, is still there
        text = str(error)
    head = ["Traceback (most recent call last):", *"".join(traceback.format_list(frames)).splitlines(), ""] if frames else []
    return [*head, *text.splitlines(), *getattr(error, "__notes__", ())]


def _hide_own_frames(error: BaseException) -> None:
    for each in _chain(error):
        each.__traceback__ = _without_own_frames(each.__traceback__)
        if isinstance(each, GradGuardError):
            each.__traceback__ = _users(each.__traceback__) or _users(_cause_trace(each))


def _call(hook: Callable[..., object], kind: type[BaseException], error: BaseException) -> None:
    """The program's own hook; when it fails that is told in Python's words, for Python would show this call's frame with it."""
    here = sys._getframe()
    try:
        hook(kind, error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as broken:
        print("Error in sys.excepthook:", file=sys.stderr)
        broken.__traceback__ = _below(here, broken.__traceback__)
        traceback.print_exception(broken)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(kind, error, error.__traceback__)


def _print_diagnosed(error: GradGuardError, color: bool | None, verbosity: Verbosity) -> None:
    """The traceback, then the diagnosis, which holds PyTorch's own words: the cause is not printed a second time."""
    if error.__traceback__ is not None and verbosity != "quiet":
        frames = "".join(traceback.format_tb(error.__traceback__))
        print(f"Traceback (most recent call last):\n{frames}", file=sys.stderr)
    try:
        print_diagnosis(error.diagnosis, color=color, verbosity=verbosity)
    except Exception:  # drawing it failed: its text, made when it was raised, is still there
        print(error, file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)


def _say_diagnoses_once(error: BaseException) -> None:
    """In a chain that the program built itself, a diagnosis stands alone, without PyTorch's error before it."""
    for each in _chain(error):
        if isinstance(each, GradGuardError):
            each.__cause__ = None
            each.__suppress_context__ = True


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and all that Python would print with it: causes, contexts, members of groups."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _cause_trace(error: GradGuardError) -> TracebackType | None:
    cause = error.__cause__
    return None if cause is None else _without_own_frames(cause.__traceback__)


def _below(launcher: FrameType, trace: TracebackType | None) -> TracebackType | None:
    """The part of the trace that `launcher` called."""
    here = trace
    while here is not None:
        if here.tb_frame is launcher:
            return here.tb_next
        here = here.tb_next
    return trace


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(code: CodeType) -> bool:
    filename = code.co_filename
    return code in originals or (is_torch_or_own(filename) and not os.path.abspath(filename).startswith(_TORCH_DIR))


def _linked(entries: list[TracebackType]) -> TracebackType | None:
    linked: TracebackType | None = None
    for entry in reversed(entries):
        linked = TracebackType(linked, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return linked


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    short = False  # a torch function written in Python was called again by the shorter way (`call_alone`)
    for entry in _entries(trace):
        if not _is_own(entry.tb_frame.f_code):
            if short and kept and kept[-1].tb_frame.f_code is entry.tb_frame.f_code:
                kept.pop()
            short = False
            kept.append(entry)
        elif entry.tb_frame.f_code is call_alone.__code__:
            short = True
        elif len(kept) > 1 and kept[-1].tb_frame.f_code.co_filename == torch.overrides.__file__:
            # a torch function that asked the guard's function mode: without the guard it would not have turned aside
            del kept[-2:]
    return _linked(kept)


def _end_at_user(trace: TracebackType | None) -> TracebackType | None:
    """The trace up to the innermost frame of the user's; None when there is no such frame."""
    entries = list(_entries(trace))
    while entries and not USER_FILES[entries[-1].tb_frame.f_code.co_filename]:
        entries.pop()
    return _linked(entries)
