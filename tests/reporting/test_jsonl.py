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
from gradguard.reporting.jsonl import JsonlReport, begin_anew, to_record

MESSAGE = "error[GG101]: `重み` was changed\n\n" + "x" * 20_000


def diagnosis(**fields):
    return Diagnosis(code="GG101", name="a-rule", headline="`重み` was changed", **fields)


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_record_is_the_diagnosis_and_its_message(story):
    record = to_record(story, "the text")
    assert record.pop("message") == "the text"
    assert Diagnosis.model_validate(record) == story
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
