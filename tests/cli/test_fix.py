"""`gradguard run --verify` and `gradguard fix`: from a failing program to a repaired file, and what is refused on the way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_programs import guarded, python, write

from gradguard.cli import fix_command
from gradguard.cli.fix_command import fix_report
from gradguard.core.diagnosis import Diagnosis, SourceSpan
from gradguard.fixes.patched_files import hash_of
from gradguard.reporting.jsonl import JsonlReport, to_record
from gradguard.runtime.trials.verify import announce

PROGRAM = """
    import torch, torch.nn as nn
    from gradguard import gradguard
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = []

    def step(x):
        y = torch.sigmoid(model(x))
        y += 1  # in place
        optimizer.zero_grad()
        y.sum().backward()
        optimizer.step()

    for _ in range(8):
        step(torch.randn(2, 4))
        print("stepped")
"""


def test_from_the_failure_to_the_repaired_file(tmp_path: Path) -> None:
    script = write(tmp_path, "code/train.py", PROGRAM)
    before = script.read_bytes()
    failed = guarded("--verify", "--report", "r.jsonl", "code/train.py", cwd=tmp_path)
    assert failed.status == 1 and failed.out == ""
    assert "trying its fix, which takes at most 2 minutes\n" in failed.err and failed.err.count("error[GG101]") == 1
    assert "Make a new tensor instead: `y = y + 1` (safe; verified over 8 steps)" in failed.err
    (line,) = (tmp_path / "r.jsonl").read_text().splitlines()
    record = json.loads(line)
    (fix, *_) = record["fixes"]
    assert fix["verified"]["verdict"] == "verified" and fix["verified"]["steps"] == 8
    assert fix["files"] == [{"name": "code/train.py", "path": str(script), "sha256": hash_of(before)}]
    assert fix["reason"] and "verified over 8 steps" in record["message"]
    assert script.read_bytes() == before

    shown = python("-m", "gradguard", "fix", "r.jsonl", cwd=tmp_path)
    assert shown.status == 0 and "-    y += 1  # in place\n+    y = y + 1  # in place\n" in shown.out and "--- a/code/train.py" in shown.out
    applied = python("-m", "gradguard", "fix", "--apply", "r.jsonl", cwd=tmp_path)
    assert applied.status == 0 and "1 fix made in code/train.py; the file as it was: code/train.py.bak" in applied.out
    assert script.read_bytes() == before.replace(b"y += 1", b"y = y + 1")
    assert (tmp_path / "code/train.py.bak").read_bytes() == before
    assert python("code/train.py", cwd=tmp_path).out == "stepped\n" * 8
    again = python("-m", "gradguard", "fix", "--apply", "r.jsonl", cwd=tmp_path)
    assert again.status == 2 and "changed since the run" in again.err


@pytest.mark.slow
def test_a_program_that_only_trains_wrongly(tmp_path: Path) -> None:
    silent = PROGRAM.replace("y += 1  # in place", "y = y.detach().requires_grad_() if False else y").replace(
        "        optimizer.zero_grad()\n", ""
    )
    write(tmp_path, "train.py", silent)
    done = python("-m", "gradguard", "fix", "train.py", cwd=tmp_path)
    assert done.status == 0 and done.out.count("stepped") == 8, done.err
    assert done.err.count("trying its fix") == 1 and done.err.count("verified over 8 steps") == 1
    assert "+    optimizer.zero_grad()" in done.out and "# review first: it changes results; verified over 8 steps (" in done.out
    assert done.err.endswith("gradguard fix: to make these changes: gradguard fix --apply --unsafe train.py\n")


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a report of one diagnosis, with changes in its fix."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_bytes(b"x = 1\ny = 2\n")
    culprit = SourceSpan(file=str(script), line=1, end_line=1, text="x = 1")

    def write_report(**changes: Any) -> Path:
        patch = "--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,2 @@\n-x = 1\n+x = 3\n y = 2\n"
        files = [{"name": "train.py", "path": str(script), "sha256": hash_of(script.read_bytes())}]
        fix = {"title": "make it 3", "safety": "safe", "reason": "r", "patch": patch, "files": files, **changes}
        diagnosis = Diagnosis.model_validate({"code": "GG101", "name": "a-rule", "headline": "h", "culprit": culprit, "fixes": [fix]})
        path = tmp_path / "r.jsonl"
        path.write_text(json.dumps(to_record(diagnosis, "text")) + "\n")
        return path

    return write_report


def test_what_a_report_must_not_bring_about(report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside.py"
    outside.write_bytes(b"x = 1\ny = 2\n")
    digest = hash_of(outside.read_bytes())
    (tmp_path / "link.py").symlink_to(outside)
    patch = "--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,2 @@\n-x = 1\n+x = 3\n y = 2\n"

    def named(path: object) -> dict[str, Any]:
        return {"files": [{"name": "train.py", "path": str(path), "sha256": digest}]}

    refused: list[tuple[dict[str, Any], str]] = [
        ({"patch": patch.replace("train.py", f"../{outside.name}")}, "which the report does not know"),
        (named(outside), "outside of"),
        (named(tmp_path / ".." / outside.name), "not a plain absolute path"),
        (named(tmp_path / "link.py"), "a symbolic link"),
        (named("/etc/passwd"), "not a Python file of your own"),
        (named(pytest.__file__), "not a Python file of your own"),
        ({"files": [{"name": "train.py", "path": str(tmp_path / "train.py"), "sha256": "0"}]}, "changed since the run"),
        ({"patch": patch.replace("x = 1", "x = 5")}, "is not as the patch has it"),
        ({"patch": patch.replace("x = 3", "x = (")}, "would not be Python"),
        ({"patch": "rm -rf /"}, "no line of a unified diff"),
        ({"safety": "unsafe"}, "its fix changes results (r)\ngradguard fix: to make it all the same: gradguard fix --apply --unsafe"),
        ({"verified": {"verdict": "failed", "why": "it ends with x"}}, "its fix was tried, and failed: it ends with x"),
        ({"patch": None, "files": []}, "its fix cannot be written as a patch"),
    ]
    for changes, said in refused:
        assert fix_report(report(**changes), apply=True, unsafe=False, ask=False) != 0
        assert said in capsys.readouterr().err
    for content in (b"", b"{}", b"[1]\n", b"\x00\xff", b'{"code": "GG101"}\n'):
        (tmp_path / "bad.jsonl").write_bytes(content)
        assert fix_report(tmp_path / "bad.jsonl", apply=True, unsafe=False, ask=False) == (0 if not content else 2)
    assert "is no report" in capsys.readouterr().err
    assert fix_report(tmp_path / "none.jsonl", apply=True, unsafe=False, ask=False) == 2
    assert "No such file" in capsys.readouterr().err
    assert outside.read_bytes() == (tmp_path / "train.py").read_bytes() == b"x = 1\ny = 2\n"
    assert not list(tmp_path.glob("*.bak*"))
    outside.unlink()


def test_what_is_recommended_is_shown_whatever_it_changes(report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried = {"verdict": "verified", "steps": 36, "why": "it ran 36 steps"}
    for safety, words, option in (
        ("safe", "safe", ""),
        ("unsafe", "review first: it changes results", " --unsafe"),
        ("manual", "decide yourself: it depends on what you mean", " --unsafe"),
    ):
        for verified, verdict in ((tried, "verified over 36 steps"), ({}, "not tried"), ({"why": "no time"}, "not verified: no time")):
            path = report(safety=safety, verified=verified)
            assert fix_report(path, apply=False, unsafe=False, ask=False, command=["-m", "a b"]) == 0
            said = capsys.readouterr()
            assert said.out.startswith(f"# GG101 a-rule at train.py:1: Make it 3\n# {words}; {verdict} (r)\n--- a/train.py\n")
            assert said.err == f"gradguard fix: to make these changes: gradguard fix --apply{option} -m 'a b'\n"
    assert (tmp_path / "train.py").read_bytes() == b"x = 1\ny = 2\n"


def test_a_terminal_is_asked(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def answer(yes: bool) -> None:
        monkeypatch.setattr(fix_command.typer, "confirm", lambda text: asked.append(text) or yes)

    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    answer(False)
    assert fix_report(report(), apply=True, unsafe=False, ask=True) == 1
    assert (tmp_path / "train.py").read_bytes() == b"x = 1\ny = 2\n"
    answer(True)
    assert fix_report(report(), apply=True, unsafe=False, ask=True) == 0
    assert (tmp_path / "train.py").read_bytes() == b"x = 3\ny = 2\n"
    assert asked == ["Change train.py?"] * 2
    assert "+x = 3" in capsys.readouterr().out


def test_a_report_is_revised_in_its_line(tmp_path: Path) -> None:
    one, two = (Diagnosis(code=code, name="a-rule", headline="h") for code in ("GG101", "GG102"))
    report = JsonlReport(tmp_path / "r.jsonl")
    report.write(one, "first")
    report.write(two, "second")
    one.repeats = 3  # met again since
    report.revise(one, one.model_copy(update={"notes": ["more"]}), "third")
    report.revise(Diagnosis(code="GG103", name="a-rule", headline="h"), two, "fourth")
    records = [json.loads(line) for line in report.path.read_text().splitlines()]
    assert [(record["code"], record["notes"], record["message"]) for record in records] == [
        ("GG101", ["more"], "third"),
        ("GG102", [], "second"),
        ("GG102", [], "fourth"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_what_is_said_before_trials(capsys: pytest.CaptureFixture[str]) -> None:
    patched = {"title": "a", "patch": "p", "files": [{"name": "a.py", "path": "/a.py", "sha256": "0"}]}
    for fixes, said in (
        ([], ""),
        ([{"title": "a"}], "gradguard: GG101 a-rule: its fix is not tried: it is in words, not a patch\n"),
        ([patched], "gradguard: GG101 a-rule: trying its fix, which takes at most 2 minutes\n"),
        ([patched] * 2, "gradguard: GG101 a-rule: trying its 2 fixes until one repairs the program, which takes at most 2 minutes each\n"),
    ):
        announce(Diagnosis.model_validate({"code": "GG101", "name": "a-rule", "headline": "h", "fixes": fixes}))
        assert capsys.readouterr().err == said


def test_a_run_as_a_sarif_log(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", PROGRAM)
    done = guarded("--verify", "--report", "out.sarif", "train.py", cwd=tmp_path)
    assert done.status == 1
    (result,) = json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]
    (fix, *_) = result["fixes"]
    assert (fix["properties"]["verdict"], fix["properties"]["steps"]) == ("verified", 8)
    shown = python("-m", "gradguard", "fix", "out.jsonl", cwd=tmp_path)  # the report that it was made of
    assert shown.status == 0 and "+    y = y + 1  # in place" in shown.out

    script.write_text("print('sound')\n")
    assert guarded("--report", "other.json", "--format", "sarif", "train.py", cwd=tmp_path).out == "sound\n"
    assert json.loads((tmp_path / "other.json").read_text())["runs"][0]["results"] == []
    (tmp_path / "mine.sarif").write_text("mine")
    refused = guarded("--report", "mine.sarif", "train.py", cwd=tmp_path)
    assert refused.status == 2 and "is no SARIF log" in " ".join(refused.err.replace("│", " ").split()) and refused.out == ""
