"""`gradguard fix`: shows the patches of a report, or applies them."""

from __future__ import annotations

import difflib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

from gradguard.fixes.application import PatchError, Text
from gradguard.fixes.choice import Choice, choose, texts_with
from gradguard.fixes.diff import heads
from gradguard.fixes.rewriting import RewriteError, readable, rewrite
from gradguard.reporting import wording
from gradguard.reporting.jsonl import ReportError, read_report
from gradguard.reporting.source_blocks import shown_path
from gradguard.reporting.terminal.layout import clean, one_line
from gradguard.runtime.trials.mirror import project_of


def fix_report(report: Path, apply: bool, unsafe: bool, ask: bool, command: Sequence[str] = ()) -> int:
    """Shows or makes the changes of a report; gives the exit status. What is recommended is shown whatever it changes.

    Args:
        report: what `gradguard run --report` wrote.
        apply: whether files are changed.
        unsafe: whether fixes are made that change what is computed.
        ask: whether to ask before, where somebody is there to answer.
        command: what was named on the command line; the report where it is empty.
    """
    target = shlex.join(command or [str(report)])
    try:
        choice = choose(read_report(report), unsafe or not apply)
    except ReportError as error:
        print(f"gradguard fix: {error}", file=sys.stderr)
        return 2
    for diagnosis, reason in choice.left:
        print(f"gradguard fix: {wording.title_at(diagnosis)}: {one_line(reason)}", file=sys.stderr)
    if choice.withheld:
        print(f"gradguard fix: to make it all the same: gradguard fix --apply --unsafe {target}", file=sys.stderr)
    if not choice.chosen:
        print("gradguard fix: nothing to change", file=sys.stderr)
        return 1 if choice.left else 0
    project = project_of(os.getcwd())
    try:
        old = {path: readable(path, file.sha256, project) for path, file in choice.files.items() if path in choice.changes}
        texts = {path: Text.read(content) for path, content in old.items()}
        new = texts_with(choice, texts)
    except (RewriteError, PatchError) as error:
        print(f"gradguard fix: {error}", file=sys.stderr)
        return 2
    for diagnosis, fix in choice.chosen:
        print(clean(f"# {wording.title_at(diagnosis)}: {wording.fix_title(fix)}"))
        untried = "" if fix.verified.why else "; not tried"
        print(clean(f"# {wording.standing(fix)}{untried} ({one_line(fix.reason or '')})"))
        for behind in fix.verified.behind:
            print(clean(f"# and behind it {behind}"))
    diff = _diff(texts, new)
    print(clean(diff) if sys.stdout.isatty() else diff, end="")
    if not apply:
        safe = [(fix.verified.safety or fix.safety) == "safe" for _, fix in choice.chosen]
        option, rest = ("", "") if all(safe) else (" --unsafe", "; without --unsafe, the safe ones" if any(safe) else "")
        sys.stdout.flush()
        print(f"gradguard fix: to make these changes: gradguard fix --apply{option} {target}{rest}", file=sys.stderr)
        return 0
    return _apply(choice, {path: (old[path], text.content) for path, text in new.items()}, ask)


def _apply(choice: Choice, contents: dict[str, tuple[bytes, bytes]], ask: bool) -> int:
    names = ", ".join(shown_path(path) for path in contents)
    if ask and sys.stdin.isatty() and sys.stdout.isatty() and not typer.confirm(f"Change {names}?"):
        print("gradguard fix: nothing was changed", file=sys.stderr)
        return 1
    try:
        backups = rewrite(contents)
    except RewriteError as error:
        print(f"gradguard fix: {error}", file=sys.stderr)
        return 2
    made = "1 fix" if len(choice.chosen) == 1 else f"{len(choice.chosen)} fixes"
    print(f"gradguard fix: {made} made in {names}; the file as it was: {', '.join(map(shown_path, backups))}")
    return 0


def _diff(texts: dict[str, Text], new: dict[str, Text]) -> str:
    parts: list[str] = []
    for path, text in new.items():
        name = shown_path(path)
        parts += difflib.unified_diff(texts[path].plain, text.plain, *heads(name))
    return "".join(parts)


def is_report(path: Path) -> bool:
    """Whether a path is meant as a report rather than as a program."""
    return path.suffix in (".jsonl", ".json")


def report_of(target: str, arguments: list[str], module: bool, level: str | None, folder: Path) -> tuple[Path, int]:
    """Runs a program under `gradguard run --verify`; gives its report and its exit status."""
    report = folder / "report.jsonl"
    options = ["--verify", "--report", str(report), *_options(module, level)]
    command = [sys.executable, "-m", "gradguard", "run", *options, target, *arguments]
    return report, subprocess.run(command, stdin=None).returncode


def _options(module: bool, level: str | None) -> list[str]:
    return [*(["--level", level] if level else []), *(["-m"] if module else [])]


def fix_program(target: str, arguments: list[str], module: bool, level: str | None, apply: bool, unsafe: bool, ask: bool) -> int:
    """Runs a program, verifies the fixes of what is found, and shows or makes the changes; gives the exit status."""
    with tempfile.TemporaryDirectory(prefix="gradguard-fix-") as folder:
        report, status = report_of(target, arguments, module, level, Path(folder))
        if not report.exists():
            print(f"gradguard fix: nothing was found (the program's exit status is {status})", file=sys.stderr)
            return status
        return fix_report(report, apply, unsafe, ask, [*_options(module, level), target, *arguments])
