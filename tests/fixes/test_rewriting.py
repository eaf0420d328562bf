"""Files are written whole or not at all: a full disk, a process killed in between, files and links that must not be touched."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from gradguard.fixes import rewriting
from gradguard.fixes.patched_files import hash_of
from gradguard.fixes.rewriting import RewriteError, readable, rewrite

OLD, NEW = b"x = 1\n" * 50, b"x = 2\n" * 50


@pytest.fixture
def files(tmp_path: Path) -> dict[str, tuple[bytes, bytes]]:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_bytes(OLD)
        os.chmod(tmp_path / name, 0o640)
    return {str(tmp_path / name): (OLD, NEW) for name in ("one.py", "two.py")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_new_contents_and_backups(files: dict[str, tuple[bytes, bytes]], tmp_path: Path) -> None:
    (tmp_path / "one.py.bak").write_bytes(b"kept")
    assert [Path(path).name for path in rewrite(files)] == ["one.py.bak1", "two.py.bak"]
    assert contents(tmp_path) == {"one.py": NEW, "one.py.bak": b"kept", "one.py.bak1": OLD, "two.py": NEW, "two.py.bak": OLD}
    assert {os.stat(path).st_mode & 0o777 for path in (*files, tmp_path / "two.py.bak")} == {0o640}


@pytest.mark.parametrize("call", ["write", "fsync", "open", "replace", "chmod"])
@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_a_full_disk_at_any_call(
    call: str, when: int, files: dict[str, tuple[bytes, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(os, call), 0

    def failing(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == when:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **options)

    monkeypatch.setattr(rewriting.os, call, failing)
    fails = when <= {"replace": 2}.get(call, 4)
    if fails:
        with pytest.raises(RewriteError, match="No space left on device; nothing was changed"):
            rewrite(files)
        assert contents(tmp_path) == {"one.py": OLD, "two.py": OLD}
    else:
        rewrite(files)
        assert contents(tmp_path)["two.py"] == NEW


def test_short_writes_are_gone_on_with(files: dict[str, tuple[bytes, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(rewriting.os, "write", lambda descriptor, data: original(descriptor, bytes(data)[:7]))
    rewrite(files)
    assert contents(tmp_path) == {"one.py": NEW, "one.py.bak": OLD, "two.py": NEW, "two.py.bak": OLD}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    old, new = b"x = 1\n" * 200_000, b"x = 2\n" * 200_000
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        targets = {str(folder / name): (old, new) for name in ("one.py", "two.py")}
        for path in targets:
            Path(path).write_bytes(old)
        child = os.fork()
        if child == 0:
            try:
                rewrite(targets)
            finally:
                os._exit(0)
        time.sleep(number * 0.002)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in targets:
            found = Path(path).read_bytes()
            assert found in (old, new)
            assert found == old or Path(path + ".bak").read_bytes() == old


def test_a_file_that_changes_meanwhile(files: dict[str, tuple[bytes, bytes]], tmp_path: Path) -> None:
    (tmp_path / "two.py").write_bytes(b"x = 3\n")
    with pytest.raises(RewriteError, match="changed just now"):
        rewrite(files)
    assert contents(tmp_path) == {"one.py": OLD, "two.py": b"x = 3\n"}


def test_what_may_not_be_touched(files: dict[str, tuple[bytes, bytes]], tmp_path: Path) -> None:
    one, project, digest = str(tmp_path / "one.py"), tmp_path / "project", hash_of(OLD)
    project.mkdir()
    inside = project / "train.py"
    inside.write_bytes(OLD)
    assert readable(str(inside), digest, str(project)) == OLD
    (project / "link.py").symlink_to(one)
    (project / "folder").symlink_to(tmp_path)
    (project / "notes.txt").write_bytes(OLD)
    (project / "module.py").mkdir()
    refused = {
        str(project / "link.py"): "symbolic link",
        str(project / "folder" / "one.py"): "outside of",
        one: "outside of",
        str(project) + "/../one.py": "not a plain absolute path",
        "train.py": "not a plain absolute path",
        str(project / "notes.txt"): "not a Python file of your own",
        str(project / "module.py"): "not a regular file",
        str(project / "missing.py"): "No such file",
    }
    for path, said in refused.items():
        with pytest.raises(RewriteError, match=said):
            readable(path, digest, str(project))
    with pytest.raises(RewriteError, match="changed since the run"):
        readable(str(inside), hash_of(NEW), str(project))
    inside.chmod(0o444)
    with pytest.raises(RewriteError, match="read-only"):
        readable(str(inside), digest, str(project))
    library = os.path.abspath(pytest.__file__)
    with pytest.raises(RewriteError, match="not a Python file of your own"):
        readable(library, hash_of(Path(library).read_bytes()), sys.prefix)
