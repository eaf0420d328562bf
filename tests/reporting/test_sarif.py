"""The SARIF log: what its schema asks for, places, and fixes that change a file as their patches do."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest

from gradguard.cli.sarif_command import convert
from gradguard.core.diagnosis import Diagnosis, Fix, PatchedFile, SourceSpan, Verification
from gradguard.fixes.patched_files import completed
from gradguard.reporting.jsonl import JsonlReport

# What the schema of SARIF 2.1.0 allows in the objects that are written, `!` where it is required. None of them may hold anything else.
OBJECTS = {
    "log": "$schema version! runs!*run",
    "run": "tool!tool columnKind originalUriBaseIds results*result",
    "tool": "driver!toolComponent",
    "toolComponent": "name! version rules*reportingDescriptor",
    "reportingDescriptor": "id! name shortDescription:multiformatMessageString help:multiformatMessageString defaultConfiguration",
    "multiformatMessageString": "text! markdown",
    "result": "ruleId ruleIndex level message!message locations*location relatedLocations*location partialFingerprints occurrenceCount "
    "fixes*fix properties",
    "message": "text!",
    "location": "id physicalLocation:physicalLocation logicalLocations*logicalLocation message:message",
    "physicalLocation": "artifactLocation!artifactLocation region:region",
    "logicalLocation": "fullyQualifiedName kind",
    "artifactLocation": "uri uriBaseId",
    "region": "startLine! startColumn endLine endColumn snippet:artifactContent",
    "artifactContent": "text",
    "fix": "description:message artifactChanges!*artifactChange properties",
    "artifactChange": "artifactLocation!artifactLocation replacements!*replacement",
    "replacement": "deletedRegion!region insertedContent:artifactContent",
}


def check(kind: str, value: Any) -> None:
    """Asserts that a value is such an object."""
    allowed = {}
    for part in OBJECTS[kind].split():
        name = part.rstrip("!").split("!")[0].split("*")[0].split(":")[0]
        inner = part[len(name) :]
        allowed[name] = ("!" in inner, "*" in inner, inner.lstrip("!*:"))
    assert isinstance(value, dict) and value.keys() <= allowed.keys(), (kind, value.keys())
    for name, (required, several, inner) in allowed.items():
        assert name in value or not required, (kind, name)
        if inner and name in value:
            assert isinstance(value[name], list) == several
            for each in value[name] if several else [value[name]]:
                check(inner, each)
    if kind == "region":
        lines = value["startLine"], value.get("endLine", value["startLine"])
        assert 1 <= lines[0] <= lines[1] and ("startColumn" in value) == ("endColumn" in value)
        assert lines[0] < lines[1] or 1 <= value.get("startColumn", 1) <= value.get("endColumn", 1)
    if kind == "result":
        assert value["level"] in ("none", "note", "warning", "error")
    if kind in ("fix", "artifactChange"):
        assert value["artifactChanges" if kind == "fix" else "replacements"]


def made(folder: Path, *diagnoses: Diagnosis) -> dict[str, Any]:
    report, log = folder / "r.jsonl", folder / "r.sarif"
    for each in diagnoses:
        JsonlReport(report).write(each, "text")
    assert convert(report, log, str(folder)) == 0
    found: dict[str, Any] = json.loads(log.read_text())
    check("log", found)
    assert found["version"] == "2.1.0"
    return found


def with_replacements(text: str, replacements: list[dict[str, Any]]) -> str:
    """What a viewer makes of a text."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        assert 1 <= line <= max(1, text.count("\n") + 1)
        return starts[line - 1] + column - 1

    for each in sorted(replacements, key=lambda each: -offset(each["deletedRegion"]["startLine"], each["deletedRegion"]["startColumn"])):
        region = each["deletedRegion"]
        start, end = (offset(region[f"{which}Line"], region[f"{which}Column"]) for which in ("start", "end"))
        text = text[:start] + each.get("insertedContent", {"text": ""})["text"] + text[end:]
    return text


@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a b c", "a B c"), ("a b c", "A b c"), ("a b c", "a b C"), ("a b c", "a b b2 c"), ("a b c", "x a b c"), ("a b c", "a b c d"),
        ("a b c", "b c"), ("a b c", "a c"), ("a b c", "a b"), ("a b c", "a"), ("a b c d e f g", "a B c d e F1 F2 g h"), ("a", "b"),
        ("a b c d e f", "a c d e"),
    ],
)  # fmt: skip
def test_a_fix_changes_the_file_as_its_patch_does(old: str, new: str, ending: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    before, after = ("\n".join(text.split()) + ending for text in (old, new))
    file.write_text(before)
    patch = "".join(difflib.unified_diff(*([line + "\n" for line in text.split()] for text in (old, new)), str(file), str(file), n=1))
    (fix,) = completed([Fix(title="change it", patch=patch, safety="unsafe")], "")
    assert fix.patch is not None
    log = made(tmp_path, Diagnosis(code="GG101", name="a-rule", headline="x", fixes=[fix]))
    (change,) = log["runs"][0]["results"][0]["fixes"][0]["artifactChanges"]
    assert change["artifactLocation"] == {"uri": "train.py", "uriBaseId": "SRCROOT"}
    assert with_replacements(before, change["replacements"]) == after


def test_places_verdicts_and_what_is_not_recommended(tmp_path: Path) -> None:
    file, outside = tmp_path / "src" / "net work.py", tmp_path.parent / "lib.py"
    file.parent.mkdir()
    (tmp_path / "pyproject.toml").touch()
    file.write_text("x = 1\ny = 2\n")
    patch = "--- a/src/net work.py\n+++ b/src/net work.py\n@@ -1,2 +1,2 @@\n-x = 1\n+x = 3\n y = 2\n"
    files = [PatchedFile(name="src/net work.py", path=str(file), sha256="0")]
    tried = Verification(verdict="verified", steps=8, why="it ran 8 steps")
    fixes = [
        Fix(title="make it 3", safety="safe", reason="r", patch=patch, files=files, verified=tried),
        Fix(title="make it 4", patch=patch, files=files, verified=Verification(verdict="failed", why="it ends with x")),
        Fix(title="think"),
    ]
    culprit = SourceSpan(file=str(file), line=1, end_line=1, column=4, end_column=5, text="1", function="Net.forward", role="culprit")
    elsewhere = SourceSpan(file=str(outside), line=3, end_line=4, label="called here")
    facts = {"name": "a-rule", "headline": "It is 1", "explanation": "Why.", "notes": ["a note"]}
    sure = Diagnosis(code="GG101", culprit=culprit, related=[elsewhere], fixes=fixes, repeats=2, step=7, torch_message="no", **facts)
    unsure = Diagnosis(code="GG604", related=[elsewhere], severity="warning", confidence="likely", **facts)
    nowhere = Diagnosis(code="GG604", severity="info", **facts)
    (run,) = made(file.parent, sure, unsure, nowhere)["runs"]
    assert run["originalUriBaseIds"]["SRCROOT"]["uri"] == tmp_path.as_uri() + "/"  # the project's top
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["GG101", "GG604"] and rules[1]["help"]["markdown"].startswith("# GG604 ")
    first, second, third = run["results"]
    assert [each["level"] for each in run["results"]] == ["error", "warning", "note"]
    assert [rules[each["ruleIndex"]]["id"] for each in run["results"]] == [each["ruleId"] for each in run["results"]]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src/net%20work.py", "uriBaseId": "SRCROOT"}
    assert place["region"] == {"startLine": 1, "endLine": 1, "startColumn": 5, "endColumn": 6, "snippet": {"text": "1"}}
    assert first["relatedLocations"][0]["physicalLocation"]["artifactLocation"] == {"uri": outside.as_uri()}
    assert first["occurrenceCount"] == 3 and "Fix: Make it 3 (safe; verified over 8 steps)" in first["message"]["text"]
    (fix,) = first["fixes"]  # what failed is not offered
    assert fix["properties"] == {
        "title": "Make it 3", "safety": "safe", "reason": "r", "verdict": "verified", "steps": 8, "why": "it ran 8 steps",
    }  # fmt: skip
    assert [each["verdict"] for each in first["properties"]["fixes"]] == ["verified", "failed", "not tried"]
    assert (first["properties"]["culprit"], first["properties"]["step"], first["properties"]["torchMessage"]) == (True, 7, "no")
    assert second["locations"][0]["message"]["text"] == "called here" and "relatedLocations" not in second
    assert second["properties"]["confidence"] == "likely" and second["properties"]["culprit"] is False
    assert third["locations"] == []
    assert len({each["partialFingerprints"]["gradguard/v1"] for each in run["results"]}) == 3


def test_what_is_verified_together_is_one_fix(tmp_path: Path) -> None:
    files = []
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("x = 1\n")
        files.append(PatchedFile(name=name, path=str(tmp_path / name), sha256="0"))
    patches = [f"--- a/{file.name}\n+++ b/{file.name}\n@@ -1 +1 @@\n-x = 1\n+x = 2\n" for file in files]
    tried = Verification(
        verdict="verified", steps=3, behind=["GG203 at two.py:1: detach"], patch="".join(patches), safety="unsafe", files=files
    )
    fix = Fix(title="change it", safety="safe", patch=patches[0], files=files[:1], verified=tried)
    log = made(tmp_path, Diagnosis(code="GG101", name="a-rule", headline="x", fixes=[fix]))
    (fixed,) = log["runs"][0]["results"][0]["fixes"]
    assert [change["artifactLocation"]["uri"] for change in fixed["artifactChanges"]] == ["one.py", "two.py"]
    assert fixed["properties"]["safety"] == "unsafe" and fixed["description"]["text"].endswith("GG203 at two.py:1: detach")


def test_a_log_takes_the_place_of_a_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, log = tmp_path / "r.jsonl", tmp_path / "r.sarif"
    JsonlReport(report).write(Diagnosis(code="GG101", name="a-rule", headline="x"), "text")
    log.write_text("mine")
    assert convert(report, log) == 2 and log.read_text() == "mine"
    assert "is no SARIF log" in capsys.readouterr().err
    log.unlink()
    assert convert(report, log) == convert(report, log) == 0  # the second in the place of the first
    assert convert(report, None) == 0 and json.loads(capsys.readouterr().out) == json.loads(log.read_text())
    assert convert(tmp_path / "none.jsonl", None) == 2 and "none.jsonl" in capsys.readouterr().err
    report.write_text("no report")
    assert convert(report, log) == 2 and sorted(path.name for path in tmp_path.iterdir()) == ["r.jsonl", "r.sarif"]
