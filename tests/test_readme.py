"""What README shows of programs' output is what they print. `python tests/test_readme.py` writes it anew.

A block to keep true stands between two comments; `| tail N` shows the last N lines alone:

    <!-- output: gradguard run examples/centered_features.py -->
    ```text
    ...
    ```
    <!-- /output -->
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"(?P<head><!-- output: (?P<command>[^|>]+?)(?: \| tail (?P<tail>\d+))? -->\n```text\n)(?P<shown>.*?)(?P<foot>```\n<!-- /output -->)",
    re.S,
)


def printed(command: str, tail: str | None) -> str:
    """What the command prints, free of what differs between machines and Python versions."""
    words = shlex.split(command)
    program = {"python": [sys.executable], "gradguard": [sys.executable, "-m", "gradguard"]}[words[0]]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    plain = {"PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=ROOT,
        env={**{name: value for name, value in os.environ.items() if not name.startswith("GRADGUARD")}, **plain},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
    )
    lines = done.stdout.replace(f"{ROOT}{os.sep}", "").splitlines()
    # the marks under a traceback's lines differ between Python versions (those of a diagnosis stand behind a bar)
    lines = [line for line in lines if not re.fullmatch(r" {4,}[~^]+", line)]
    return "".join(line + "\n" for line in lines[-int(tail or 0) :])


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="PyTorch's own words are those of 2.13")
@pytest.mark.parametrize("block", list(BLOCK.finditer(README.read_text(encoding="utf-8"))), ids=lambda block: block["command"])
def test_shown_output_is_real(block: re.Match[str]) -> None:
    assert block["shown"] == printed(block["command"], block["tail"]), "run: make readme"


def test_diagnosis_is_shown() -> None:
    """README opens with a diagnosis: the test above has something to compare."""
    blocks = list(BLOCK.finditer(README.read_text(encoding="utf-8")))
    assert any("[GG" in block["shown"] for block in blocks)


def test_named_files_and_targets_exist() -> None:
    text = README.read_text(encoding="utf-8")
    named = re.findall(r"\]\(([\w./-]+?)(?:#[\w-]+)?\)", text) + re.findall(r"\bexamples/\w+\.py\b", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    targets = re.findall(r"^([\w./]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"^make (\S+)$", text, re.M)) <= set(targets)


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(
        BLOCK.sub(lambda block: block["head"] + printed(block["command"], block["tail"]) + block["foot"], text), encoding="utf-8"
    )
