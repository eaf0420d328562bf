"""Annotations of GitHub Actions: read back as its runner reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.reporting.github import commands, workspace_of


def read(line: str) -> tuple[str, dict[str, str], str]:
    """Command, properties and message, as `ActionCommand.TryParseV2` of GitHub's runner takes them apart."""
    match = re.fullmatch(r"::(?P<command>[^ :]+)(?: (?P<properties>.*?))?::(?P<data>.*)", line)
    assert match is not None, line
    properties = dict(part.split("=", 1) for part in match["properties"].split(","))
    for escape, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        properties = {name: value.replace(escape, char) for name, value in properties.items()}
    data = match["data"]
    for escape, char in (("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        data = data.replace(escape, char)
    return match["command"], properties, data


def diagnosis(file: str, **fields: object) -> Diagnosis:
    span = SourceSpan(file=file, line=7, end_line=7, column=4, end_column=20)
    return Diagnosis.model_validate({"code": "GG101", "name": "a-rule", "headline": "h", "culprit": span, **fields})


def test_a_message_survives_whatever_is_in_it(tmp_path: Path) -> None:
    odd = "100%, x::y\r\n%0A and\n::error::no command"
    file = str(tmp_path / "a,b:c" / "50%.py")
    (line,) = commands([diagnosis(file, headline=odd, fixes=[Fix(title="do this: a, b", safety="safe")])], str(tmp_path))
    assert (
        "\n" not in line and "\r" not in line and line.startswith("::error ") and line.count("::") == 5
    )  # three of them in the message, as they are
    command, properties, message = read(line)
    assert command == "error" and message == odd.replace("\r\n", "\n") + "\n\nFix: Do this: a, b (safe)"
    assert properties == {
        "file": "a,b:c/50%.py", "line": "7", "endLine": "7", "col": "5", "endColumn": "20", "title": "GG101 a-rule",
    }  # fmt: skip


def test_the_worst_first_and_each_with_its_command(tmp_path: Path) -> None:
    several = [diagnosis("x", severity=severity) for severity in ("info", "warning", "error", "warning")]
    assert [read(line)[0] for line in commands(several, str(tmp_path))] == ["error", "warning", "warning", "notice"]


def test_places(tmp_path: Path) -> None:
    inside = diagnosis(str(tmp_path / "code" / "train.py"))
    long = SourceSpan(file=str(tmp_path / "train.py"), line=3, end_line=5, column=1, end_column=2)
    outside = diagnosis("/elsewhere/train.py")
    cell = diagnosis("<stdin>")
    none = Diagnosis(code="GG101", name="a-rule", headline="h", confidence="possible")
    found = [read(line)[1:] for line in commands([inside, outside, cell, none], str(tmp_path))]
    assert [properties.get("file") for properties, _ in found] == ["code/train.py", "/elsewhere/train.py", None, None]
    assert found[2][1] == "<stdin>:7: h" and "Confidence: possible" in found[3][1]
    (line,) = commands([inside.model_copy(update={"culprit": None, "related": [long]})], str(tmp_path))
    _, properties, _ = read(line)  # columns of a span over several lines mean nothing to GitHub
    assert properties == {"file": "train.py", "line": "3", "endLine": "5", "title": "GG101 a-rule"}


def test_the_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "repo" / "code"
    folder.mkdir(parents=True)
    (tmp_path / "repo" / ".git").mkdir()
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    assert workspace_of(str(folder)) == str(tmp_path / "repo")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert workspace_of(str(folder)) == str(tmp_path)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "other"))  # the program runs elsewhere
    assert workspace_of(str(folder)) == str(tmp_path / "repo")
