"""Verifies the fixes of each case as `gradguard run --verify` does, and compares the repaired program with the case's twin.

    python tests/cases/verified_fixes.py [CASES] [--outcome raises] [--families inplace,lifetime] [--only GLOB] [--verbose]

CASES is a folder of families of cases (default: tests/cases). Counted by rule: cases that were found, whose diagnosis has a patch, whose
patch was verified, and whose repaired program does as the twin does: the losses that it calls backward on end within 5 % of the twin's,
or both fall. Trials are made in forks of this process, which has torch imported; what they run is what `--verify` runs.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from case import HERE, Case, forked, load, load_everything, run
from first_fixes import _patched

from gradguard.config.settings import Settings
from gradguard.core.diagnosis import Diagnosis
from gradguard.runtime.trials import trial
from gradguard.runtime.trials.trial import Launch
from gradguard.runtime.trials.verify import Verifier

_NEAR = 0.05
_ENOUGH = 2.0  # seconds within which a trial may run on to the program's end


@dataclass
class Verdict:
    """What came of verifying a case's fixes."""

    case: Case
    code: str
    result: str  # not found, no patch, failed, not tried, verified
    said: str
    twin: str = "-"  # alike, both learn, unlike, no twin, no losses
    patch: str = ""


def judge(case: Case, level: str, seconds: float = 60.0) -> Verdict:
    """Runs a case, verifies the fixes of what is said, and runs the repaired program beside its twin."""
    with tempfile.TemporaryDirectory() as given:
        folder = Path(os.path.realpath(given))
        outcome = run(case, folder, level)
        if outcome.first is None:
            return Verdict(case, "-", "not found", "")
        records = [Diagnosis.model_validate({k: v for k, v in each.items() if k not in ("message", "schema_version")}) for each in outcome.loud]
        first = next(each for each, record in zip(records, outcome.loud, strict=True) if record is outcome.first)
        for name in ("report.jsonl", "printed.txt"):
            (folder / name).unlink(missing_ok=True)
        if not any(fix.patch for fix in first.fixes):
            return Verdict(case, first.code, "no patch", "; ".join(fix.title for fix in first.fixes[:1]))
        launch = Launch(str(folder / case.path.name), folder=str(folder))
        verifier = Verifier(launch, Settings(level=level), seconds)
        verified = verifier.verified(first, [each for each in records if each is not first])
        tried = [fix for fix in verified.fixes if fix.patch]
        best = tried[0]
        said = " | ".join(f"{fix.title} [{fix.safety}]: {fix.verified.verdict}: {fix.verified.why}" for fix in tried if fix.verified.why)
        patch = best.verified.patch or best.patch or ""
        verdict = Verdict(case, first.code, best.verified.verdict, said, patch=patch)
        if best.verified.verdict == "verified":
            verdict.twin = _beside_twin(case, patch)
        return verdict


def _beside_twin(case: Case, patch: str) -> str:
    twin = case.path.with_name(f"{case.path.stem}_fixed.py")
    if not twin.exists():
        return "no twin"
    if case.parts is not None:
        return "several files"
    text = _patched(case.plain, patch)
    assert text is not None, patch
    mine, theirs = _losses(replace(case, source=text)), _losses(load(twin))
    if not mine or not theirs:
        return "no losses"
    one, two = (statistics.fmean(losses[-3:]) for losses in (mine, theirs))
    if abs(one - two) <= _NEAR * max(abs(one), abs(two)):
        return "alike"
    return "both learn" if _falls(mine) and _falls(theirs) else f"unlike ({one:.4g}, the twin's {two:.4g})"


def _falls(losses: list[float]) -> bool:
    part = max(1, len(losses) // 4)
    return statistics.fmean(losses[-part:]) < statistics.fmean(losses[:part])


_RECORDER = """
import json as _json, torch as _torch
def _record(losses=[], original=_torch.autograd.backward, file=open("losses.txt", "w", 1)):
    def backward(tensors, *args, **kwargs):
        for each in (tensors,) if isinstance(tensors, _torch.Tensor) else tuple(tensors):
            file.write(str(float(each.detach().float().sum())) + "\\n")
        return original(tensors, *args, **kwargs)
    _torch.autograd.backward = backward
_record()
"""


def _losses(case: Case) -> list[float]:
    """What a program calls backward on, bare."""
    with tempfile.TemporaryDirectory() as folder:
        script = case.write(Path(folder))
        wrapper = Path(folder, "recorded.py")
        wrapper.write_text(f"{_RECORDER}\nimport runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n")
        forked(lambda: _run_bare(wrapper), Path(folder), 120.0)
        try:
            return [float(line) for line in Path(folder, "losses.txt").read_text().splitlines()]
        except OSError:
            return []


def _run_bare(script: Path) -> None:
    import runpy

    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


def _run_forked(launch: Launch, mirror: Any, folder: str, seconds: float) -> int:
    """In the place of `trial._run`: the same process, without the seconds that importing torch takes."""

    def start() -> None:
        import atexit

        from gradguard.cli.main import _run_as_trial

        atexit._clear()
        tempfile.tempdir = None
        os.environ.update(trial._environment(folder))
        try:
            _run_as_trial(Path(folder, "order.json"), str(mirror.place_of(os.path.join(launch.folder, launch.target))), list(launch.arguments), False)
        finally:
            atexit._run_exitfuncs()

    return forked(start, Path(mirror.place_of(launch.folder)), seconds + 1, os.path.join(folder, "printed.txt"))


def use_forks() -> None:
    """Makes this process ready to be the parent of all trials."""
    load_everything()
    trial._run = _run_forked
    trial._PATIENCE = _ENOUGH


def main() -> int:
    """Prints a line a case and the table by rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="?", type=Path, default=HERE)
    parser.add_argument("--level", default="standard")
    parser.add_argument("--outcome", default="raises", choices=["raises", "silent"])
    parser.add_argument("--families", default="", help="comma-separated; default: all but frameworks, or protocol,nopath,numerics")
    parser.add_argument("--only", default="*", help="glob over family/slug")
    parser.add_argument("--verbose", action="store_true", help="show the patches")
    options = parser.parse_args()
    use_forks()
    silent = options.outcome == "silent"
    families = set(filter(None, options.families.split(","))) or ({"protocol", "nopath", "numerics"} if silent else set())
    cases = [load(path) for path in sorted(options.cases.glob("*/*.py"))]
    chosen = [
        case
        for case in cases
        if case.meta.get("outcome") == options.outcome
        and fnmatch.fnmatch(case.id, options.only)
        and (case.path.parent.name in families if families else case.path.parent.name != "frameworks")
    ]
    verdicts = []
    for case in chosen:
        verdict = judge(case, options.level)
        verdicts.append(verdict)
        print(f"{verdict.result:<10} {verdict.code:<6} {case.id}: {verdict.said} | twin: {verdict.twin}", flush=True)
        if options.verbose and verdict.patch:
            print(verdict.patch)
    print(table(verdicts))
    return 0


def table(verdicts: list[Verdict]) -> str:
    """By rule: cases, with a patch, verified, like the twin."""
    rows = ["", "| rule | cases | with a patch | verified | as the twin |", "| --- | --- | --- | --- | --- |"]
    for code in [*sorted({verdict.code for verdict in verdicts}), "all"]:
        these = [verdict for verdict in verdicts if code in ("all", verdict.code)]
        results = Counter(verdict.result for verdict in these)
        patched = results["verified"] + results["failed"] + results["not tried"]
        alike = sum(verdict.twin in ("alike", "both learn") for verdict in these)
        rows.append(f"| {code} | {len(these)} | {patched} | {results['verified']} | {alike} |")
    patched = sum(verdict.result in ("verified", "failed", "not tried") for verdict in verdicts)
    verified = sum(verdict.result == "verified" for verdict in verdicts)
    rows.append(f"\na patch for {patched / max(1, len(verdicts)):.0%}, of these verified {verified / max(1, patched):.0%}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
