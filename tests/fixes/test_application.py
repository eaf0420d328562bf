"""A patch is put into a file exactly: every line keeps its end, and what does not fit is refused."""

from __future__ import annotations

import difflib
import random
from pathlib import Path

import pytest

from gradguard.fixes.application import Change, PatchError, Text, applied, changes_of
from gradguard.fixes.patched_files import completed, hash_of

OLD = ["import torch\n", "x = 1\n", "y = 2\n", "z = 3\n"]


def diff(old: list[str], new: list[str], context: int = 1) -> str:
    return "".join(difflib.unified_diff(old, new, "a/train.py", "b/train.py", n=context))


def patched(content: bytes, patch: str) -> bytes:
    return applied({"/p/train.py": Text.read(content)}, patch, {"train.py": "/p/train.py"})["/p/train.py"].content


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_line_ends_and_encodings_stay(end: str, encoding: str) -> None:
    head = "# -*- coding: latin-1 -*-" if encoding == "latin-1" else "# plain"
    lines = [head, "name = 'é'", "x = 1"]
    content = end.join([*lines, ""]).encode(encoding)
    patch = diff([line + "\n" for line in lines], [head + "\n", "name = 'é'\n", "x = 2\n", "y = 'ü'\n"])
    assert patched(content, patch) == end.join([head, "name = 'é'", "x = 2", "y = 'ü'", ""]).encode(encoding)


def test_a_file_without_a_last_newline_stays_so() -> None:
    assert patched(b"x = 1\ny = 2", diff(["x = 1\n", "y = 2\n"], ["x = 1\n", "y = 3\n"])) == b"x = 1\ny = 3"
    assert patched(b"x = 1\ny = 2", diff(["x = 1\n", "y = 2\n"], ["x = 1\n", "y = 2\n", "z = 3\n"])) == b"x = 1\ny = 2\nz = 3"
    assert patched(b"x = 1\ny = 2", diff(["x = 1\n", "y = 2\n"], ["x = 1\n"])) == b"x = 1\n"


@pytest.mark.parametrize("context", [0, 1, 3])
def test_any_change_of_any_file(context: int) -> None:
    chance = random.Random(0)
    for _ in range(200):
        old = [f"v{chance.randrange(6)} = {chance.randrange(6)}\n" for _ in range(chance.randrange(1, 12))]
        new = [line for line in old if chance.random() < 0.8]
        for _ in range(chance.randrange(4)):
            new.insert(chance.randrange(len(new) + 1), f"new = {chance.randrange(6)}\n")
        if old != new:
            assert patched("".join(old).encode(), diff(old, new, context)) == "".join(new).encode()


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (diff(["x = 0\n", *OLD[2:]], ["x = 5\n", *OLD[2:]]), "is not as the patch has it"),
        (diff(OLD, [*OLD[:2], "y = (\n", OLD[3]]), "would not be Python"),
        (diff(OLD, [*OLD, "w = 4\n"]).replace("train.py", "other.py"), "not among its files"),
        ("hello\n", "no line of a unified diff"),
        ("", "changes nothing"),
        ("--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,2 @@\n-x\n", "shorter or longer"),
        ("--- a/train.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "makes, removes or renames"),
        ("@@ -1 +1 @@\n-x\n+y\n", "does not say which file"),
    ],
)
def test_what_does_not_fit_is_refused(patch: str, said: str) -> None:
    with pytest.raises(PatchError, match=said):
        patched("".join(OLD).encode(), patch)


def test_a_line_that_looks_like_a_header() -> None:
    old = ["s = '''\n", "-- a\n", "++ b\n", "'''\n"]
    assert patched("".join(old).encode(), diff(old, [old[0], "-- c\n", *old[2:]])) == b"s = '''\n-- c\n++ b\n'''\n"


def test_overlaps() -> None:
    change = Change(4, ("a", "b"), ("c",))
    assert not change.overlaps(change)
    assert change.overlaps(Change(5, ("b",), ("d",)))
    assert change.overlaps(Change(4, (), ("d",)))
    assert not change.overlaps(Change(6, ("e",), ("d",)))


def test_files_of_a_patch_by_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradguard.core.diagnosis import Fix
    from gradguard.fixes.diff import header_names

    inner = tmp_path / "package" / "train.py"
    inner.parent.mkdir()
    inner.write_text("".join(OLD))
    monkeypatch.chdir(tmp_path)
    assert header_names(str(inner)) == ("a/package/train.py", "b/package/train.py")
    assert header_names(str(tmp_path.parent / "x.py")) == (str(tmp_path.parent / "x.py"),) * 2
    assert header_names(str(tmp_path / "a\nb.py")) is None
    patch = diff(OLD, [*OLD[:1], *OLD[2:]]).replace("train.py", "package/train.py")
    (fix,) = completed([Fix(title="x", safety="unsafe", patch=patch)], "# P\n\n## Fix safety\nUnsafe: the model\nis trained.\n\n## When\n")
    assert fix.reason == "the model is trained"
    (file,) = fix.files
    assert (file.name, file.path, file.sha256) == ("package/train.py", str(inner), hash_of(inner.read_bytes()))
    inner.write_text("x = 5\n")  # it is no longer the text that the patch was made from
    assert completed([Fix(title="x", patch=patch)], "")[0].patch is None
    library = diff(OLD, OLD[1:]).replace("a/train.py", pytest.__file__).replace("b/train.py", pytest.__file__)
    assert completed([Fix(title="x", patch=library)], "")[0].patch is None
    assert list(changes_of(library)) == [pytest.__file__]
