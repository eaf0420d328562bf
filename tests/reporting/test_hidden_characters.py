"""Names, source lines and messages with characters that steer a terminal or are not seen: none gets through as it is."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path

import pytest

from gradguard import gradguard
from gradguard.core.errors import GradGuardError, GradGuardWarning
from gradguard.reporting.html.page import render_html
from gradguard.reporting.notebook import to_html_fragment
from gradguard.reporting.terminal.layout import clean, visible
from gradguard.reporting.terminal.render import print_diagnosis, render

HIDDEN = "\x1b\x07\x08\x9b\x85\xad\u034f\u061c\u200b\u200d\u200f\u202e\u2060\u2067\u2028\u3164\ufeff\ufff9\U000e0041\ud800"
IN_SOURCE = "".join(char for char in HIDDEN if char not in "\x85\u2028\ud800")  # these end a line, or cannot stand in a file


@pytest.mark.parametrize("char", HIDDEN)
def test_each_is_replaced_by_one_visible_character(char: str) -> None:
    assert visible(f"a{char}b") == "a?b" and char not in clean(f"a{char}b")


def test_text_of_people_stays() -> None:
    text = "Größe 重み ❤️ naïve é café\t¶\n"
    assert clean(text) == text


@pytest.mark.parametrize("level", ["standard", "strict", "forensic"])
def test_no_outlet_lets_them_through(
    tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"""
import torch
held = {{"<blink>{IN_SOURCE}": None}}
key = next(iter(held))
weight = torch.ones(2, requires_grad=True)
held[key] = torch.exp(weight)
held[key] += 1  # {IN_SOURCE}
held[key].sum().backward()
"""
    path = tmp_path / "ev\x1b[31mil\u202e.py"
    path.write_text(source, encoding="utf-8")
    run = compile(source, str(path), "exec")
    report = tmp_path / "r.jsonl"
    told: list[str] = []
    with pytest.raises(GradGuardError) as raised, gradguard(level=level, report=report, summary=True):
        exec(run, {"__name__": "program"})
    found = raised.value.diagnosis
    assert found.code == "GG101"
    out = io.StringIO()
    print_diagnosis(found, out, color=False)
    told += [str(raised.value), out.getvalue(), render(found, unicode=True), render_html([found]), to_html_fragment(found)]
    with caplog.at_level(logging.INFO, "gradguard"):
        for action in ("log", "warn"):
            with warnings.catch_warnings(record=True) as warned, gradguard(level=level, actions__exceptions=action, summary=True):
                warnings.simplefilter("always")
                with pytest.raises(RuntimeError):
                    exec(run, {"__name__": "program"})
            told += [f"{each.message}{each.filename}" for each in warned if each.category is GradGuardWarning]
    told += [caplog.text, capsys.readouterr().err, report.read_text()]
    assert len(told) > 7 and "GG101" in caplog.text
    for text in told:
        assert not set(text) & set(HIDDEN), ascii(text)
        assert "<blink>" not in text or "<div" not in text
    assert report.read_bytes().isascii()
