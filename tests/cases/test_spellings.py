"""The script that runs spellings scores them rightly; a fixed selection is found as its originals are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import spellings
from case import HERE, load_everything
from spellings import Spelling

BLOCK = """# /// case
# title = "backward is called again on the same loss"
# outcome = "raises"
# cause = "graph-freed-same-root"
# names = []
# ///
import torch
"""
LOSS = "loss = torch.ones(3, requires_grad=True).pow(2).sum()\n"
TWICE = "loss.backward()\nloss.backward()  # <- culprit\n"
CASES = {
    "twice": BLOCK + LOSS + TWICE,
    "twice_fixed": "import torch\n" + LOSS + "loss.backward()\n",
    "misread": BLOCK.replace("freed-same-root", "never-freed") + LOSS + TWICE,
}
SPELLINGS = {
    "twice__same": BLOCK + LOSS.replace(".sum()", ".mean()") + TWICE,
    "twice__split": BLOCK + "from twice__split_parts import again\n" + LOSS + "again(loss)\n",
    "twice__split_parts": "def again(loss):\n    loss.backward()\n    loss.backward()  # <- culprit\n",
    "twice__silent": BLOCK + LOSS + "loss.backward()  # <- culprit\n",
    "twice__elsewhere": BLOCK + LOSS.replace("\n", "  # <- culprit\n") + TWICE.replace("  # <- culprit", ""),
    "twice__same_fixed": CASES["twice_fixed"],
    "twice__loud_fixed": "import torch\n" + LOSS + TWICE,
    "misread__same": BLOCK.replace("freed-same-root", "never-freed") + LOSS + TWICE,
}


SELECTION = list(spellings.spellings(HERE / "spellings"))


@pytest.fixture(autouse=True, scope="module")
def ready() -> None:
    load_everything()


def write(folder: Path, programs: dict[str, str]) -> Path:
    family = folder / "family"
    family.mkdir(parents=True)
    for stem, text in programs.items():
        (family / f"{stem}.py").write_text(text)
    return folder


def status(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["spellings.py", *map(str, arguments)])
    return spellings.main()


def test_each_spelling_is_held_to_its_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases, folder = write(tmp_path / "cases", CASES), write(tmp_path / "spellings", SPELLINGS)
    records, lost = tmp_path / "records.jsonl", tmp_path / "lost.txt"
    assert status(monkeypatch, folder, "--cases", cases, "--json", records, "--losses", lost) == 1
    results = {record["program"].removeprefix("family/"): record for record in map(json.loads, records.read_text().splitlines())}
    assert {program: record["verdict"] for program, record in results.items() if record["kind"]} == {
        "twice__same": "kept",
        "twice__split": "kept",
        "twice__silent": "cause",
        "twice__elsewhere": "culprit",
        "twice__same_fixed": "quiet",
        "twice__loud_fixed": "alarm",
        "misread__same": "unmeasured",
    }
    assert set(results) >= set(CASES)
    assert results["twice__split"]["said"].startswith("GG201 graph-freed-same-root at twice__split_parts.py:3")
    assert results["twice__silent"]["code"] == "GG201"  # a loss counts for the rule of the original
    said = lost.read_text()
    assert said.startswith("alarms: 1\n") and "\nGG201: 2\n" in said
    printed = capsys.readouterr().out
    total = next(line for line in printed.splitlines() if line.startswith("all "))
    assert " ".join(total.split()) == "all 4 3 (75.0%) 2 (50.0%) 2 1"
    assert "wrong in the original: family/misread" in printed

    # against a baseline, only what changed is shown, and an alarm stays one
    (folder / "family" / "twice__same.py").write_text(SPELLINGS["twice__silent"])
    (folder / "family" / "twice__silent.py").write_text(SPELLINGS["twice__same"])
    assert status(monkeypatch, folder, "--cases", cases, "--kind", "same", "silent", "--baseline", records) == 1
    printed = capsys.readouterr().out
    assert "lost since the baseline: 1\nfamily/twice__same: cause; said nothing" in printed
    assert "found since the baseline: 1\nfamily/twice__silent: was cause" in printed


@pytest.mark.parametrize("spelling", SELECTION, ids=lambda spelling: spelling.case.id)
def test_bug_is_found_however_it_is_written(spelling: Spelling) -> None:
    result = spellings.judge(spelling.case, spelling.kind, None, "standard")
    assert not result.is_loss, f"{result.verdict}: wanted {result.wanted}; said {result.said}"


def test_selection_has_three_spellings_of_a_bug() -> None:
    bugs = [spelling.original for spelling in SELECTION if not spelling.case.is_sound]
    assert len(set(bugs)) >= 40
    assert {bug for bug in bugs if bugs.count(bug) != 3} == set()
    assert len({spelling.case.meta["cause"] for spelling in SELECTION if not spelling.case.is_sound}) >= 30
    assert sum(spelling.case.is_sound for spelling in SELECTION) >= 12
