"""Programs to try fixes on, and diagnoses that have a patch for one."""

from __future__ import annotations

import difflib
import textwrap
from pathlib import Path

from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.patched_files import completed


def program(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


def found(title: str, file: Path, old: str, new: str, code: str = "GG101") -> Diagnosis:
    """A diagnosis with one fix in one file."""
    lines = file.read_text().splitlines(keepends=True)
    changed = [line.replace(old, new) for line in lines]
    patch = "".join(difflib.unified_diff(lines, changed, str(file), str(file), n=1))
    (fix,) = completed([Fix(title=title, patch=patch, safety="safe")], "")
    return Diagnosis(code=code, name="a-rule", headline="x", step=1, fixes=[fix])
