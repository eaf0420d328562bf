"""A report as SARIF 2.1.0 (OASIS), which code hosts and editors read: places, and the patches with their verdicts as `fixes`.

A fix that was tried and failed is no SARIF fix, as viewers offer to make those: it stands in the result's properties, as the fixes do
that are in words only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradguard.core.diagnosis import Diagnosis, Fix, Severity, SourceSpan
from gradguard.core.errors import ConfigError
from gradguard.core.foreign_exceptions import internal_error
from gradguard.fixes.application import Change, PatchError, Text, changes_of
from gradguard.reporting import wording
from gradguard.reporting.terminal.layout import clean

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}
_ROOT = "SRCROOT"


def to_sarif(diagnoses: Sequence[Diagnosis], root: str, version: str, rules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The SARIF log of one run.

    Args:
        root: the folder that paths are relative to.
        version: gradguard's.
        rules: what is known of a rule, by its code, as a `reportingDescriptor`.
    """
    codes = sorted({diagnosis.code for diagnosis in diagnoses})
    names = {diagnosis.code: diagnosis.name for diagnosis in diagnoses}
    writer = _Writer(root, codes)
    driver = {
        "name": "gradguard",
        "version": version,
        "rules": [{"id": code, "name": names[code], **rules.get(code, {})} for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {_ROOT: {"uri": Path(root).as_uri().rstrip("/") + "/"}},
        "results": [writer.result(diagnosis) for diagnosis in diagnoses],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


class _Writer:
    def __init__(self, root: str, codes: Sequence[str]) -> None:
        self._root = os.path.realpath(root)
        self._codes = codes

    def result(self, diagnosis: Diagnosis) -> dict[str, Any]:
        place = diagnosis.place
        related = [span for span in diagnosis.related if span is not place]
        result = {
            "ruleId": diagnosis.code,
            "ruleIndex": self._codes.index(diagnosis.code),
            "level": _LEVELS[diagnosis.severity],
            "message": {"text": _message(diagnosis)},
            "locations": [] if place is None else [self._location(place)],
            "relatedLocations": [{"id": i, **self._location(span)} for i, span in enumerate(related, 1)],
            "partialFingerprints": {"gradguard/v1": self._fingerprint(diagnosis)},
            "occurrenceCount": diagnosis.repeats + 1,
            "fixes": [fix for each in diagnosis.fixes if (fix := self._fix(each)) is not None],
            "properties": _properties(diagnosis),
        }
        return {key: value for key, value in result.items() if value or key == "locations" or key == "ruleIndex"}

    def _location(self, span: SourceSpan) -> dict[str, Any]:
        region: dict[str, Any] = {"startLine": span.line, "endLine": span.end_line}
        if span.column is not None and span.end_column is not None:
            region |= {"startColumn": span.column + 1, "endColumn": span.end_column + 1}
        if span.text:
            region["snippet"] = {"text": span.text}
        location: dict[str, Any] = {"physicalLocation": {"artifactLocation": self._artifact(span.file), "region": region}}
        if span.function:
            location["logicalLocations"] = [{"fullyQualifiedName": span.function, "kind": "function"}]
        if span.label:
            location["message"] = {"text": clean(span.label)}
        return location

    def _artifact(self, path: str) -> dict[str, Any]:
        if not os.path.isabs(path):  # a cell, or a program from standard input
            return {"uri": quote(path)}
        real = os.path.realpath(path)
        inside = os.path.join(self._root, "")
        if real.startswith(inside):
            return {"uri": quote(real[len(inside) :].replace(os.sep, "/")), "uriBaseId": _ROOT}
        return {"uri": Path(real).as_uri()}

    def _fingerprint(self, diagnosis: Diagnosis) -> str:
        """What stays where lines move: the rule and the code that it is about."""
        place = diagnosis.place
        about = () if place is None else (self._artifact(place.file)["uri"], place.function or "", place.text or "")
        return hashlib.sha256("\0".join((diagnosis.code, *about)).encode()).hexdigest()[:32]

    def _fix(self, fix: Fix) -> dict[str, Any] | None:
        whole = fix.verified.patch is not None
        patch, files = (fix.verified.patch, fix.verified.files) if whole else (fix.patch, fix.files)
        if patch is None or fix.verified.verdict == "failed":
            return None
        known = {file.name: file for file in files}
        try:
            changed = changes_of(patch)
        except internal_error(PatchError):
            return None
        if not changed.keys() <= known.keys():
            return None
        return {
            "description": {"text": "; ".join([wording.fix_title(fix), *fix.verified.behind])},
            "artifactChanges": [
                {"artifactLocation": self._artifact(known[name].path), "replacements": _replacements(changes, known[name].path)}
                for name, changes in changed.items()
            ],
            "properties": _facts(fix),
        }


def _replacements(changes: Sequence[Change], path: str) -> list[dict[str, Any]]:
    lines = _lines_of(path)
    return [_replacement(change, lines) for change in changes]


def _replacement(change: Change, lines: Sequence[str] | None) -> dict[str, Any]:
    """A change as a deleted region and what is put there; nothing is deleted where lines are put between lines."""
    first, last = change.start + 1, change.start + len(change.old)
    new = "".join(line + "\n" for line in change.new)
    if lines is not None and first > len(lines):  # at the end of the file
        first = last = max(1, len(lines))
        column = end = len(lines[-1]) + 1 if lines else 1
        new = "\n" + new[:-1] if lines else new
    elif change.old and change.new:
        column, end, new = 1, len(change.old[-1]) + 1, new[:-1]
    elif lines is not None and change.old and last >= len(lines) and change.start > 0:  # the last lines, with the line end before them
        first, column, end = change.start, len(lines[change.start - 1]) + 1, len(change.old[-1]) + 1
    else:
        column, end, last = 1, 1, last + 1
    region = {"startLine": first, "startColumn": column, "endLine": last, "endColumn": end}
    return {"deletedRegion": region, **({"insertedContent": {"text": new}} if new else {})}


def _lines_of(path: str) -> list[str] | None:
    try:
        return [line for line, _ in Text.read(Path(path).read_bytes()).lines]
    except internal_error(OSError, PatchError):
        return None


def _message(diagnosis: Diagnosis) -> str:
    parts = [diagnosis.headline, diagnosis.explanation]
    if diagnosis.confidence != "certain":
        parts.append(f"Confidence: {wording.CONFIDENCE[diagnosis.confidence]}.")
    parts += [f"{'Or' if i else 'Fix'}: {wording.fix_title(fix)} ({wording.standing(fix)})" for i, fix in enumerate(diagnosis.fixes)]
    return clean("\n\n".join(part for part in parts if part.strip()))


def _facts(fix: Fix) -> dict[str, Any]:
    facts = {
        "title": wording.fix_title(fix),
        "safety": fix.verified.safety or fix.safety,
        "reason": fix.reason,
        "detail": fix.detail,
        "verdict": fix.verified.verdict,
        "steps": fix.verified.steps,
        "why": fix.verified.why,
        "behind": fix.verified.behind,
    }
    return {key: value for key, value in facts.items() if value}


def _properties(diagnosis: Diagnosis) -> dict[str, Any]:
    facts = {
        "confidence": diagnosis.confidence,
        "culprit": diagnosis.culprit is not None,
        "step": diagnosis.step,
        "rank": diagnosis.rank,
        "notes": diagnosis.notes,
        "avoid": diagnosis.avoid,
        "torchMessage": diagnosis.torch_message,
        "fixes": [_facts(fix) for fix in diagnosis.fixes],
    }
    return {key: value for key, value in facts.items() if value not in (None, [])}


def refuse_other_files(path: Path) -> None:
    """Lets a SARIF log pass, an empty or missing file, and what is no file.

    Raises:
        ConfigError: anything else.
    """
    try:
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("rb") as file:
            ours = b"sarif" in file.read(300)
    except internal_error(OSError):  # writing says so
        return
    if not ours:
        raise ConfigError(f"{path} exists and is no SARIF log: nothing was written to it; name another file or delete it")


def write(log: Mapping[str, Any], path: Path) -> None:
    """Puts a log in the place of an earlier one, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(log, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
