"""The in-place rules on real programs: what is said and where it points, traced and untraced; silence on sound ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inplace_programs_broken import BROKEN, Broken
from inplace_programs_sound import SOUND

from gradguard import gradguard


def _run(program: str, path: Path, level: str) -> list[dict[str, Any]]:
    """The diagnoses of a program, as its report has them."""
    report = path.with_suffix(".jsonl")
    path.write_text(program)
    code = compile(program, str(path), "exec")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with gradguard(level=level, report=report):
                exec(code, {"__name__": "__main__", "__file__": str(path)})
    except RuntimeError:
        pass
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def _marked(program: str) -> tuple[str, int]:
    lines = program.splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("#!"))
    return "\n".join(text.removesuffix("#!").rstrip() for text in lines) + "\n", line


@pytest.fixture(autouse=True)
def _few_modules() -> Iterator[None]:
    import gc

    gc.collect()  # names are looked up in every module alive: those of the program before must be gone
    yield


@pytest.mark.parametrize("slug", sorted(BROKEN))
def test_traced(slug: str, tmp_path: Path) -> None:
    broken: Broken = BROKEN[slug]
    program, line = _marked(broken.program)
    said = _run(program, tmp_path / f"{slug}.py", "strict" if not broken.silent else "standard")
    assert said, "nothing was said"
    first = said[0]
    assert first["code"] == broken.code
    assert first["culprit"] is not None
    assert first["culprit"]["line"] <= line <= first["culprit"]["end_line"], first["culprit"]
    assert first["culprit"]["text"] in program
    for name in broken.names:
        assert name in first["message"]
    assert first["severity"] == ("warning" if broken.silent else "error")
    assert len(said) == 1


@pytest.mark.parametrize("slug", sorted(slug for slug, broken in BROKEN.items() if not broken.silent))
def test_untraced(slug: str, tmp_path: Path) -> None:
    broken = BROKEN[slug]
    program, line = _marked(broken.program)
    said = _run(program, tmp_path / f"{slug}.py", "watch")
    assert said, "nothing was said"
    assert said[0]["code"] == broken.code
    culprit = said[0]["culprit"]
    if slug in UNKNOWN_UNTRACED:
        assert culprit is None or said[0]["confidence"] != "certain"
    else:
        assert culprit is not None
        assert culprit["line"] <= line <= culprit["end_line"], culprit


# Programs whose write an untraced step cannot tell for sure: nothing wrong may be said as certain.
UNKNOWN_UNTRACED: frozenset[str] = frozenset()


@pytest.mark.parametrize("slug", sorted(SOUND))
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_sound_programs(slug: str, level: str, tmp_path: Path) -> None:
    said = _run(SOUND[slug], tmp_path / f"{slug}.py", level)
    assert [(item["code"], item["headline"]) for item in said if item["code"].startswith("GG1")] == []
