"""`gradguard sarif`, and what `gradguard run --report FILE.sarif` does at the end: a report as a SARIF log."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradguard
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import ConfigError
from gradguard.reporting.jsonl import ReportError, read_report
from gradguard.reporting.sarif import refuse_other_files, to_sarif, write
from gradguard.runtime.trials.mirror import project_of


def report_beside(log: Path) -> Path:
    """The report that a log is made of, which `gradguard fix` reads."""
    return log.with_suffix(".jsonl")


def convert(report: Path, log: Path | None, folder: str | None = None) -> int:
    """Writes a report as a SARIF log, to stdout where no file is named; gives the exit status.

    Args:
        folder: where the program was started; the working directory where it is None.
    """
    try:
        diagnoses = read_report(report) if report.exists() or log is None else []
        made = log_of(diagnoses, folder or os.getcwd())
        if log is None:
            print(json.dumps(made, indent=2))
            return 0
        refuse_other_files(log)
        write(made, log)
    except (ReportError, ConfigError, OSError) as error:
        print(f"gradguard: no SARIF log was written: {error}", file=sys.stderr)
        return 2
    return 0


def log_of(diagnoses: Sequence[Diagnosis], folder: str) -> dict[str, Any]:
    """The SARIF log of one run that was started in a folder."""
    return to_sarif(diagnoses, project_of(folder), gradguard.__version__, _rules({each.code for each in diagnoses}))


def _rules(codes: set[str]) -> dict[str, dict[str, Any]]:
    from gradguard.cli.rule_pages import page
    from gradguard.rules.registry import all_rules

    levels = {"error": "error", "warning": "warning", "info": "note"}
    return {
        rule.code: {
            "name": rule.name,
            "shortDescription": {"text": rule.summary},
            "help": {"text": page(rule), "markdown": page(rule)},
            "defaultConfiguration": {"level": levels[rule.severity]},
        }
        for rule in all_rules()
        if rule.code in codes
    }
