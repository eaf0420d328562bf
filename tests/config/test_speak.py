"""Warnings: through Python's machinery, at the user's line, once a cause."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from settings_helpers import diagnosis

from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.errors import GradGuardWarning
from gradguard.reporting.user_warnings import Speaker


def test_a_warning_stands_at_the_culprits_line() -> None:
    found = diagnosis(file="/home/u/train.py", line=41)
    with pytest.warns(GradGuardWarning, match="the whole diagnosis") as caught:
        assert Speaker().emit_warning(found, "the whole diagnosis")
    (warning,) = caught
    assert (warning.filename, warning.lineno, warning.category) == ("/home/u/train.py", 41, GradGuardWarning)
    assert isinstance(warning.message, GradGuardWarning) and warning.message.diagnosis is found


def test_without_a_culprit_it_stands_at_the_call() -> None:
    found = diagnosis().model_copy(update={"culprit": None})
    here = sys._getframe()
    site = CallSite(here.f_code, here.f_lasti)
    with pytest.warns(GradGuardWarning) as caught:
        Speaker().emit_warning(found, "text", site)
        Speaker().emit_warning(found, "text", SourceSpan(file="call.py", line=7, end_line=7))
        Speaker().emit_warning(found.model_copy(update={"related": [SourceSpan(file="rel.py", line=3, end_line=3)]}), "text")
        Speaker().emit_warning(found, "text")
    assert [(warning.filename, warning.lineno) for warning in caught] == [
        (__file__, site.line),
        ("call.py", 7),
        ("rel.py", 3),
        ("gradguard", 0),
    ]


def test_each_cause_is_said_once_and_repeats_are_counted() -> None:
    speaker = Speaker()
    with pytest.warns(GradGuardWarning) as caught:
        said = [speaker.emit_warning(diagnosis(line=line), "text") for line in (1, 1, 2, 1, 1, 3)]
    assert said == [True, False, True, False, False, True]
    assert [warning.lineno for warning in caught] == [1, 2, 3]
    assert speaker.summary_lines() == ["GG601 stale-gradients at train.py:1: found 4 times, shown once"]
    assert [found.repeats for found in speaker.said()] == [3, 0, 0]


def test_the_same_object_again_is_a_repeat() -> None:
    speaker, found = Speaker(), diagnosis()
    with pytest.warns(GradGuardWarning) as caught:
        assert speaker.emit_warning(found, "text")
        assert not speaker.emit_warning(found, "text")
        assert not speaker.emit_log(found)
    assert len(caught) == 1 and found.repeats == 2


def test_nothing_repeated_nothing_to_sum_up() -> None:
    speaker = Speaker()
    with pytest.warns(GradGuardWarning):
        speaker.emit_warning(diagnosis(), "text")
    assert speaker.summary_lines() == []


def test_two_guards_each_say_it() -> None:
    with pytest.warns(GradGuardWarning) as caught:
        for _ in range(2):
            assert Speaker().emit_warning(diagnosis(), "text")
    assert len(caught) == 2


def test_filters_turn_it_into_an_error_each_time() -> None:
    speaker = Speaker()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradGuardWarning)
        for _ in range(2):
            with pytest.raises(GradGuardWarning, match="text") as caught:
                speaker.emit_warning(diagnosis(), "text")
            assert caught.value.diagnosis is not None and caught.value.diagnosis.code == "GG601"


def test_filters_by_message_category_module_and_line_work() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=GradGuardWarning, module=__name__.replace(".", r"\."))
        warnings.filterwarnings("ignore", message="GG612")
        warnings.filterwarnings("ignore", category=GradGuardWarning, lineno=99)
        Speaker().emit_warning(diagnosis(file=__file__), "in this module")
        Speaker().emit_warning(diagnosis(), "GG612 something")
        Speaker().emit_warning(diagnosis(line=99), "at line 99")
        Speaker().emit_warning(diagnosis(), "heard")
    assert [str(warning.message) for warning in caught] == ["heard"]


def test_the_logger_gets_one_line_with_the_diagnosis(caplog: pytest.LogCaptureFixture) -> None:
    speaker = Speaker()
    with caplog.at_level(logging.DEBUG, logger="gradguard"), pytest.warns(GradGuardWarning):
        speaker.emit_warning(diagnosis(line=5), "a long\ntext")
        speaker.emit_warning(diagnosis(line=5), "a long\ntext")
        speaker.emit_log(diagnosis(line=6, severity="info"))
        speaker.emit_log(diagnosis(line=6, severity="info"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "GG601 stale-gradients at train.py:5: Gradients of the last step are still there."),
        ("INFO", "GG601 stale-gradients at train.py:6: Gradients of the last step are still there."),
    ]
    assert vars(caplog.records[0])["diagnosis"].culprit.line == 5


PROGRAM = """
    import sys
    from gradguard.core.diagnosis import Diagnosis, SourceSpan
    from gradguard.reporting.user_warnings import Speaker

    def found(line):
        span = SourceSpan(file=__file__, line=line, end_line=line)
        return Diagnosis(code="GG601", name="stale-gradients", headline="Old gradients.", culprit=span)

    speaker = Speaker()
    for step in range(3):
        speaker.emit_warning(found(11), "the diagnosis")
    speaker.emit_log(found(12))
    print("\\n".join(speaker.summary_lines()))
"""


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).lstrip("\n"))
    root = str(Path(__file__).resolve().parents[2])
    env = {"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *options, str(program)], capture_output=True, text=True, env=env, cwd=tmp_path, check=False)


def test_in_a_plain_program_it_is_seen_once_and_a_log_line_is_seen_too(tmp_path: Path) -> None:
    done = run(tmp_path)
    lines = done.stderr.splitlines()
    assert lines[0] == f"{tmp_path}/program.py:11: GradGuardWarning: error[GG601]: Old gradients."
    assert lines[-1] == f"GG601 stale-gradients at {tmp_path}/program.py:12: Old gradients."
    assert done.stderr.count("GG601]") == 1 and "speaker.emit_warning(found(11)" in done.stderr
    assert done.stdout == f"GG601 stale-gradients at {tmp_path}/program.py:11: found 3 times, shown once\n"


@pytest.mark.parametrize("option", ["error::UserWarning", "error:::__main__:11"])
def test_dash_w_error_stops_the_program(option: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-W", option)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "gradguard.GradGuardWarning: the diagnosis"


def test_a_warning_is_drawn_like_an_error_and_its_text_stays_plain(tmp_path: Path) -> None:
    program = """
        import warnings
        from gradguard.core.diagnosis import Diagnosis, SourceSpan
        from gradguard.reporting.user_warnings import Speaker

        span = SourceSpan(file=__file__, line=1, end_line=1, role="culprit")
        found = Diagnosis(code="GG601", name="stale-gradients", severity="warning", headline="Old gradients.", culprit=span)
        Speaker(color=True).emit_warning(found, "plain")
        Speaker(color=False).emit_warning(found, "plain")
        warnings.warn("another", stacklevel=1)
        assert warnings.formatwarning is warnings._formatwarning_orig
        warnings.formatwarning = lambda message, *rest: f"own way: {message}\\n"
        Speaker(color=True).emit_warning(found, "plain")
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program).lstrip("\n"))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert "GradGuardWarning: \x1b[1;33mwarning[GG601]\x1b[0m" in done.stderr and "GradGuardWarning: warning[GG601]: Old" in done.stderr
    assert (
        done.stderr.count(" 1 │ import warnings") == 1
        and "UserWarning: another" in done.stderr
        and done.stderr.endswith("own way: plain\n")
    )


@pytest.mark.parametrize(
    ("hide", "hidden"),
    [
        (lambda: warnings.filterwarnings("ignore"), True),
        (lambda: warnings.simplefilter("ignore", UserWarning), True),
        (lambda: warnings.filterwarnings("ignore", module="train"), True),
        (lambda: warnings.filterwarnings("ignore", module="other"), False),
        (lambda: warnings.filterwarnings("ignore", category=DeprecationWarning), False),
        (lambda: warnings.filterwarnings("ignore", category=GradGuardWarning), False),  # meant
        (lambda: warnings.filterwarnings("ignore", message=".*GG601"), False),  # meant
        (lambda: warnings.simplefilter("always"), False),
    ],
)
def test_what_a_filter_for_noise_hides_is_counted_in_one_line(hide: Callable[[], None], hidden: bool) -> None:
    speaker = Speaker()
    with warnings.catch_warnings(record=True):
        warnings.resetwarnings()
        hide()
        speaker.emit_warning(diagnosis(), "warning[GG601]: plain")
        speaker.emit_warning(diagnosis(line=2), "warning[GG601]: plain")
    line = speaker.hidden_line()
    assert (line is not None) is hidden
    if line is not None:
        assert "hid 2 findings: GG601 stale-gradients at train.py:1, GG601 stale-gradients at train.py:2;" in line
    assert speaker.hidden_line() is None
