"""A process of its own that forks the programs of tests: torch and gradguard are imported in it, and nothing that other tests have left."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.cases.case import forked, load_everything

ROOT = Path(__file__).parents[2]


def run_apart(function: Callable[..., object], args: tuple[Any, ...], folder: Path, timeout: float, printed: Path) -> int:
    """`forked`, from that process; the function is one of a module's, and its arguments can be pickled."""
    connection = _started()
    connection.send((function, args, folder, timeout, printed))
    return int(connection.recv())


@cache
def _started() -> Connection:
    """It ends when this process does, which closes the connection."""
    ours, theirs = multiprocessing.Pipe()
    subprocess.Popen([sys.executable, "-m", "tests.cases.zygote", str(theirs.fileno())], cwd=ROOT, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


def _serve(connection: Connection) -> None:
    load_everything()
    while True:
        try:
            function, args, folder, timeout, printed = connection.recv()
        except EOFError:
            return
        connection.send(forked(lambda: function(*args), folder, timeout, printed))  # noqa: B023


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
