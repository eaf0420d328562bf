"""The programs under examples/: silent at level strict as they are, diagnosed with `--break`."""

from __future__ import annotations

import ast
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.zygote import run_apart

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOUND = {
    "classifier": ("GG604", "torch.optim.Adam(model.parameters(), lr=0.01)"),
    "gan": ("GG202", "fake_score = discriminator(fake)"),
    "language_model": ("GG203", "scores, state = model(inputs[:, start : start + 16], state if options.broken else detached(state))"),
    "actor_critic": ("GG505", "returns - values"),
    "lightning_module": ("GG608", "self.average = 0.95 * self.average + 0.05 * loss"),
    "two_ranks": ("GG703", "model.module(points)"),
}


def run_example(script: Path, arguments: list[str], level: str, report: Path) -> None:
    """In a process of its own."""
    from gradguard.cli.script import run_program
    from gradguard.runtime.guard import gradguard

    run_program(str(script), arguments, lambda: gradguard(level=level, report=report))


def run_ranks(script: Path, arguments: list[str], level: str, report: Path) -> None:
    """Two of them, as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                run_example(script, arguments, level, report)
                status = 0
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                sys.stdout.flush()
                os._exit(status)
        ranks.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks))


def outcome(name: str, arguments: list[str], level: str, folder: Path) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit status, what was printed and what was diagnosed."""
    report, printed = folder / "report.jsonl", folder / "printed.txt"
    run = run_ranks if name == "two_ranks" else run_example
    status = run_apart(run, (EXAMPLES / f"{name}.py", arguments, level, report), folder, 120, printed)
    said = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return status, printed.read_text(errors="replace"), said


@pytest.mark.parametrize("name", FOUND)
def test_sound(name: str, tmp_path: Path) -> None:
    if name == "lightning_module":
        pytest.importorskip("lightning")
    status, printed, said = outcome(name, [], "strict", tmp_path)
    assert (status, said) == (0, []), printed
    assert "loss" in printed or "discriminator" in printed  # it has trained


@pytest.mark.parametrize("name", FOUND)
def test_broken(name: str, tmp_path: Path) -> None:
    if name == "lightning_module":
        pytest.importorskip("lightning")
    _, printed, said = outcome(name, ["--break"], "standard", tmp_path)
    code, culprit = FOUND[name]
    assert [diagnosis["code"] for diagnosis in said] == [code], printed
    assert said[0]["culprit"]["text"] == culprit
    assert (f"[{code}]") in printed


def test_every_program_is_tried_and_says_how_it_breaks() -> None:
    pairs = {path.stem.removesuffix("_fixed") for path in EXAMPLES.glob("*_fixed.py")}
    programs = {path.stem: path for path in EXAMPLES.glob("*.py") if path.stem.removesuffix("_fixed") not in pairs | {"__init__"}}
    assert programs.keys() == FOUND.keys()
    for name, path in programs.items():
        page = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert "`--break`:" in page, name
