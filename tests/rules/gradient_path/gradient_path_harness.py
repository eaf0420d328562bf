"""Runs small training programs under the guard, in this process, and collects what was said."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

from gradguard import gradguard
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError

PROGRAMS = Path(__file__).parent / "programs"
_BUG = re.compile(r"[ \t]*# BUG\b[^\n]*")


def programs(kind: str) -> list[Path]:
    """The programs of a kind: `raises`, `silent` or `sound`."""
    return sorted((PROGRAMS / kind).glob("*.py"))


def expected(path: Path) -> tuple[str, list[str], set[int]]:
    """The code, names and culprit lines that a program's comments ask for."""
    text = path.read_text()
    code = re.search(r"# expect: (\w+)", text)
    names = re.search(r"# names: (.*)", text)
    lines = {number for number, line in enumerate(text.splitlines(), 1) if "# BUG" in line}
    return (code[1] if code else ""), [name.strip() for name in names[1].split(",")] if names else [], lines


def run(path: Path, folder: Path, level: str = "standard") -> tuple[list[Diagnosis], BaseException | None]:
    """Runs a program without its marks, as a user's file, and gives the diagnoses and what it raised."""
    lines = path.read_text().splitlines(keepends=True)
    text = "".join("\n" if line.startswith(("# expect", "# names")) else line for line in lines)
    script = folder / path.name
    script.write_text(_BUG.sub("", text))
    code = compile(script.read_text(), str(script), "exec")
    error: BaseException | None = None
    guard = gradguard(level=level, report=folder / "report.jsonl")
    enabled = torch.is_grad_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with guard:
                exec(code, {"__name__": "__main__", "__file__": str(script)})
    except (GradGuardError, Exception) as raised:
        error = raised
    finally:
        torch.set_grad_enabled(enabled)
    report = folder / "report.jsonl"
    found = []
    if report.exists():
        import json

        for line in report.read_text().splitlines():
            data = json.loads(line)
            data.pop("message", None)
            found.append(Diagnosis.model_validate({key: value for key, value in data.items() if key in Diagnosis.model_fields}))
    return found, error
