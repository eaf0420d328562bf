"""`gradguard schema`: what machines can rely on, as JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any


class Schema(str, Enum):
    """What there is a schema of."""

    report = "report"
    memory = "memory"
    settings = "settings"


def schema_text(of: Schema) -> str:
    """A JSON schema, indented."""
    return json.dumps(_MAKE[of](), indent=2)


def _report() -> dict[str, Any]:
    from gradguard.reporting.report_schema import report_schema

    return report_schema()


def _memory() -> dict[str, Any]:
    from gradguard.reporting.report_schema import memory_schema

    return memory_schema()


def _settings() -> dict[str, Any]:
    from gradguard.cli.config_command import settings_schema

    return settings_schema()


_MAKE: dict[Schema, Callable[[], dict[str, Any]]] = {Schema.report: _report, Schema.memory: _memory, Schema.settings: _settings}
