"""Unified diffs as numbered lines."""

from __future__ import annotations

import difflib

from gradguard.reporting.patch_lines import PatchLine, read_patch

OLD = ["import torch", "", "a = 1", "b = 2", "c = 3", "d = 4", "e = 5", "f = 6", "g = 7", "h = 8", "-- x", "i = 9"]


def diff(new, old=OLD, name="train.py"):
    return "\n".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")) + "\n"


def lines(text, **options):
    return [(line.sign, line.number, line.text) for patch in read_patch(text, **options) for line in patch.lines]


def test_a_changed_line_with_its_neighbours():
    new = [*OLD[:3], "b = 20", *OLD[4:]]
    assert lines(diff(new)) == [(" ", 3, "a = 1"), ("-", 4, "b = 2"), ("+", None, "b = 20"), (" ", 5, "c = 3")]
    assert lines(diff(new), context=0) == [("-", 4, "b = 2"), ("+", None, "b = 20")]
    assert read_patch(diff(new))[0].file == "train.py"


def test_far_changes_have_a_gap_and_the_old_numbers():
    new = ["import numpy", *OLD[:9], "h = 80", *OLD[10:]]
    assert lines(diff(new), context=0) == [("+", None, "import numpy"), ("", None, ""), ("-", 10, "h = 8"), ("+", None, "h = 80")]


def test_removed_line_that_looks_like_a_header():
    assert ("-", 11, "-- x") in lines(diff([*OLD[:10], OLD[11]]))


def test_two_files_and_no_newline_at_the_end():
    text = diff([*OLD[:11], "i = 90"]) + "\\ No newline at end of file\n" + diff(["x"], ["y"], "model.py")
    assert [patch.file for patch in read_patch(text)] == ["train.py", "model.py"]
    assert read_patch(text)[1].lines == [PatchLine("-", 1, "y"), PatchLine("+", None, "x")]


def test_what_is_no_diff():
    assert read_patch("") == [] and read_patch("replace a by b") == []
