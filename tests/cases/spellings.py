"""Runs spellings of the cases: the same bug, written otherwise, must be found as in the original, and a sound program stay silent.

    python tests/cases/spellings.py FOLDER [--cases CASES] [--level standard] [--only GLOB] [--kind NAME ...] [--skip-multiprocess]
                                    [--json OUT] [--losses OUT] [--baseline FILE]

FOLDER holds `<family>/<slug>__<spelling>.py`, of a twin `<slug>__<spelling>_fixed.py`, and where a spelling is split over two files
`<stem>_parts.py` beside it. The originals are in CASES (default: tests/cases); they are run first, and a spelling is held to what
its original gets right. An original that is not there counts as right. Each program runs in a fork of this process.

    cause    right in the original: the spelling's first diagnosis of the highest severity has the right name too
    culprit  right in the original: it points at a marked line too
    alarm    a spelling of a twin or of a sound program of which something is said, or that fails, where the original is silent

--json writes one line a program as it is judged, --losses keeps the list of losses by rule up to date while the programs run, and
--baseline reads what --json wrote earlier and shows what is lost since and what is found again. The exit status is 1 where there is
an alarm or, with a baseline, a new loss.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from case import HERE, PARTS, Case, Outcome, load, load_everything, run

_NAME = re.compile(r"(?P<slug>.+)__(?P<kind>[a-z0-9]+?)(?P<twin>_fixed)?")
_FRAMEWORKS = ("accelerate", "transformers", "lightning", "pytorch_lightning")  # imported by the parent before the programs that need them
_LOSSES = ("cause", "culprit", "alarm")
_MULTIPROCESS = re.compile(r"\binit_process_group\b|\bmp\.spawn\b")


@dataclass
class Result:
    """What came of a program, original or spelling."""

    program: str  # family/stem
    kind: str  # "" for an original
    path: str
    sound: bool
    code: str  # of the rule that the original's diagnosis comes from, "" where there is none
    wanted: str
    said: str
    cause: bool
    culprit: bool
    confidence: str  # of the first diagnosis
    verdict: str = ""  # of a spelling: kept, cause, culprit, alarm, quiet, or unmeasured (the original is wrong)
    seconds: float = 0.0

    @property
    def is_loss(self) -> bool:
        return self.verdict in _LOSSES


def measure(case: Case, level: str) -> Result:
    """Runs a program and says what is right of what is said of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        outcome = run(case, Path(folder), level)
    first = outcome.first
    clean = first is None and outcome.status == 0
    return Result(
        program=case.id,
        kind="",
        path=str(case.path),
        sound=case.is_sound,
        code=first["code"] if first else "",
        wanted="silence" if case.is_sound else f"{case.meta['cause']} at {_places(case.culprits)}",
        said=_said(outcome),
        cause=clean if case.is_sound else first is not None and case.names_cause(first),
        culprit=clean if case.is_sound else first is not None and case.names_culprit(first),
        confidence=first.get("confidence", "") if first else "",
        seconds=round(time.monotonic() - began, 2),
    )


def judge(spelling: Case, kind: str, original: Result | None, level: str) -> Result:
    """Runs a spelling and holds it to its original."""
    result = measure(spelling, level)
    right_cause = original is None or original.cause
    right_culprit = original is None or (original.cause and original.culprit)
    if result.sound:
        verdict = "quiet" if result.cause else "alarm" if right_cause else "unmeasured"
    elif not right_cause:
        verdict = "unmeasured"
    elif not result.cause:
        verdict = "cause"
    elif right_culprit and not result.culprit:
        verdict = "culprit"
    else:
        verdict = "kept"
    code = original.code if original is not None and not result.sound else result.code
    return replace(result, kind=kind, verdict=verdict, code=code)


def _places(culprits: set[tuple[str, int]]) -> str:
    return ", ".join(f"{file}:{line}" for file, line in sorted(culprits))


def _said(outcome: Outcome) -> str:
    first = outcome.first
    if first is None:
        last = (outcome.output.strip().splitlines() or [""])[-1]
        return "nothing" if outcome.status == 0 else f"nothing, exit status {outcome.status}: {last[:100]}"
    place = first["culprit"]
    where = f"{Path(place['file']).name}:{place['line']}" if place else "no line"
    return f"{first['code']} {first['name']} at {where} ({first.get('confidence', '?')})"


@dataclass
class Spelling:
    """A program of the folder with the key of its original and the way in which it was respelled."""

    case: Case
    original: str
    kind: str


def spellings(folder: Path) -> Iterator[Spelling]:
    """The programs of a folder of spellings."""
    for path in sorted(folder.glob("*/*.py")):
        name = _NAME.fullmatch(path.stem)
        if name is not None and not path.stem.endswith(PARTS):
            yield Spelling(load(path), f"{path.parent.name}/{name['slug']}{name['twin'] or ''}", name["kind"])


def _frameworks(case: Case) -> tuple[str, ...]:
    """The frameworks that a program imports."""
    texts = [file.read_text() for file in (case.path, case.parts) if file is not None]
    return tuple(name for name in _FRAMEWORKS if any(re.search(rf"(?m)^\s*(?:import|from) {name}\b", text) for text in texts))


def _load_frameworks(names: Iterable[str]) -> None:
    for name in names:
        importlib.import_module(name)


def table(results: list[Result], key: str) -> str:
    """Counts of the verdicts by an attribute of the results."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for group in (getattr(result, key) or "-", "all"):
            count = groups[group]
            if result.sound:
                count["sound"] += result.verdict != "unmeasured"
                count["alarms"] += result.verdict == "alarm"
            elif result.verdict != "unmeasured":
                count["tried"] += 1
                count["cause"] += result.verdict != "cause"
                count["line"] += result.verdict == "kept"
    lines = [f"{key:<10} {'spellings':>9} {'cause kept':>16} {'culprit kept':>16} {'sound':>6} {'alarms':>6}"]
    for group in sorted(groups, key=lambda group: (group == "all", group)):
        count = groups[group]
        shares = [f"{count[mark]} ({count[mark] / count['tried']:.1%})" if count["tried"] else "-" for mark in ("cause", "line")]
        lines.append(f"{group:<10} {count['tried']:>9} {shares[0]:>16} {shares[1]:>16} {count['sound']:>6} {count['alarms']:>6}")
    return "\n".join(lines)


def losses(results: list[Result]) -> str:
    """The losses by rule, one line each."""
    by_code: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.is_loss:
            by_code["alarms" if result.verdict == "alarm" else result.code or "-"].append(result)
    lines: list[str] = []
    for code in sorted(by_code, key=lambda code: (code != "alarms", code)):
        lines.append(f"{code}: {len(by_code[code])}")
        for result in sorted(by_code[code], key=lambda result: (result.verdict, result.program)):
            lines.append(f"  {result.verdict:<7} {result.path}: wanted {result.wanted}; said {result.said}")
    return "\n".join(lines)


def changes(results: list[Result], baseline: Path) -> tuple[list[str], list[str]]:
    """What is lost since the baseline, and what is found again."""
    before = {record["program"]: record["verdict"] for record in map(json.loads, baseline.read_text().splitlines())}
    known = [(result, before[result.program]) for result in results if result.kind and result.program in before]
    lost = [f"{result.program}: {result.verdict}; said {result.said}" for result, was in known if result.is_loss and result.verdict != was]
    found = [f"{result.program}: was {was}" for result, was in known if not result.is_loss and was in _LOSSES]
    return lost, found


def main() -> int:
    """Prints the losses and the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=Path, default=HERE, help="the folder of the originals")
    parser.add_argument("--level", default="standard")
    parser.add_argument("--only", default="*", help="glob over family/slug__spelling")
    parser.add_argument("--kind", nargs="+", help="these spellings only")
    parser.add_argument("--skip-multiprocess", action="store_true", help="leave out programs of several processes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--baseline", type=Path)
    options = parser.parse_args()
    load_everything()

    chosen = [
        spelling
        for spelling in spellings(options.folder)
        if fnmatch.fnmatch(spelling.case.id, options.only)
        and (not options.kind or spelling.kind in options.kind)
        and not (options.skip_multiprocess and _MULTIPROCESS.search(spelling.case.plain))
    ]
    chosen.sort(key=lambda spelling: _frameworks(spelling.case))  # stable; the parent imports a framework when only its programs are left
    originals: dict[str, Result] = {}
    results: list[Result] = []
    records = options.json.open("w") if options.json else None

    def keep(result: Result) -> Result:
        if records is not None:
            print(json.dumps(asdict(result)), file=records, flush=True)
        return result

    for number, spelling in enumerate(chosen, 1):
        _load_frameworks(_frameworks(spelling.case))
        source = options.cases / f"{spelling.original}.py"
        if spelling.original not in originals and source.exists():
            originals[spelling.original] = keep(measure(load(source), options.level))
        result = keep(judge(spelling.case, spelling.kind, originals.get(spelling.original), options.level))
        results.append(result)
        if result.is_loss:
            print(f"[{number}/{len(chosen)}] {result.verdict} {result.program}: wanted {result.wanted}; said {result.said}", flush=True)
            if options.losses:
                options.losses.write_text(losses(results) + "\n")

    print(f"\n{losses(results)}\n\n{table(results, 'kind')}\n\n{table(results, 'code')}")
    runs = [*originals.values(), *results]
    wrong = [original.program for original in originals.values() if not (original.cause and original.culprit)]
    print(f"\n{len(runs)} programs, {sum(result.seconds for result in runs):.0f} s; wrong in the original: {', '.join(wrong) or 'none'}")
    alarms = any(result.verdict == "alarm" for result in results)
    if options.baseline is None:
        return int(alarms)
    lost, found = changes(results, options.baseline)
    print(f"\nlost since the baseline: {len(lost)}", *lost, f"found since the baseline: {len(found)}", *found, sep="\n")
    return int(alarms or bool(lost))


if __name__ == "__main__":
    sys.exit(main())
