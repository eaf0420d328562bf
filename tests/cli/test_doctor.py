"""`gradguard doctor`: every probe works here, and one that does not is told with what is lost."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

import gradguard
from gradguard.cli import doctor_command
from gradguard.cli.main import main


def test_what_a_bug_report_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADGUARD_LEVEL", "off")  # which the probes do not go by
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    shown = capfd.readouterr()
    told = json.loads(shown.out)
    assert [(probe["name"], probe["seen"]) for probe in told["probes"] if not probe["works"]] == []
    assert len(told["probes"]) == len(doctor_command._TRIALS) + 1
    assert ended.value.code == 0 and told["healthy"] and shown.err == ""
    assert told["versions"]["gradguard"] == gradguard.__version__ and told["versions"]["torch"].startswith(torch.__version__)
    assert {"python", "system", "numpy", "lightning"} <= told["versions"].keys()
    assert told["settings"]["level"] == "off (environment GRADGUARD_LEVEL)" and "GRADGUARD_LEVEL" in told["settings"]["environment"]
    assert {"torch.autograd.backward", "torch.optim.optimizer.Optimizer.zero_grad"} <= set(told["patched"])
    assert told["unwatched"] == told["faults"] == []


def test_what_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = doctor_command._TRIALS
    wrong = (
        first._replace(code="GG999"),
        first._replace(culprit="y += 2"),
        first._replace(tensor="z"),
        first._replace(program="raise KeyError('odd')\n"),
    )
    monkeypatch.setattr(doctor_command, "_TRIALS", wrong)
    monkeypatch.setattr(doctor_command, "_memory", lambda folder: doctor_command.Probe("memory", True, "", "all"))
    found = doctor_command.examine()
    assert [probe.seen for probe in found.probes[:-1]] == [
        "GG101 was said, not GG999",
        "GG101 was said of y += 1, not of y += 2",
        "GG101 does not name z",
        "KeyError: 'odd'",
    ]
    assert not found.healthy
    monkeypatch.setenv("COLUMNS", "40")
    text = doctor_command.as_text(found)
    assert text.count("FAIL") == 4 and "lost:" in text
    names = ("  torch", "torch", "environment")  # which are not broken
    long = [line for line in text.splitlines() if cell_len(line) > 40 and " " in line.strip() and not line.startswith(names)]
    assert long == []


def test_its_own_log_is_kept_apart(caplog: pytest.LogCaptureFixture) -> None:
    with doctor_command._logged() as faults:
        logging.getLogger("gradguard").error("gradguard: the part had an internal fault")
        logging.getLogger("gradguard").warning("something that was found")
    assert faults == ["gradguard: the part had an internal fault"] and caplog.records == []
