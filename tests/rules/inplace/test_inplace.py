"""The in-place rules on real programs: what is said and where it points, traced and untraced; silence on sound ones."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inplace_programs_broken import BROKEN, Broken
from inplace_programs_larger import LARGER
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


def _marked(program: str) -> tuple[str, set[int]]:
    lines = program.splitlines()
    marked = {number for number, text in enumerate(lines, 1) if text.endswith("#!")}
    return "\n".join(text.removesuffix("#!").rstrip() for text in lines) + "\n", marked


def _points_at(culprit: dict[str, Any], marked: set[int]) -> bool:
    return any(line in marked for line in range(culprit["line"], culprit["end_line"] + 1))


@pytest.fixture(autouse=True)
def _few_modules() -> Iterator[None]:
    import gc

    gc.collect()  # names are looked up in every module alive: those of the program before must be gone
    yield


ALL: dict[str, Broken] = BROKEN | LARGER


@pytest.mark.parametrize("slug", sorted(ALL))
def test_traced(slug: str, tmp_path: Path) -> None:
    broken = ALL[slug]
    program, marked = _marked(broken.program)
    said = _run(program, tmp_path / f"{slug}.py", "strict" if not broken.silent else "standard")
    assert said, "nothing was said"
    first = said[0]
    assert first["code"] == broken.code
    assert first["culprit"] is not None
    assert _points_at(first["culprit"], marked), first["culprit"]
    assert first["culprit"]["text"] in program
    for name in broken.names:
        assert name in first["message"]
    assert first["severity"] == ("warning" if broken.silent else "error")
    assert len(said) == 1


@pytest.mark.parametrize("slug", sorted(slug for slug, broken in ALL.items() if not broken.silent))
def test_untraced(slug: str, tmp_path: Path) -> None:
    broken = ALL[slug]
    program, marked = _marked(broken.program)
    said = _run(program, tmp_path / f"{slug}.py", "watch")
    assert said, "nothing was said"
    assert said[0]["code"] == broken.code
    assert said[0]["culprit"] is not None
    assert _points_at(said[0]["culprit"], marked), said[0]["culprit"]


@pytest.mark.parametrize("slug", sorted(SOUND))
@pytest.mark.parametrize("level", ["standard", pytest.param("strict", marks=pytest.mark.slow), "forensic"])
def test_sound_programs(slug: str, level: str, tmp_path: Path) -> None:
    said = _run(SOUND[slug], tmp_path / f"{slug}.py", level)
    assert [(item["code"], item["headline"]) for item in said if item["code"].startswith("GG1")] == []


def _patched(program: str, patch: str) -> str:
    """The program with a unified diff applied."""
    lines, shift = program.splitlines(), 0
    for hunk in re.split(r"^@@ ", patch, flags=re.MULTILINE)[1:]:
        header, *body = hunk.rstrip("\n").split("\n")
        found = re.match(r"-(\d+)(?:,(\d+))?", header)
        assert found is not None
        start, count = int(found[1]), int(found[2] or 1)
        old = [text[1:] for text in body if text[:1] in (" ", "-")]
        new = [text[1:] for text in body if text[:1] in (" ", "+")]
        at = start - 1 + shift
        assert lines[at : at + count] == old
        lines[at : at + count] = new
        shift += len(new) - len(old)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "slug",
    [
        *["relu_in_sequential", "residual_after_gate", "mask_fill_in_helper", "copy_into_staging", "clamp_after_exp", "forget_gate"],
        *["dropout_functional_inplace", "detached_in_place", "memory_bank_enqueue", "init_without_no_grad", "zero_padding_row"],
        *["numpy_sort_of_output", "numpy_helper", "hidden_buffer", "normalise_rows", "positions_added_to_tokens", "expanded_bias"],
    ],
)
def test_some_patch_repairs_the_program(slug: str, tmp_path: Path) -> None:
    broken = ALL[slug]
    program, _ = _marked(broken.program)
    said = _run(program, tmp_path / f"{slug}.py", "strict" if not broken.silent else "standard")
    patches = [fix["patch"] for fix in said[0]["fixes"] if fix["patch"]]
    assert patches, said[0]["fixes"]
    again = _run(_patched(program, patches[0]), tmp_path / f"{slug}_patched.py", "standard")
    assert [(item["code"], item["headline"]) for item in again if item["code"].startswith("GG1")] == []
