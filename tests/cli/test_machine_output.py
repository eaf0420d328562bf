"""`gradguard run --format json|sarif|github`, -q and -v: what stands on stdout, and nothing but that; exit statuses stay the program's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_programs import guarded, write

from gradguard.cli.main import main
from gradguard.core.diagnosis import Diagnosis
from gradguard.reporting.jsonl import REPORT_VERSION, from_record

NOISY = """
    import os, subprocess, sys
    import torch
    from torch import nn

    print("printed")
    os.write(1, b"written\\n")
    subprocess.run([sys.executable, "-c", "print('by a child')"])
    if hasattr(os, "fork"):
        child = os.fork()
        if not child:
            sys.exit(0)  # a fork that ends as programs do
        os.waitpid(child, 0)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
    print("unfinished", end="")
    sys.exit(int(sys.argv[1]))
"""
RAISING = """
    import torch

    x = torch.ones(3, requires_grad=True)
    y = torch.sigmoid(x)
    y += 1
    y.sum().backward()
"""


def test_json_has_stdout_to_itself(tmp_path: Path) -> None:
    write(tmp_path, "train.py", NOISY)
    done = guarded("--format", "json", "-q", "train.py", "7", cwd=tmp_path)
    assert done.status == 7
    told = json.loads(done.out)
    assert told["schema_version"] == REPORT_VERSION and told.keys() == {"schema_version", "gradguard", "diagnoses"}
    (found,) = map(from_record, told["diagnoses"])
    assert found.code == "GG601" and found.culprit is not None and found.culprit.line == 20
    assert "error[" not in done.out
    assert all(word in done.err for word in ("printed", "written", "by a child", "unfinished"))
    (line,) = [line for line in done.err.splitlines() if "GG601" in line]
    assert line == f"train.py:20: GG601 {found.headline}"
    assert not [name for name in os.listdir(tmp_path) if name != "train.py"]


def test_github_annotates_among_what_the_program_prints(tmp_path: Path) -> None:
    write(tmp_path, "code/train.py", NOISY)
    done = guarded("--format", "github", "train.py", "0", cwd=tmp_path / "code", GITHUB_WORKSPACE=str(tmp_path))
    assert done.status == 0 and "written\n" in done.out
    (line,) = [line for line in done.out.splitlines() if line.startswith("::")]
    assert line.startswith("::warning file=code/train.py,line=20,endLine=20,col=5,endColumn=20,title=GG601 stale-gradients::`optimizer`")
    assert "warning[GG601]" in done.err  # for people, as ever


def test_what_raises_and_what_cannot_start(tmp_path: Path) -> None:
    write(tmp_path, "train.py", RAISING)
    done = guarded("--format", "sarif", "-q", "train.py", cwd=tmp_path)
    assert done.status == 1 and json.loads(done.out)["runs"][0]["results"][0]["ruleId"] == "GG101"
    assert done.err == "train.py:6: GG101 " + json.loads(done.out)["runs"][0]["results"][0]["message"]["text"].split("\n")[0] + "\n"
    missing = guarded("--format", "json", "none.py", cwd=tmp_path)
    assert missing.status == 2 and missing.out == "" and "can't open file" in missing.err


def test_a_command_line_that_makes_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in ((("--format", "jsonl"), "needs --report"), (("-v", "-q"), "exclude each other"), (("--format", "xml"), "xml")):
        with pytest.raises(SystemExit) as ended:
            main(["run", *arguments, "train.py"])
        shown = capsys.readouterr()
        assert ended.value.code == 2 and told in " ".join(shown.err.replace("│", " ").split()) and shown.out == ""


def test_a_report_that_is_configured_is_what_is_printed(tmp_path: Path) -> None:
    write(tmp_path, "train.py", RAISING)
    (tmp_path / "gradguard.yaml").write_text("report: kept.jsonl\nverbosity: quiet\n")
    first = guarded("--format", "json", "train.py", cwd=tmp_path)
    again = guarded("--format", "json", "train.py", cwd=tmp_path)
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 2  # which is appended to
    assert json.loads(first.out) == json.loads(again.out) and len(json.loads(again.out)["diagnoses"]) == 1
    assert again.err.count("\n") == 1 and again.err.startswith("train.py:6: GG101 ")


def test_verbose_tells_events_and_tensors(tmp_path: Path) -> None:
    write(tmp_path, "train.py", NOISY)
    done = guarded("-v", "train.py", "0", cwd=tmp_path)
    assert "  tensor: name " in done.err and "parameter  float32  [1, 4]  yes" in done.err
    assert "  before: backward() at train.py:19\n          SGD.step() at train.py:20\n" in done.err
    plain = guarded("train.py", "0", cwd=tmp_path)
    assert "before:" not in plain.err and "  tensor: " in plain.err


def test_schemas_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert not ended.value.code
        return capsys.readouterr().out

    report = json.loads(printed("schema", "report"))
    assert set(report["properties"]) == {*Diagnosis.model_fields, "message", "schema_version"} - {"traced", "alternatives"}
    assert len(json.loads(printed("schema", "memory"))["anyOf"]) == 5
    assert "rules" in json.loads(printed("schema", "settings"))["properties"]
    help_text = " ".join(printed("--help").split())
    assert "Exit status" in help_text and "run, memory: the program's own, as under python" in help_text


@pytest.mark.parametrize(("ending", "status"), [("1 / 0", 1), ("import os; os._exit(5)", 5)])
def test_exit_status_is_the_programs(tmp_path: Path, ending: str, status: int) -> None:
    write(tmp_path, "train.py", f"{ending}\n")
    done = guarded("--format", "json", "train.py", cwd=tmp_path)
    assert done.status == status
    assert done.out == "" if "_exit" in ending else json.loads(done.out)["diagnoses"] == []
