"""The report for machines: one JSON object a line, one line a diagnosis."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from gradguard.diagnosis import Diagnosis


def to_record(diagnosis: Diagnosis, message: str) -> dict[str, Any]:
    """The line of a report: the fields of the diagnosis as plain data, and `message`, the text that a person was shown."""
    return {**diagnosis.model_dump(mode="json"), "message": message}


class JsonlReport:
    """Appends diagnoses to a file.

    The file is opened for each line, in append mode, and written to in one call: lines of several threads and processes (DDP ranks,
    forked workers) do not mix, nothing is lost when a process is killed, and no open file is shared over a fork. Diagnoses are
    rare, so the opening costs nothing that matters. The file and its folders are made with the first line: a run without a
    diagnosis leaves none.

    Raises (from `write`):
        OSError: the file cannot be made or written; what to do about it is the caller's to decide.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # a program that changes its working directory keeps its report

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

    def close(self) -> None:
        """End the report. Nothing is held open between lines; a line written later (by a daemon thread, say) is still appended."""

    def __enter__(self) -> JsonlReport:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
