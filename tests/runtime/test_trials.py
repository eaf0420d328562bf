"""Trials: what a process of its own may do, what it is a copy of, and what is found out about fixes in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gradguard.config.settings import Settings
from gradguard.runtime.trials import trial
from gradguard.runtime.trials.confinement import can_hold
from gradguard.runtime.trials.mirror import Mirror, project_of, roots_of
from gradguard.runtime.trials.trial import Launch, NoTrialError
from gradguard.runtime.trials.verify import Verifier, verified_here
from tests.trial_programs import found, program

CONFINED = """
    import ctypes, os, pathlib, shutil, socket, subprocess, sys, tempfile
    import torch
    from gradguard.runtime.trials.confinement import confine

    inside, outside = sys.argv[1:]
    notes = []
    confine(inside, lambda kind, text: notes.append(kind))
    os.chdir(inside)

    def refused(function):
        try:
            function()
        except OSError as error:
            return "a trial must not do this" in str(error) or str(error)
        return False

    attempts = {
        "open": lambda: open(f"{outside}/new.txt", "w"),
        "append": lambda: open(f"{outside}/kept.txt", "a"),
        "os.open": lambda: os.open(f"{outside}/new.txt", os.O_CREAT | os.O_WRONLY),
        "remove": lambda: os.remove(f"{outside}/kept.txt"),
        "rename": lambda: os.rename("own.txt", f"{outside}/own.txt"),
        "away": lambda: os.rename(f"{outside}/kept.txt", "kept.txt"),
        "mkdir": lambda: os.mkdir(f"{outside}/folder"),
        "truncate": lambda: os.truncate(f"{outside}/kept.txt", 0),
        "chmod": lambda: os.chmod(f"{outside}/kept.txt", 0o777),
        "symlink": lambda: os.symlink("x", f"{outside}/link"),
        "rmtree": lambda: shutil.rmtree(outside),
        "torch.save": lambda: torch.save({}, f"{outside}/new.pt"),
        "network": lambda: socket.create_connection(("192.0.2.1", 80), 1),
        "name": lambda: socket.getaddrinfo("example.org", 80),
    }
    open("own.txt", "w").write("x")
    found = {name: refused(attempt) for name, attempt in attempts.items()}
    torch.save({"a": 1}, "own.pt")
    open(os.devnull, "w").write("x")
    with socket.socket() as server:  # this machine can be reached
        server.bind(("127.0.0.1", 0))
        server.listen()
        socket.create_connection(server.getsockname()).close()
    # files and folders that are links are copied when they are written
    open("linked.txt").read()
    open("linked.txt", "a").write("more")
    open("data/kept.txt", "w").write("new")
    torch.save({}, "data/model.pt")
    os.remove("data/other.txt")
    found["links"] = [open("linked.txt").read(), open("data/kept.txt").read(), sorted(os.listdir("data"))]
    if os.environ["HELD"] == "1":  # other programs too
        found["started"] = subprocess.run(["sh", "-c", f"echo x > {outside}/new.txt"], stderr=subprocess.DEVNULL).returncode != 0
    import json; print(json.dumps(found))
"""


def test_nothing_outside_is_written_and_nobody_is_reached(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    for name in ("kept.txt", "other.txt", "model.pt"):
        (outside / name).write_text("kept")
    (inside / "linked.txt").symlink_to(outside / "kept.txt")
    (inside / "data").symlink_to(outside)
    command = [sys.executable, "-c", textwrap.dedent(CONFINED), str(inside), str(outside)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HELD": str(int(can_hold()))})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("links") == ["keptmore", "new", ["kept.txt", "model.pt"]]
    assert found.pop("started", True)
    assert found == dict.fromkeys(found, True)
    assert {path.name: path.read_text() for path in outside.iterdir()} == dict.fromkeys(["kept.txt", "other.txt", "model.pt"], "kept")


def test_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, copy = tmp_path / "project", tmp_path / "copy"
    for name in ("train.py", "package/model.py", ".git/config", "__pycache__/x.pyc", "venv/pyvenv.cfg", "data/small.csv", "data/big.bin"):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (project / "data/big.bin").write_bytes(bytes(2 << 20))
    for number in range(1100):
        (project / "images").mkdir(exist_ok=True)
        (project / "images" / str(number)).touch()
    copy.mkdir()
    mirror = Mirror(str(copy), [str(project)], link=True)
    place = Path(mirror.places[str(project)])
    links = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_symlink()}
    assert links == {".git", "venv", "data/big.bin", "images"}
    assert (place / "package/model.py").read_text() == "package/model.py" and not (place / "__pycache__").exists()
    mirror.write({str(project / "train.py"): b"x = 1\n"})
    assert ((place / "train.py").read_bytes(), (project / "train.py").read_text()) == (b"x = 1\n", "train.py")
    with pytest.raises(LookupError, match="outside of the program's folder"):
        mirror.write({str(tmp_path / "other.py"): b""})
    mirror.write({str(project / "images/7"): b"new", str(project / "data/big.bin"): b""})  # what was linked is copied then
    assert (place / "images/7").read_text() == "new" and not (place / "images").is_symlink() and (place / "images/8").is_symlink()
    assert (project / "images/7").read_text() == "" and (project / "data/big.bin").stat().st_size == 2 << 20
    (tmp_path / "bare").mkdir()
    unlinked = Mirror(str(tmp_path / "bare"), [str(project)], link=False)
    assert {os.path.relpath(path, project) for path in unlinked.left_out} == {".git", "venv", "data/big.bin", "images"}


def test_which_folders_a_program_consists_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, scripts, elsewhere = tmp_path / "project", tmp_path / "project" / "scripts", tmp_path / "elsewhere"
    scripts.mkdir(parents=True)
    elsewhere.mkdir()
    assert roots_of(str(scripts), str(scripts)) == [str(scripts)]
    assert roots_of(str(scripts), str(project)) == [str(project)]
    assert roots_of(str(scripts), str(elsewhere)) == [str(scripts), str(elsewhere)]
    (project / "pyproject.toml").touch()
    assert roots_of(str(scripts), str(scripts)) == [str(project)]
    assert project_of(str(scripts)) == str(project)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert roots_of(str(elsewhere), str(tmp_path)) == [str(elsewhere)]  # a home is not copied


ITSELF = """
    import torch
    from gradguard import gradguard
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    guard = gradguard(optimizer, verify=True)

    def step(x):
        y = torch.sigmoid(weight * x)
        y += 1
        optimizer.zero_grad()
        y.sum().backward()
        optimizer.step()

    for number in range(7):
        guard.step(step, float(number))
"""


def test_a_program_that_guards_itself(tmp_path: Path) -> None:
    program(tmp_path, train=ITSELF)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("trying its fix") == 1  # and none in the trial
    assert "`y = y + 1` (safe; verified over 7 steps)" in done.stderr


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda monkeypatch, file: file.write_text("x = 1\n"), "train.py has changed since it was read"),
        (lambda monkeypatch, file: monkeypatch.setenv("WORLD_SIZE", "2"), "the program runs in several processes"),
        (lambda monkeypatch, file: monkeypatch.setattr(trial, "run_trial", None), None),
    ],
)
def test_what_cannot_be_tried_is_said(break_it: Any, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.py"
    file.write_text("x = 0\n")
    diagnosis = found("x", file, "0", "1")
    break_it(monkeypatch, file)
    launch = Launch("gone.py" if why is None else "train.py", folder=str(tmp_path))
    verdict = Verifier(launch, Settings()).verified(diagnosis).fixes[0].verified
    assert verdict.verdict == "not tried"
    assert (why or "there is no gone.py any more") in (verdict.why or "")


def test_the_main_script_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", pytest.__file__, raising=False)
    with pytest.raises(NoTrialError, match=r"the process was started by __init__\.py"):
        Launch.of_this_process()
    file = tmp_path / "train.py"
    file.write_text("x = 0\n")
    shown = verified_here(found("x", file, "0", "1"), Settings(), []).fixes[0].verified
    assert shown.why == "the main script is not known: the process was started by __init__.py"
    monkeypatch.delattr(main, "__file__")
    with pytest.raises(NoTrialError, match="not run from a file"):
        Launch.of_this_process()
    monkeypatch.setattr(main, "__file__", str(file), raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    assert Launch.of_this_process() == Launch(str(file), ("--epochs", "3"))
