"""Runs a small program under the guard, as a module of its own, and gives back what was said; puts patches into sources."""

from __future__ import annotations

import importlib.util
import itertools
import linecache
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from gradguard import gradguard
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError
from gradguard.runtime.session import current_session

HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
"""
Run = Callable[..., list[tuple[Diagnosis, str]]]
_count = itertools.count()


def run_source(folder: Path, source: str, level: str = "standard") -> list[tuple[Diagnosis, str]]:
    """Every diagnosis with its text (empty for what was only warned of); the program's own exceptions pass."""
    name = f"program_{next(_count)}_{folder.name}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    texts: list[tuple[Diagnosis, str]] = []
    current_session()._runs.clear()  # guards made at one line share a run: each program is to have its own
    guard = gradguard(level=level)
    try:
        with guard:
            spec.loader.exec_module(module)
    except GradGuardError as error:
        texts.append((error.diagnosis, str(error)))
    finally:
        sys.modules.pop(name, None)
        linecache.clearcache()
    return texts + [(diagnosis, "") for diagnosis in guard.diagnoses if not any(diagnosis is known for known, _ in texts)]


def applied(source: str, patch: str) -> str:
    """The source with a unified diff in it; a hunk stands where it says, or (of a source without its head) where else its lines are."""
    lines, offset = source.splitlines(keepends=True), 0
    hunks: list[list[str]] = []
    for line in patch.splitlines():
        if line.startswith("@@"):
            hunks.append([line])
        elif hunks:
            hunks[-1].append(line)
    for header, *body in hunks:
        first, _, count = header.split()[1].lstrip("-").partition(",")
        start = int(first) - (count != "0") + offset
        old = [line[1:] + "\n" for line in body if line[:1] in " -"]
        new = [line[1:] + "\n" for line in body if line[:1] in " +"]
        ended = [line.rstrip("\n") + "\n" for line in lines]
        if ended[start : start + len(old)] != old:
            found = [i for i in range(len(ended)) if ended[i : i + len(old)] == old]
            assert len(found) == 1, patch
            start = found[0]
        lines[start : start + len(old)] = new
        offset += len(new) - len(old)
    return "".join(lines)


def said(folder: Path, source: str, level: str = "standard") -> list[Diagnosis]:
    """Every diagnosis of a small program, whose warnings are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [diagnosis for diagnosis, _ in run_source(folder, HEAD + source, level)]


def only(folder: Path, source: str, code: str, culprit: str, level: str = "standard") -> Diagnosis:
    """The one diagnosis, with its code and the text of its culprit."""
    found = said(folder, source, level)
    assert [diagnosis.code for diagnosis in found] == [code], [diagnosis.headline for diagnosis in found]
    assert found[0].culprit is not None and found[0].culprit.text == culprit, found[0].culprit
    return found[0]
