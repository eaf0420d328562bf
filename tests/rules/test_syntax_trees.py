"""Which rules read syntax trees themselves, and do not ask the analysis layer: those of a list that may only get shorter."""

from __future__ import annotations

import re
from pathlib import Path

RULES = Path(__file__).parents[2] / "gradguard" / "rules"
LISTED = [line.split() for line in (Path(__file__).parent / "syntax_trees.txt").read_text(encoding="utf-8").splitlines()]


def _having(pattern: str) -> set[str]:
    found = (path for path in RULES.rglob("*.py") if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE))
    return {path.relative_to(RULES).as_posix() for path in found}


def test_no_other_rule_imports_ast() -> None:
    found, listed = _having(r"^(import ast|from ast import)"), {line[0] for line in LISTED}
    assert found - listed == set(), "ask gradguard.analysis.program instead"
    assert listed - found == set(), "no longer so: take them off the list"


def test_no_other_rule_walks_trees() -> None:
    found, listed = _having(r"\bast\.walk\("), {line[0] for line in LISTED if "walks" in line}
    assert found - listed == set(), "ask gradguard.analysis.program instead"
    assert listed - found == set(), "no longer so: take `walks` off their lines"
