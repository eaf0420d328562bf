"""What a trial's outcome says of a fix, and which fix of a diagnosis is recommended after it."""

from __future__ import annotations

from typing import Any

import pytest

from gradguard.core.diagnosis import Diagnosis, Fix, PatchedFile, SourceSpan, Verification
from gradguard.fixes.choice import choose
from gradguard.fixes.verification import Outcome, judge, reordered


def diagnosis(code: str = "GG101", line: int = 10, text: str = "y += 1", **facts: Any) -> Diagnosis:
    culprit = SourceSpan(file="/p/train.py", line=line, end_line=line, text=text, function="main")
    return Diagnosis(code=code, name="a-rule", headline="x", culprit=culprit, **facts)


FAULT = diagnosis(step=3)
RAN = {"ending": "enough", "steps": 8}


@pytest.mark.parametrize(
    ("facts", "verdict", "why"),
    [
        ({}, "verified", "it ran 8 steps; every trainable parameter got a finite gradient, and GG101 is not reported any more"),
        ({"ending": "end"}, "verified", "8 steps, to the program's end"),
        ({"ending": "end", "steps": 0, "backwards": 4}, "verified", "it ran 4 backward calls, to the program's end; GG101 is not"),
        ({"diagnoses": [diagnosis(line=12)]}, "failed", "GG101 is still reported at train.py:12"),
        ({"diagnoses": [diagnosis(severity="info")]}, "verified", ""),
        ({"diagnoses": [diagnosis("GG604", severity="warning")]}, "failed", "GG604 is reported at train.py:10"),
        ({"ending": "error", "error": "ValueError: no", "error_type": "ValueError"}, "failed", "it ends with ValueError: no after 8 steps"),
        (
            {"ending": "error", "error": "x", "error_type": "PermissionError", "refused": ["writing /data/x"]},
            "not tried",
            "must not do: writing /data/x",
        ),
        ({"ending": "error", "error": "x", "error_type": "PermissionError"}, "failed", "it ends with x"),
        ({"ending": "error", "error": "x", "error_type": "FileNotFoundError", "left_out": ["/p/data"]}, "not tried", "a file"),
        ({"ending": "gone", "error": "status -9"}, "not tried", "ended without a word"),
        ({"ending": "time", "steps": 3, "seconds": 120.0}, "not tried", "came to 3 steps in 120 s; the fault showed in step 3"),
        ({"ending": "time", "steps": 4}, "verified", "4 steps"),
        ({"without_gradient": ["head.weight"]}, "failed", "`head.weight` got no gradient in 8 steps"),
        ({"nonfinite": ["a", "b", "c", "d"]}, "failed", "the last gradient of `a`, `b`, `c` and 1 more is not finite"),
    ],
)
def test_judgement(facts: dict[str, Any], verdict: str, why: str) -> None:
    ruling = judge(Outcome(**{**RAN, **facts}), FAULT)
    assert ruling.verdict == verdict and why in ruling.why
    assert (ruling.behind is not None) == ("GG604" in ruling.why)


def test_what_was_said_before_is_not_held_against_a_fix() -> None:
    other = diagnosis("GG604", severity="warning", text="step()")
    assert judge(Outcome(**RAN, diagnoses=[other]), FAULT, [other]).verdict == "verified"
    assert judge(Outcome(**RAN, diagnoses=[other]), FAULT, []).behind is other


def test_the_error_is_followed_before_the_warning() -> None:
    found = [diagnosis("GG604", severity="warning"), diagnosis("GG203")]
    assert judge(Outcome(**RAN, diagnoses=found), FAULT).behind is found[1]


def fix(title: str, line: int = 1, safety: str = "safe", **verdict: Any) -> Fix:
    patch = f"--- a/train.py\n+++ b/train.py\n@@ -{line} +{line} @@\n-old\n+{title}\n"
    files = [PatchedFile(name="train.py", path="/p/train.py", sha256="0")]
    return Fix(title=title, safety=safety, reason="r", patch=patch, files=files, verified=Verification(**verdict))  # type: ignore[arg-type]


def test_a_verified_fix_comes_first_and_a_failed_one_last() -> None:
    shown = diagnosis(fixes=[fix("a"), fix("b"), Fix(title="words")])
    tried = reordered(shown, {0: Verification(verdict="failed"), 1: Verification(verdict="verified", steps=4)})
    assert [each.title for each in tried.fixes] == ["b", "words", "a"]
    assert [each.title for each in reordered(shown, {0: Verification(why="no time")}).fixes] == ["a", "b", "words"]


def test_choice_among_fixes() -> None:
    first = diagnosis(fixes=[fix("a", verdict="failed", why="x"), fix("b", safety="unsafe"), fix("c")])
    again = diagnosis(fixes=[fix("z", 9)])  # the same cause once more
    clash = diagnosis("GG102", fixes=[fix("d")])
    apart = diagnosis("GG103", fixes=[fix("e", 5)])
    words = diagnosis("GG104", fixes=[Fix(title="think")])
    failed = diagnosis("GG105", fixes=[fix("f", 7, verdict="failed", why="it ends with x")])
    choice = choose([first, again, clash, apart, words, failed], unsafe=False)
    assert [each.title for _, each in choice.chosen] == ["c", "e"]
    assert [(each.code, reason.split(";")[0]) for each, reason in choice.left] == [
        ("GG102", "it touches lines that another fix changes"),
        ("GG104", "its fix cannot be written as a patch"),
        ("GG105", "its fix was tried, and failed: it ends with x"),
    ]
    assert [each.title for _, each in choose([first], unsafe=True).chosen] == ["b"]
    (_, reason), *_ = choose([diagnosis(fixes=[fix("b", safety="unsafe")])], unsafe=False).left
    assert reason == "its fix changes results (r)"


def test_the_combined_patch_is_the_one_that_is_made() -> None:
    combined = fix("g", 3).patch
    both = fix("a", verdict="verified", patch=combined, files=[PatchedFile(name="train.py", path="/p/train.py", sha256="0")])
    unsafe = both.model_copy(update={"verified": both.verified.model_copy(update={"safety": "unsafe"})})
    ((_, reason),) = choose([diagnosis(fixes=[unsafe])], unsafe=False).left
    assert reason.startswith("its fix changes results where it repairs what is behind")
    (change,) = choose([diagnosis(fixes=[both])], unsafe=False).changes["/p/train.py"]
    assert (change.start, change.new) == (2, ("g",))
