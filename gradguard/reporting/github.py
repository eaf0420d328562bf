"""Diagnoses as workflow commands of GitHub Actions: annotations on the lines of a pull request.

The form is that of GitHub's documentation ("Workflow commands for GitHub Actions"), the escaping that of its own toolkit
(`actions/toolkit`, `command.ts`): a message may hold no `%`, CR or LF, a property no `:` and `,` either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from gradguard.core.diagnosis import Diagnosis, Severity, SourceSpan
from gradguard.reporting import wording
from gradguard.reporting.terminal.layout import clean

_COMMANDS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "notice"}
_URGENT = tuple(_COMMANDS)


def commands(diagnoses: Sequence[Diagnosis], workspace: str) -> list[str]:
    """One line a diagnosis, the worst first: GitHub shows ten errors and ten warnings of a step.

    Args:
        workspace: the folder of the checkout, which paths are relative to.
    """
    return [_command(diagnosis, workspace) for diagnosis in sorted(diagnoses, key=lambda each: _URGENT.index(each.severity))]


def workspace_of(folder: str) -> str:
    """The checkout around a folder: the runner's, else the nearest folder with a `.git`, else the folder itself."""
    given = os.environ.get("GITHUB_WORKSPACE")
    real = os.path.realpath(folder)
    if given and _inside(real, os.path.realpath(given)):
        return os.path.realpath(given)
    here = real
    while not os.path.exists(os.path.join(here, ".git")):
        above = os.path.dirname(here)
        if above == here:
            return real
        here = above
    return here


def _command(diagnosis: Diagnosis, workspace: str) -> str:
    place = diagnosis.place
    shown = [] if place is None else list(_properties(place, workspace))
    shown.append(("title", f"{diagnosis.code} {diagnosis.name}"))
    properties = ",".join(f"{name}={_property(value)}" for name, value in shown)
    return f"::{_COMMANDS[diagnosis.severity]} {properties}::{_data(_message(diagnosis))}"


def _properties(place: SourceSpan, workspace: str) -> Iterator[tuple[str, str]]:
    if not os.path.isabs(place.file):  # a notebook's cell, or a program from standard input: no file of the checkout
        return
    real = os.path.realpath(place.file)
    path = os.path.relpath(real, workspace) if _inside(real, workspace) else real
    yield "file", path.replace(os.sep, "/")
    yield "line", str(place.line)
    yield "endLine", str(place.end_line)
    if place.line == place.end_line and place.column is not None and place.end_column is not None:
        yield "col", str(place.column + 1)
        yield "endColumn", str(max(place.column + 1, place.end_column))


def _message(diagnosis: Diagnosis) -> str:
    place = diagnosis.place
    away = "" if place is None or os.path.isabs(place.file) else f"{place.file}:{place.line}: "
    parts = [away + diagnosis.headline, diagnosis.explanation]
    if diagnosis.confidence != "certain":
        parts.append(f"Confidence: {wording.CONFIDENCE[diagnosis.confidence]}.")
    if diagnosis.fixes:
        fix = diagnosis.fixes[0]
        parts.append(f"Fix: {wording.fix_title(fix)} ({wording.standing(fix)})")
    return clean("\n\n".join(part for part in parts if part.strip()))


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))
