"""The report for machines: one JSON object a line, one line a diagnosis.

`gradguard schema report` prints what a line holds, `gradguard schema memory` the same of a memory report. Both have a version, which
stands in every line. It changes where a reader of the one before would misread a line or refuse it: with any field that comes or goes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import ConfigError
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.memory_report import MemoryReport

REPORT_VERSION = MEMORY_VERSION = 1  # and in `gradguard.reporting.report_schema`
_FIRST = re.compile(rb'\s*\{\s*"(code"\s*:\s*"GG\d|memory"\s*:)')  # how every report begins
_reports: set[Path] = set()  # known to be ours, or not to exist: `with gradguard(report=...)` in a loop must be cheap
_MOST = 1_000
PARTS = {"line": "lines", "module": "modules", "operation": "operations", "saving": "savings"}


class ReportError(Exception):
    """A file that is no report, or one of another version."""


def to_record(diagnosis: Diagnosis, message: str) -> dict[str, Any]:
    """The line of a report: the fields of the diagnosis as plain data, the schema's version, and the text that a person was shown."""
    return {**diagnosis.model_dump(mode="json"), "schema_version": REPORT_VERSION, "message": message}


def from_record(record: Any) -> Diagnosis:
    """The diagnosis of a report's line.

    Raises:
        ReportError: it is of another version, or no line of a report; the message goes on a sentence that begins with the file's name.
    """
    if not isinstance(record, dict) or "code" not in record:
        memory = isinstance(record, dict) and "memory" in record
        raise ReportError("is a memory report, which has no diagnoses" if memory else "is no report of `gradguard run --report`")
    fields = {name: value for name, value in record.items() if name not in ("message", "schema_version")}
    version = record.get("schema_version", 0)
    if version != REPORT_VERSION:
        newer = isinstance(version, int) and version > REPORT_VERSION
        its = f"version {version}" if version else "no version"
        advice = "install the gradguard that wrote it" if newer else "run the program again"
        raise ReportError(
            f"was written by {'a newer' if newer else 'an older'} gradguard ({its} in its lines, and this one reads version "
            f"{REPORT_VERSION}): {advice}"
        )
    try:
        return Diagnosis.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise ReportError(f"is no report that gradguard wrote ({where}: {first['msg']})") from None


def read_report(path: Path) -> list[Diagnosis]:
    """The diagnoses of a report.

    Raises:
        ReportError: the file cannot be read, is no report, or one of another version; the message says which line, and why.
    """
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except internal_error(OSError) as error:
        raise ReportError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(from_record(json.loads(line)))
        except ReportError as error:
            raise ReportError(f"{path}:{number} {error}") from None
        except ValueError:
            raise ReportError(f"{path}:{number} is no report of `gradguard run --report` (no JSON)") from None
    return found


class JsonlReport:
    """Appends diagnoses to a file.

    A file that holds something else than a report is refused, so that a mistyped name costs nothing.

    The file is opened for each line, in append mode, and written to in one call: lines of several threads and processes (DDP ranks,
    forked workers) do not mix, nothing is lost when a process is killed, and no open file is shared over a fork. Diagnoses are
    rare, so the opening costs nothing that matters. The file and its folders are made with the first line: a run without a
    diagnosis leaves none.

    Raises:
        ConfigError: the file holds something else.
        OSError (from `write`): the file cannot be made or written; what to do about it is the caller's to decide.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # a program that changes its working directory keeps its report
        if self.path not in _reports:
            refuse_other_files(self.path)
            if len(_reports) < _MOST:
                _reports.add(self.path)

    def write(self, diagnosis: Diagnosis, message: str) -> None:
        """Append one diagnosis. Once it returns, the line is with the operating system."""
        line = json.dumps(to_record(diagnosis, message), separators=(",", ":")).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_BINARY is Windows' alone; without it "\n" would be rewritten there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        descriptor = os.open(self.path, flags, 0o666)
        try:
            rest = memoryview(line)
            while rest:  # short writes happen on full disks and pipes only
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)

    def revise(self, old: Diagnosis, new: Diagnosis, message: str) -> None:
        """Writes a diagnosis anew in the place of its line: more is known of it by now. Not while other processes write.

        Where the file does not have that line, it is appended. How often the cause was met again is counted after its line was written.
        """
        known = old.model_dump(mode="json", exclude={"repeats"})
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
        for i in reversed(range(len(lines))):
            record = json.loads(lines[i])
            for name in ("message", "repeats", "schema_version"):
                record.pop(name, None)
            if record == known:
                lines[i] = json.dumps(to_record(new, message), separators=(",", ":")).encode() + b"\n"
                replace_file(self.path, b"".join(lines))
                return
        self.write(new, message)

    def close(self) -> None:
        """End the report. Nothing is held open between lines; a line written later (by a daemon thread, say) is still appended."""

    def __enter__(self) -> JsonlReport:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def memory_records(report: MemoryReport) -> Iterator[dict[str, Any]]:
    """The lines of a memory report: the sums first, then one a line, module, operation and saving."""
    known = report.model_dump(mode="json")
    parts = {kind: known.pop(name) for kind, name in PARTS.items()}
    yield {"memory": "sums", "schema_version": MEMORY_VERSION, **known}
    for kind, entries in parts.items():
        yield from ({"memory": kind, "schema_version": MEMORY_VERSION, **entry} for entry in entries)


def write_memory(path: Path, report: MemoryReport) -> None:
    """Appends a memory report to a file of ours."""
    refuse_other_files(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in memory_records(report))


def refuse_other_files(path: Path, first: re.Pattern[bytes] = _FIRST) -> None:
    """Lets a report pass, an empty or missing file, and what is no file (a terminal, a pipe, /dev/null).

    Args:
        first: how a report of the kind in question begins.

    Raises:
        ConfigError: anything else.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{path} is a folder, and a report is a file")
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return
        with path.open("rb") as file:
            ours = first.match(file.read(200))
    except internal_error(OSError):  # missing; or not to be read, and then `write` says so
        return
    if not ours:
        raise ConfigError(f"{path} exists and is no report of gradguard's: nothing was written to it; name another file or delete it")


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; whoever has it open keeps what it was.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def begin_anew(path: Path) -> None:
    """Puts an empty report in the place of an earlier run's, which keeps its contents where it has another name.

    Raises:
        ConfigError: the file is no report, or its folder cannot be written to.
    """
    refuse_other_files(path)
    path = Path(os.path.realpath(path))  # of a link, the file that it leads to
    if path.exists() and not path.is_file():
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.replace(fresh, path)
    except internal_error(OSError) as error:
        raise ConfigError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
