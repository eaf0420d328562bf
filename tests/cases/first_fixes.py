"""Applies the first fix of each diagnosis, as written, and runs the program again: does it repair the program?

    python tests/cases/first_fixes.py [CASES] [--level standard] [--outcome raises] [--only GLOB] [--verbose]

CASES is a folder of families of cases (default: tests/cases). A fix counts as a repair where the patched program runs to its end
and nothing of warning or above is said of it any more. A second bug that the first one hid is followed up to three patches.
Fixes in words cannot be applied by a program; they count as not repairing.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from case import HERE, Case, Outcome, load, run

import gradguard.reporting.terminal.render  # noqa: F401  the parent of all forks has everything imported

_PATCHES = 3  # bugs behind bugs


@dataclass
class Verdict:
    """What came of applying a case's first fixes."""

    case: Case
    code: str
    result: str  # repaired, words, refused, broken, still said, not found
    titles: list[str]
    last: Outcome


def judge(case: Case, level: str) -> Verdict:
    """Runs a case, applies the first fix of what is said, and runs it again."""
    text, code, titles = case.plain, "", list[str]()
    outcome = _run(case, text, level)
    if outcome.first is None:
        return Verdict(case, "-", "not found", titles, outcome)
    code = outcome.first["code"]
    for _ in range(_PATCHES):
        first = outcome.first
        assert first is not None
        fix: dict[str, Any] = first["fixes"][0] if first["fixes"] else {"title": "no fix", "patch": None}
        titles.append(f"{first['code']} {fix['title']}")
        if not fix["patch"]:
            return Verdict(case, code, "words", titles, outcome)
        patched = _patched(text, fix["patch"])
        if patched is None:
            return Verdict(case, code, "refused", titles, outcome)
        text = patched
        outcome = _run(case, text, level)
        if outcome.first is None:
            return Verdict(case, code, "repaired" if outcome.status == 0 else "broken", titles, outcome)
    return Verdict(case, code, "still said", titles, outcome)


def _run(case: Case, text: str, level: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return run(replace(case, source=text), Path(folder), level)


def _patched(text: str, patch: str) -> str | None:
    """The text with a unified diff applied by `patch`; None where it does not apply."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "program.py")
        target.write_text(text)
        done = subprocess.run(["patch", "--quiet", "--fuzz=0", str(target)], input=patch, text=True, capture_output=True)
        return target.read_text() if done.returncode == 0 else None


def main() -> int:
    """Prints a line a case and the table by rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="?", type=Path, default=HERE)
    parser.add_argument("--level", default="standard")
    parser.add_argument("--outcome", default="raises", choices=["raises", "silent"])
    parser.add_argument("--only", default="*", help="glob over family/slug")
    parser.add_argument("--verbose", action="store_true", help="show the patches and what was printed last of cases not repaired")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [load(path) for path in sorted(options.cases.glob("*/*.py"))]
    chosen = [case for case in cases if case.meta.get("outcome") == options.outcome and fnmatch.fnmatch(case.id, options.only)]
    verdicts = []
    for case in chosen:
        verdict = judge(case, options.level)
        verdicts.append(verdict)
        print(f"{verdict.result:<10} {verdict.code:<6} {case.id}: {' | '.join(verdict.titles)}", flush=True)
        if options.verbose and verdict.result != "repaired":
            print(verdict.last.output[-3000:])
    results = Counter(verdict.result for verdict in verdicts)
    print()
    for code in sorted({verdict.code for verdict in verdicts}):
        of_rule = Counter(verdict.result for verdict in verdicts if verdict.code == code)
        print(f"{code}: {', '.join(f'{count} {result}' for result, count in of_rule.most_common())}")
    share = results["repaired"] / max(1, len(verdicts))
    print(f"\nrepaired {results['repaired']} of {len(verdicts)} ({share:.0%}); {dict(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
