"""Programs whose own modules have the names of modules that gradguard imports: each side gets its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_programs import environment, python, write

OWN = ["yaml", "rich", "typer", "click", "pydantic", "pydantic_settings", "statistics", "difflib", "decimal", "html", "zoneinfo"]
FAILING = f"""
    import os, sys

    path = set(sys.path)
    for name in {OWN!r}:
        module = __import__(name)
        assert module.MINE == name
    from rich import cells
    assert cells.MINE == "rich.cells"
    import os.path, calendar  # a folder without __init__.py hides nothing
    assert calendar.isleap(2000)
    print("found its own")
    import torch

    Größe = torch.ones(3, requires_grad=True)  # 宽
    y = torch.exp(Größe)
    y += 1
    y.sum().backward()
"""  # fmt: skip
SPAWNING = """
    import yaml
    import torch
    import torch.multiprocessing as mp

    def work(rank):
        assert yaml.MINE == "yaml"
        w = torch.ones(2, requires_grad=True)
        loss = (w * w).sum()
        loss.backward()
        loss.backward()

    if __name__ == "__main__":
        mp.spawn(work, nprocs=1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in OWN:
        write(tmp_path, f"{name}/__init__.py" if name == "rich" else f"{name}.py", f"MINE = {name!r}")
    write(tmp_path, "rich/cells.py", "MINE = 'rich.cells'")
    write(tmp_path, "os.py", "raise AssertionError('python has its own before it looks here')")
    (tmp_path / "calendar").mkdir()
    write(tmp_path, "failing.py", FAILING)
    write(tmp_path, "spawning.py", SPAWNING)
    return tmp_path


@pytest.mark.parametrize("start", [["-m", "gradguard"], [os.path.join(os.path.dirname(sys.executable), "gradguard")]])
def test_program_and_guard_find_their_own_modules(folder: Path, start: list[str]) -> None:
    command = [sys.executable, *start, "run", "--report", "report.jsonl", "--summary", "failing.py"]
    if not os.path.exists(start[-1]) and len(start) == 1:
        pytest.skip("the script is not installed")
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment())
    assert ended.stdout == "found its own\n", ended.stderr
    assert "error[GG101]" in ended.stderr and "internal" not in ended.stderr
    assert (folder / "report.jsonl").read_text().count("\n") == 1


def test_commands_do_not_look_in_the_working_directory(folder: Path) -> None:
    listed = python("-m", "gradguard", "rules", cwd=folder)
    assert (listed.status, listed.err) == (0, "") and listed.out.count("\nGG3") > 5


def test_spawned_workers_are_guarded_too(folder: Path) -> None:
    ended = python("-m", "gradguard", "run", "spawning.py", cwd=folder)
    assert "error[GG201]" in ended.err and "SafeLoader" not in ended.err
