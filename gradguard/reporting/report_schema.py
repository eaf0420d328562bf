"""What a line of a report and of a memory report holds, as JSON schemas (`gradguard schema`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, TypeAdapter

from gradguard.core.diagnosis import Diagnosis
from gradguard.core.memory_report import HeldByLine, HeldByName, MemoryReport, Saving
from gradguard.reporting.jsonl import PARTS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class ReportLine(Diagnosis):
    """One line of the report that `gradguard run --report FILE.jsonl` writes: a diagnosis, and the text that a person was shown."""

    schema_version: Literal[1] = Field(description="of this schema")
    message: str = Field(description="the diagnosis as text, as the exception has it")


class _Sums(MemoryReport):
    """The first line of a memory report; what `lines`, `modules`, `operations` and `savings` would hold has lines of its own."""

    memory: Literal["sums"]
    schema_version: Literal[1]


class _Line(HeldByLine):
    memory: Literal["line"]
    schema_version: Literal[1]


class _Module(HeldByName):
    memory: Literal["module"]
    schema_version: Literal[1]


class _Operation(HeldByName):
    memory: Literal["operation"]
    schema_version: Literal[1]


class _Saving(Saving):
    memory: Literal["saving"]
    schema_version: Literal[1]


def report_schema() -> dict[str, Any]:
    """The JSON schema of a line of a report."""
    return {"$schema": _DIALECT, **ReportLine.model_json_schema(mode="serialization")}


def memory_schema() -> dict[str, Any]:
    """The JSON schema of a line of a memory report."""
    lines: TypeAdapter[Any] = TypeAdapter(_Sums | _Line | _Module | _Operation | _Saving)
    schema = lines.json_schema(mode="serialization")
    for name in PARTS.values():
        schema["$defs"]["_Sums"]["properties"].pop(name)
    return {"$schema": _DIALECT, "title": "a line of a memory report", **schema}
