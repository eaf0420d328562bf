"""Says a diagnosis aloud: through Python's `warnings` and through the `gradguard` logger, each cause once.

Warnings are attributed to the user's file, line and module, not to gradguard's, so that warning filters, pytest and
`-W error` treat them as the user's own.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from gradguard.core.diagnosis import SourceSpan
from gradguard.core.errors import GradGuardWarning
from gradguard.core.foreign_exceptions import internal_error
from gradguard.reporting.terminal.layout import clean, one_line
from gradguard.reporting.terminal.render import Verbosity, encodable, is_terminal, render_as, terminal_width, wants_color

if TYPE_CHECKING:
    from gradguard.core.callsite import CallSite
    from gradguard.core.diagnosis import Diagnosis

LOGGER = logging.getLogger("gradguard")
_LISTED = 5
_LOG_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


class _Place(NamedTuple):
    file: str
    line: int


class Speaker:
    """The voice of one guard: remembers what it has said, and how often the same cause was met again."""

    def __init__(self, color: bool | None = None, verbosity: Verbosity = "normal") -> None:
        self._color = color  # None: as stderr has it
        self._verbosity: Verbosity = verbosity
        self._hidden: list[Diagnosis] = []  # warned of, and ignored by the program's warning filters
        self._said: dict[tuple[str, str, int], Diagnosis] = {}
        self._confirmed: set[tuple[str, str, int]] = set()  # said as likely, and certain by now
        self._lock = threading.Lock()

    def emit_warning(self, diagnosis: Diagnosis, text: str, frame_site: CallSite | SourceSpan | None = None) -> bool:
        """Warns of a diagnosis, unless its cause was said before; then it is counted.

        Args:
            diagnosis: what was found.
            text: the rendered diagnosis.
            frame_site: the call in the user's code that was running; stands in where the diagnosis has no culprit.

        Returns:
            Whether it was said now.

        Raises:
            GradGuardWarning: the user's filters turn warnings into errors. The cause then counts as unsaid, so that it
                raises again the next time.
        """
        if not self._first(diagnosis):
            return False
        place = _place(diagnosis, frame_site)
        if LOGGER.hasHandlers():  # otherwise logging's last resort would print the same to stderr once more
            self._log(diagnosis, place)
        module = _module_of(place.file)
        if _is_ignored(text, place.line, module):
            with self._lock:
                self._hidden.append(diagnosis)
        warning = GradGuardWarning(text, diagnosis)
        try:
            with _Drawn(self._color, self._verbosity):
                warnings.warn_explicit(warning, GradGuardWarning, clean(place.file), place.line, module=module, registry=None)
        except GradGuardWarning:
            with self._lock:
                self._said.pop(diagnosis.key, None)
            raise
        return True

    def emit_log(self, diagnosis: Diagnosis, frame_site: CallSite | SourceSpan | None = None) -> bool:
        """Logs a diagnosis in one line, unless its cause was said before; returns whether it was said now.

        The record carries the diagnosis as `record.diagnosis`.
        """
        if not self._first(diagnosis):
            return False
        self._log(diagnosis, _place(diagnosis, frame_site))
        return True

    def knows(self, diagnosis: Diagnosis) -> bool:
        """Whether this cause was said before."""
        with self._lock:
            return diagnosis.key in self._said

    def remember(self, diagnosis: Diagnosis) -> None:
        """Takes a cause as said (by the run that this one resumes)."""
        with self._lock:
            self._said.setdefault(diagnosis.key, diagnosis)

    def count(self, diagnosis: Diagnosis) -> None:
        """Counts one more meeting of a cause that was said before."""
        self._first(diagnosis)

    def summary_lines(self) -> list[str]:
        """One line a cause that was met more than once, for when the guard closes; empty when there is none."""
        with self._lock:
            again = [diagnosis for diagnosis in self._said.values() if diagnosis.repeats]
        return [
            one_line(
                f"{diagnosis.title(*_place(diagnosis, None))}: "
                + (
                    "shown above as likely; later steps have confirmed it"
                    if diagnosis.key in self._confirmed
                    else f"found {diagnosis.repeats + 1} times, shown once"
                )
            )
            for diagnosis in sorted(again, key=lambda diagnosis: -diagnosis.repeats)
        ]

    def hidden_line(self) -> str | None:
        """What the program's warning filters have kept back since the last time, in one line."""
        with self._lock:
            hidden, self._hidden = self._hidden, []
        if not hidden:
            return None
        what = "a finding" if len(hidden) == 1 else f"{len(hidden)} findings"
        places = ", ".join(diagnosis.title(*_place(diagnosis, None)) for diagnosis in hidden[:_LISTED])
        rest = f" and {len(hidden) - _LISTED} more" if len(hidden) > _LISTED else ""
        return one_line(f"gradguard: a warning filter of the program hid {what}: {places}{rest}; `report=FILE` keeps the full text")

    def said(self) -> list[Diagnosis]:
        """Every cause said so far, in order; `repeats` counts how often each was met again."""
        with self._lock:
            return list(self._said.values())

    def _first(self, diagnosis: Diagnosis) -> bool:
        with self._lock:
            known = self._said.get(diagnosis.key)
            if known is None:
                self._said[diagnosis.key] = diagnosis
                return True
            known.repeats += 1
            if known.confidence != "certain" and diagnosis.confidence == "certain":
                self._confirmed.add(known.key)
            return False

    @staticmethod
    def _log(diagnosis: Diagnosis, place: _Place) -> None:
        message = one_line(f"{diagnosis.title(*place)}: {diagnosis.headline}")
        LOGGER.log(_LOG_LEVELS[diagnosis.severity], message, extra={"diagnosis": diagnosis})


class _Drawn:
    """Inside, a diagnosis that `warnings` prints is drawn as errors are: with colours and boxes where stderr can show them.

    The warning's own text, which filters and logs see, stays plain. Where the program formats warnings itself, its way counts;
    other threads' warnings are formatted as ever.
    """

    def __init__(self, color: bool | None, verbosity: Verbosity) -> None:
        self._color = color
        self._verbosity: Verbosity = verbosity
        self._original: Any = None

    def __enter__(self) -> None:
        if getattr(warnings, "_formatwarning_orig", None) is warnings.formatwarning:
            self._original = warnings.formatwarning
            warnings.formatwarning = self._format

    def __exit__(self, *error: object) -> None:
        if self._original is not None:
            warnings.formatwarning = self._original

    def _format(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        diagnosis = message.diagnosis if isinstance(message, GradGuardWarning) else None
        if diagnosis is None:
            return str(self._original(message, category, filename, lineno, line))
        try:
            stream = io.StringIO() if sys.stderr is None else sys.stderr
            color = wants_color(stream) if self._color is None else self._color
            seen = is_terminal(stream)
            text = encodable(render_as(self._verbosity, diagnosis, width=terminal_width(), color=color, wrapped=seen), stream)
            if self._verbosity == "quiet" and diagnosis.place is not None:  # which has the place
                return text + "\n"
            if seen:
                return f"{filename}:{lineno}: {category.__name__}:\n{text}\n"
        except internal_error():
            text = str(message)
        return f"{filename}:{lineno}: {category.__name__}: {text}\n"


def _is_ignored(text: str, line: int, module: str) -> bool:
    """Whether the program's filters drop a finding together with other warnings; one that names gradguard's means it."""
    for action, message, category, pattern, number in list(warnings.filters):
        asked: tuple[tuple[Any, str], ...] = ((message, text), (pattern, module))  # patterns, or in Python's own filters names
        fits = all(each is None or (each == value if isinstance(each, str) else each.match(value)) for each, value in asked)
        if fits and issubclass(GradGuardWarning, category) and number in (0, line):
            return action == "ignore" and message is None and category is not GradGuardWarning
    return False


def _place(diagnosis: Diagnosis, frame_site: CallSite | SourceSpan | None) -> _Place:
    span = diagnosis.culprit
    if span is None and frame_site is not None:
        if isinstance(frame_site, SourceSpan):
            span = frame_site
        else:
            return _Place(frame_site.code.co_filename, frame_site.line)
    if span is None and diagnosis.related:
        span = diagnosis.related[0]
    return _Place("gradguard", 0) if span is None else _Place(span.file, span.line)


def _module_of(file: str) -> str:
    """The module a file was loaded as, which is what a warning filter's module pattern is matched with."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file:
            return name
    # as `warnings` itself guesses; None would make it drop the warning
    return file.removesuffix(".py") or "<unknown>"
