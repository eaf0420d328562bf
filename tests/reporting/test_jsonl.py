"""The report file: what a line holds, and that lines survive threads, forks, processes and kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading

import pytest

from gradguard import gradguard
from gradguard.core.diagnosis import Diagnosis, SourceSpan
from gradguard.core.errors import ConfigError
from gradguard.core.memory_report import HeldByLine, HeldByName, MemoryReport, Saving
from gradguard.reporting.jsonl import (
    MEMORY_VERSION,
    REPORT_VERSION,
    JsonlReport,
    ReportError,
    begin_anew,
    from_record,
    memory_records,
    read_report,
    to_record,
)
from gradguard.reporting.report_schema import memory_schema, report_schema

MESSAGE = "error[GG101]: `重み` was changed\n\n" + "x" * 20_000


def diagnosis(**fields):
    return Diagnosis(code="GG101", name="a-rule", headline="`重み` was changed", **fields)


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_record_is_the_diagnosis_and_its_message(story):
    record = to_record(story, "the text")
    assert from_record(record) == story
    assert record["message"] == "the text" and record["schema_version"] == REPORT_VERSION
    assert record["code"] == "GG101" and record["name"] == "inplace-modified-saved-tensor"
    assert record["culprit"]["file"].endswith("train.py")
    assert (record["culprit"]["line"], record["culprit"]["end_line"]) == (19, 19)
    assert to_record(diagnosis(), "")["culprit"] is None


def test_lines_are_there_at_once_and_folders_are_made(tmp_path):
    path = tmp_path / "runs" / "7" / "report.jsonl"
    report = JsonlReport(path)
    assert not path.parent.exists()  # a run without a diagnosis leaves nothing behind
    report.write(diagnosis(step=1), "one\ntwo")
    assert [record["message"] for record in records(path)] == ["one\ntwo"]
    report.write(diagnosis(step=2), MESSAGE)
    report.close()
    report.close()
    assert [record["step"] for record in records(path)] == [1, 2]
    with JsonlReport(path) as again:  # appends
        again.write(diagnosis(step=3), "")
    assert [record["step"] for record in records(path)] == [1, 2, 3]


def test_a_relative_path_stays_where_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = JsonlReport("report.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    report.write(diagnosis(), "")
    assert len(records(tmp_path / "report.jsonl")) == 1


def test_a_path_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        JsonlReport(tmp_path / "file" / "report.jsonl").write(diagnosis(), "")
    with pytest.raises(ConfigError, match="is a folder"):
        JsonlReport(tmp_path)


def write_many(report, worker, count):
    for step in range(count):
        report.write(diagnosis(step=step, rank=worker, culprit=SourceSpan(file="train.py", line=1, end_line=1)), MESSAGE)


def check_complete(path, workers, count):
    seen = [(record["rank"], record["step"]) for record in records(path)]
    assert sorted(seen) == [(worker, step) for worker in range(workers) for step in range(count)]
    for worker in range(workers):  # each writer's own lines stay in order
        assert [step for rank, step in seen if rank == worker] == list(range(count))


def test_threads(tmp_path):
    report = JsonlReport(tmp_path / "report.jsonl")
    threads = [threading.Thread(target=write_many, args=(report, worker, 25)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_complete(report.path, 4, 25)


@pytest.mark.skipif(sys.platform == "win32", reason="appends of several processes are not atomic there")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(tmp_path, method):
    context = multiprocessing.get_context(method)
    report = JsonlReport(tmp_path / "report.jsonl")
    processes = [context.Process(target=write_many, args=(report, worker, 40)) for worker in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    check_complete(report.path, 3, 40)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_line_outlives_a_killed_process(tmp_path):
    report = JsonlReport(tmp_path / "report.jsonl")
    child = os.fork()
    if child == 0:
        report.write(diagnosis(), "last words")
        os._exit(9)  # no buffers are flushed
    os.waitpid(child, 0)
    assert records(report.path)[0]["message"] == "last words"


@pytest.mark.parametrize("text", ["print('months of work')\n", '{"loss": 0.1}\n', "\n"])
def test_what_is_no_report_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text)
    for make in (JsonlReport, begin_anew, lambda path: gradguard(report=path)):
        with pytest.raises(ConfigError, match=r"train\.py exists and is no report"):
            make(path)
    assert path.read_text() == text


def test_a_report_is_appended_to_or_begun_anew(tmp_path):
    path = tmp_path / "report.jsonl"
    path.touch()
    JsonlReport(path).write(diagnosis(), "first run")
    JsonlReport(path).write(diagnosis(), "second run")
    assert [record["message"] for record in records(path)] == ["first run", "second run"]
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    begin_anew(link)
    assert link.is_symlink() and path.read_text() == ""
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.jsonl", "report.jsonl"]


def check_schema(value, schema, root):
    """Asserts what these schemas say of a value: types, enumerations, required and known properties."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        errors = []
        for option in schema["anyOf"]:
            try:
                return check_schema(value, option, root)
            except AssertionError as error:
                errors.append(error)
        raise AssertionError(errors)
    if "const" in schema:
        assert value == schema["const"]
    if "enum" in schema:
        assert value in schema["enum"]
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None), "number": (int, float)}
    if "type" in schema:
        assert isinstance(value, types[schema["type"]]), (value, schema)
    if schema.get("type") == "array":
        for each in value:
            check_schema(each, schema["items"], root)
    if "properties" in schema:
        assert set(schema.get("required", ())) <= value.keys()
        assert schema["additionalProperties"] is False and value.keys() <= schema["properties"].keys(), value.keys()
        for name, each in value.items():
            check_schema(each, schema["properties"][name], root)
    return None


def test_a_line_is_what_its_schema_says(story):
    schema = report_schema()
    check_schema(json.loads(json.dumps(to_record(story, "text"))), schema, schema)
    assert {"code", "schema_version", "message"} <= set(schema["required"])
    assert schema["properties"]["schema_version"]["const"] == REPORT_VERSION
    with pytest.raises(AssertionError):
        check_schema({**to_record(story, "text"), "severity": "fatal"}, schema, schema)
    assert all("description" in entry for entry in schema["properties"].values())


def test_a_memory_report_is_what_its_schema_says():
    report = MemoryReport(
        step=1,
        moment="as backward began",
        kinds={"saved": 8},
        lines=[HeldByLine(nbytes=8, tensors=1, file="train.py", line=3)],
        modules=[HeldByName(nbytes=8, tensors=1, name="model")],
        operations=[HeldByName(nbytes=8, tensors=1, name=None)],
        savings=[Saving(title="less", nbytes=4)],
    )
    schema = memory_schema()
    lines = list(memory_records(report))
    assert [line["memory"] for line in lines] == ["sums", "line", "module", "operation", "saving"]
    for line in lines:
        assert line["schema_version"] == MEMORY_VERSION
        check_schema(line, schema, schema)
    assert {entry["properties"]["memory"]["const"] for entry in schema["$defs"].values() if "memory" in entry["properties"]} == {
        line["memory"] for line in lines
    }


def test_a_reader_says_why_a_report_cannot_be_read(tmp_path, story):
    path = tmp_path / "r.jsonl"
    good = json.dumps(to_record(story, "text"))
    old = {key: value for key, value in to_record(story, "text").items() if key != "schema_version"}
    newer = {**to_record(story, "text"), "schema_version": REPORT_VERSION + 1}
    for line, told in (
        (json.dumps(old), "was written by an older gradguard (no version in its lines, and this one reads version 1): run the program"),
        (json.dumps(newer), "was written by a newer gradguard (version 2 in its lines, and this one reads version 1): install the"),
        (json.dumps({**to_record(story, ""), "confidence": "so-so"}), "is no report that gradguard wrote (confidence: Input should be"),
        (json.dumps({**to_record(story, ""), "extra": 1}), "is no report that gradguard wrote (extra: Extra inputs"),
        ('{"memory":"sums","schema_version":1}', "is a memory report, which has no diagnoses"),
        ("[]", "is no report of `gradguard run --report`"),
        ("{", "is no report of `gradguard run --report` (no JSON)"),
    ):
        path.write_text(f"{good}\n\n{line}\n")
        with pytest.raises(ReportError) as raised:
            read_report(path)
        assert str(raised.value).startswith(f"{path}:3 {told}"), raised.value
    path.write_text(good + "\n")
    assert read_report(path) == [story]
    with pytest.raises(ReportError, match="No such file"):
        read_report(tmp_path / "none.jsonl")


def test_a_line_is_written_anew_in_its_place(tmp_path):
    path = tmp_path / "r.jsonl"
    report = JsonlReport(path)
    first, second = diagnosis(step=1), diagnosis(step=2)
    report.write(first, "one")
    report.write(second, "two")
    report.revise(first, first.model_copy(update={"notes": ["more"]}), "one, revised")
    assert [(line["step"], line["message"], line["notes"]) for line in records(path)] == [(1, "one, revised", ["more"]), (2, "two", [])]
