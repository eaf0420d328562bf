"""`gradguard demo`: a small real training loop with a bug under the guard, then the repaired one."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

BROKEN, REPAIRED = "centered_features.py", "centered_features_fixed.py"


def show() -> int:
    """Print the demo; 0 if the broken program was stopped and the repaired one ran to its end."""
    # In a folder of its own: what is installed inside gradguard would not count as the user's code.
    with tempfile.TemporaryDirectory(prefix="gradguard-demo-") as folder:
        for name in (BROKEN, REPAIRED):
            shutil.copy(_examples() / name, folder)
        print("A classifier that centres its features in place. Without the guard:\n")
        _run(folder, [BROKEN])
        print("\nThe same program under the guard:\n")
        broken = _run(folder, ["-m", "gradguard", "run", BROKEN])
        print("\nRepaired:\n")
        print(_difference(Path(folder)))
        repaired = _run(folder, ["-m", "gradguard", "run", REPAIRED])
    print(f"\nThe programs: {_examples()}", flush=True)
    return 0 if broken == 1 and repaired == 0 else 1


def _examples() -> Path:
    spec = find_spec("gradguard.examples")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).parents[2] / "examples"  # run from a checkout that is not installed


def _run(folder: str, command: list[str]) -> int:
    print("$ " + " ".join(["python", *command]), flush=True)
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode


def _difference(folder: Path) -> str:
    before, after = ((folder / name).read_text().splitlines() for name in (BROKEN, REPAIRED))
    return "\n".join(difflib.unified_diff(before, after, BROKEN, REPAIRED, lineterm="", n=1)) + "\n"
