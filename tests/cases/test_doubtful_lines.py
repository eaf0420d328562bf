"""Which line is the bug, where a diagnosis alone cannot tell: the program is run again, traced, and with each line's smallest change."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import verified_fixes
from case import forked

from gradguard.config.settings import Settings
from gradguard.core.diagnosis import Diagnosis
from gradguard.runtime.trials import trial
from gradguard.runtime.trials.trial import Launch
from gradguard.runtime.trials.verify import Verifier
from tests.trial_programs import program


@pytest.fixture(autouse=True)
def in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run", "_PATIENCE"):
        monkeypatch.setattr(trial, name, getattr(trial, name))  # put back in the end
    verified_fixes.use_forks()


def told(folder: Path, source: str, level: str = "standard") -> tuple[Diagnosis, Diagnosis]:
    """What is said of the error that ends a program, before and after trials."""
    program(folder, train=source)
    found, elsewhere = folder / "found", folder / "elsewhere"
    elsewhere.mkdir()

    def run() -> None:
        from gradguard.cli.script import run_program
        from gradguard.runtime.diagnoser import witnesses
        from gradguard.runtime.guard import gradguard

        witnesses.append(lambda diagnosis: found.write_bytes(pickle.dumps(diagnosis)) and None)
        run_program(str(folder / "train.py"), [], lambda: gradguard(level=level))

    assert forked(run, elsewhere, 60.0) == 1
    said: Diagnosis = pickle.loads(found.read_bytes())
    found.unlink()
    elsewhere.rmdir()
    return said, Verifier(Launch("train.py", folder=str(folder)), Settings(level=level), 60.0).verified(said)  # type: ignore[arg-type]


LATE = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, number):
        h = model(x)
        rows, flat = h[0], h.view(-1)
        squares = h * h
        if number == 9:
            rows.clamp_(max=1)
        if number == 6:
            flat.clamp_(max=1)
        optimizer.zero_grad()
        squares.sum().backward()
        optimizer.step()

    for number in range(9):
        step(torch.randn(2, 4), number)
"""


@pytest.mark.parametrize("level", ["watch", "standard"])
def test_a_step_that_failed_untraced_is_run_again_traced(level: str, tmp_path: Path) -> None:
    guessed, settled = told(tmp_path, LATE, level)
    assert guessed.confidence != "certain" and guessed.culprit is not None and guessed.culprit.text == "rows.clamp_(max=1)"
    assert settled.culprit is not None and settled.culprit.text == "flat.clamp_(max=1)"
    assert (settled.confidence, settled.step, settled.torch_message) == ("certain", 7, guessed.torch_message)
    assert settled.fixes[0].verified.verdict == "verified" and "+        flat = flat.clamp(max=1)" in (settled.fixes[0].patch or "")
    assert not any("not traced" in note for note in settled.notes)


WRITTEN_BY_SCRIPT = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    @torch.jit.script
    def bounded(h):
        flat, rows = h.view(-1), h[0]
        {before}
        squares = h * h
        {after}
        {last}
        return squares

    for number in range(6):
        loss = bounded(model(torch.randn(2, 4))).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
TWICE = """
    import torch
    from torch.autograd import Function
    from torch.autograd.function import once_differentiable
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0001)

    class Scale(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return grad * 3

    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @once_differentiable  # the one
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    for number in range(4):
        x = torch.randn(2, 4, requires_grad=True)
        plain, squared = Scale.apply(model(x)), Square.apply(model(x)) ** 2
        (gradient,) = torch.autograd.grad(squared.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (plain.sum() + (gradient ** 2).sum()).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "guess", "line"),
    [
        (WRITTEN_BY_SCRIPT.format(before="pass", after="if len(h) > 9: flat.mul_(3)", last="rows *= 2"), "flat.mul_(3)", "rows *= 2"),
        (TWICE, "    @once_differentiable", "    @once_differentiable  # the one"),
    ],
    ids=["in-place", "once"],
)
def test_the_line_whose_change_alone_repairs_the_step(source: str, guess: str, line: str, tmp_path: Path) -> None:
    guessed, settled = told(tmp_path, source)
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert guessed.confidence != "certain" and guessed.culprit is not None and lines[guessed.culprit.line - 1].endswith(guess)
    assert settled.culprit is not None and lines[settled.culprit.line - 1].endswith(line)
    assert settled.confidence == "certain" and settled.headline != guessed.headline
    assert settled.notes[-1] == "of 2 lines that may be the bug, changing this one alone repairs the step"
    assert settled.fixes[0].verified.verdict == "verified" and settled.fixes[0].verified.behind == []


def test_where_the_changes_of_two_lines_repair_it_neither_is_certain(tmp_path: Path) -> None:
    source = WRITTEN_BY_SCRIPT.format(before="flat.mul_(2)", after="flat.add_(1)", last="pass")
    guessed, settled = told(tmp_path, source)
    assert settled.confidence == guessed.confidence != "certain" and settled.culprit == guessed.culprit
    assert settled.notes[-1] == (
        "train.py:10 and train.py:12 each repair the step when changed alone: which of them is the bug cannot be told by trying"
    )


def test_where_no_change_alone_repairs_it_nothing_is_certain(tmp_path: Path) -> None:
    source = WRITTEN_BY_SCRIPT.format(before="pass", after="flat.mul_(2)", last="rows *= 2")
    guessed, settled = told(tmp_path, source)
    assert settled.confidence == guessed.confidence != "certain" and settled.culprit == guessed.culprit
    assert settled.notes[-1] == "train.py:12 and train.py:13 were each changed alone: none of these changes repairs the step"
    best = settled.fixes[0].verified  # both together do
    assert best.verdict == "verified" and len(best.behind) == 1 and (best.patch or "").count("\n+") - 1 == 2
