"""What stands on the screen when a diagnosed error ends a program, for each way to put a guard around a step."""

from __future__ import annotations

import linecache
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradguard as package
from gradguard import GradGuardError, gradguard
from gradguard.runtime.session import current_session

HEAD = """
import torch
from torch import nn
from gradguard import gradguard
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
data = [torch.randn(8, 4) for _ in range(3)]
def step(x):
    h = torch.tanh(model(x))
    h += 1
    opt.zero_grad()
    h.sum().backward()
    opt.step()
"""
WAYS = {
    "with around the step": "for x in data:\n    with gradguard(model, opt, **S):\n        step(x)\n",
    "with around the loop": "with gradguard(**S):\n    for x in data:\n        step(x)\n",
    "nested": "with gradguard(**S):\n    with gradguard(**S):\n        step(data[0])\n",
    "decorator": "step = gradguard(**S)(step)\nfor x in data:\n    step(x)\n",
    "generator": "@gradguard(**S)\ndef train():\n    for x in data:\n        yield step(x)\nlist(train())\n",
    "steps": "for x in gradguard(model, opt, **S).steps(data):\n    step(x)\n",
    "guard.step": "guard = gradguard(model, opt, **S)\nfor x in data:\n    guard.step(step, x)\n",
}
ESCAPES = "def train():\n    torch.zeros(2, requires_grad=True).add_(1)\nwith gradguard(**S):\n    train()\n"


@pytest.fixture(autouse=True)
def pythons_own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch.distributed, in another test, has put its own there


@pytest.fixture(autouse=True)
def plain_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis that another test raised and nobody showed leaves a hook behind, which the next exception would use."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def error_of(tmp_path: Path, source: str, **settings: Any) -> GradGuardError:
    path = tmp_path / "train.py"
    path.write_text(HEAD + source)
    linecache.checkcache(str(path))
    current_session()._runs.clear()
    with pytest.raises(GradGuardError) as raised:
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "train", "S": settings})
    error = raised.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # this test's own frame
    return error


def shown(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


@pytest.mark.parametrize("level", ["watch", "standard", "strict", "forensic"])
@pytest.mark.parametrize("way", WAYS)
def test_the_users_frames_and_the_diagnosis(way: str, level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(tmp_path, WAYS[way], level=level)
    assert isinstance(error, RuntimeError) and isinstance(error.__cause__, RuntimeError)
    assert "modified by an inplace operation" in str(error)
    text = shown(error, capsys)
    frames, _, rest = text.partition("\nerror[GG101]: ")
    assert (
        frames.startswith("Traceback (most recent call last):\n")
        and "h.sum().backward()" in frames.splitlines()[-2] + frames.splitlines()[-1]
    )
    files = [line for line in frames.splitlines() if line.startswith('  File "')]
    assert files and all("train.py" in line for line in files) and len(set(files)) == len(files)
    assert len(frames.splitlines()) < 14 and "direct cause" not in text
    assert rest.count("modified by an inplace operation") == 1
    assert sys.excepthook is sys.__excepthook__  # used once


def test_an_error_that_is_seen_where_it_leaves_keeps_the_frames_it_came_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(error_of(tmp_path, ESCAPES), capsys)
    frames = text.partition("\nerror[")[0]
    assert "in train\n    torch.zeros" in frames and frames.count("train.py") == 2


def test_what_others_print_of_it_is_short_too(tmp_path: Path) -> None:
    error = error_of(tmp_path, WAYS["with around the loop"])
    lines = traceback.format_exception(error)
    assert sum(line.startswith('  File "') for line in lines) <= 4  # the program's, and that of leaving the `with`
    assert not any("site-packages" in line for line in lines)


def test_full_tracebacks_by_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(tmp_path, WAYS["with around the loop"], traceback="full")
    assert sys.excepthook is sys.__excepthook__
    text = shown(error, capsys)
    assert text.count("Traceback (most recent call last):") == 2 and "_engine_run_backward" in text and "direct cause" in text


def test_the_programs_own_hook_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    hook = lambda kind, error, trace: seen.append(error)
    monkeypatch.setattr(sys, "excepthook", hook)
    error_of(tmp_path, WAYS["with around the loop"])
    assert sys.excepthook is hook and not seen


def test_under_torch_distributed_each_line_has_its_rank_and_nothing_stands_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def _distributed_excepthook(*args):\n    print('[rank0]:', end=' ', file=sys.stderr)\n    sys.__excepthook__(*args)\n"
    names: dict[str, Any] = {"sys": sys, "__name__": "torch.distributed.distributed_c10d"}
    exec(source, names)
    monkeypatch.setattr(sys, "excepthook", names["_distributed_excepthook"])
    text = shown(error_of(tmp_path, WAYS["with around the loop"]), capsys)
    assert text.startswith("[rank0]: Traceback") and text.count("modified by an inplace operation") == 1
    assert sys.excepthook is names["_distributed_excepthook"]


def test_the_hook_goes_when_the_error_was_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error_of(tmp_path, WAYS["with around the loop"])
    other = ValueError("another")
    text = shown(other, capsys)  # before that, other errors are shown as ever
    assert text == "ValueError: another\n"
    error_of(tmp_path, WAYS["with around the loop"])
    with gradguard():
        pass
    assert sys.excepthook is sys.__excepthook__


def test_a_diagnosis_that_another_error_follows_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(tmp_path, WAYS["with around the loop"])
    last = ValueError("no training")
    last.__cause__ = error
    text = shown(last, capsys)
    assert text.count("modified by an inplace operation") == 1 and text.endswith("ValueError: no training\n")


SILENT = "with gradguard(**S):\n    for _ in range(12):\n        model(data[0]).pow(2).mean().backward()\n        opt.step()\n"


def test_what_strict_raises_is_an_error(tmp_path: Path) -> None:
    error = error_of(tmp_path, SILENT, level="strict")
    assert str(error).startswith("error[GG601]") and error.diagnosis.severity == "error"


@pytest.mark.parametrize("level", ["watch", "standard"])
def test_ignored_warnings_leave_a_closing_line(level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + SILENT)
    for logged in (False, True):
        current_session()._runs.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore")
            settings = {"level": level, "actions__silent": "log" if logged else "warn"}
            exec(compile(path.read_text(), str(path), "exec"), {"__name__": "train", "S": settings})
        told = capsys.readouterr().err.splitlines()
        lines = [line for line in told if "warning filter" in line]
        assert len(lines) == (0 if logged else 1)
        assert logged or ("GG601 stale-gradients" in lines[0] and "train.py:17" in lines[0])


def test_ignore_comments_that_never_ran_are_not_called_useless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = HEAD.replace("h += 1", "h = h + 1") + (
        "with gradguard(level='strict') as guard:\n"
        "    for x in data:\n"
        "        step(x)  # gradguard: ignore[GG601]\n"
        "        if len(data) > 9:\n"
        "            step(x)  # gradguard: ignore[GG602]\n"
        "guard.close()\n"
    )
    path = tmp_path / "train.py"
    path.write_text(source)
    linecache.checkcache(str(path))
    current_session()._runs.clear()
    with caplog.at_level(logging.WARNING, "gradguard"):
        exec(compile(source, str(path), "exec"), {"__name__": "train"})
    assert "ignore[GG601]` silences nothing" in caplog.text and "GG602" not in caplog.text


def test_without_brackets_it_says_what_to_write() -> None:
    def step() -> None: ...

    class Trainer: ...

    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: gradguard(step), "`step` is a function.*`@gradguard\\(\\)`"),
        (lambda: gradguard(Trainer), "`Trainer` is a class"),
        (lambda: package(), "from gradguard import gradguard"),  # type: ignore[operator]
        (lambda: package(step), "from gradguard import gradguard"),  # type: ignore[operator]
    ]
    for call, message in wrong:
        with pytest.raises(TypeError, match=message):
            call()
