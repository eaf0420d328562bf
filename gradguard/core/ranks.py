"""Which process of a distributed run this is, and which of its processes says what all of them see.

Nothing here talks to another rank: what is shared goes through files on this machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch.distributed as dist

from gradguard.core.diagnosis import Diagnosis
from gradguard.core.foreign_exceptions import internal_error

_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # torchrun's and accelerate's, Open MPI's, MPICH's, Slurm's
SHARED = "GRADGUARD_SHARED"  # the folder that spawned workers of one launch share; set for them alone

LOST = (
    *("connection closed by peer", "connection reset by peer", "timed out waiting", "broken pipe", "collective operation timeout"),
    *("pair closure", "connection was likely closed", "socket closed", "op.preamble.length <= op.nbytes", "nccl error"),
    *("ncclremoteerror", "mpi error", "application timeout caused pair closure", "peer rank"),
)
"""Lower-case pieces of what gloo, NCCL and MPI say on a rank when another has gone, does not come, or brings something else."""


def is_lost_connection(text: str) -> bool:
    """Whether an error's text is that of a connection between ranks, which is seldom the cause of anything."""
    return any(piece in text.lower() for piece in LOST)


def rank() -> int | None:
    """This process's rank, None outside a distributed run."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def own_suffix() -> str:
    """What tells this process's own files from those of the others of its launch: "" for the first of them, else such as ".rank3"."""
    known = rank()
    given = str(known) if known is not None else next((os.environ[name] for name in _LAUNCHED if os.environ.get(name)), "0")
    worker = os.environ.get("GRADGUARD_WORKER") if known is None else None
    return f".rank{given}" if given != "0" else f".worker{worker}" if worker not in (None, "0") else ""


def begins_the_launch() -> bool:
    """Whether this process is the first of those that were launched together, for the first time.

    What the others write, and what was written before torchrun started all of them again, must not be removed.
    """
    given = next((os.environ[name] for name in _LAUNCHED if os.environ.get(name)), "0")
    return given == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


_starts: dict[Path, int] = {}  # how long each report was when this process first had to do with it


def report_begins(report: Path | None) -> None:
    """Lines that stand in the report already are an earlier run's."""
    if report is not None and report not in _starts and len(_starts) < 64:
        try:
            _starts[report] = report.stat().st_size
        except internal_error(OSError):
            _starts[report] = 0


def told_elsewhere(diagnosis: Diagnosis, report: Path | None) -> bool:
    """Whether another rank has said this: the same rule at the same place. If not, this rank is now the one that has.

    Args:
        diagnosis: what is to be said; of a run without ranks it is never said elsewhere.
        report: the report file, looked at where there is no folder that the ranks share (they were not spawned).
    """
    if diagnosis.rank is None:
        return False
    folder = os.environ.get(SHARED)
    if folder is not None:
        return not _claim(Path(folder), repr(diagnosis.key))
    try:
        mine = Claims.claim(f"{crc32(repr(diagnosis.key).encode()):08x}")
    except internal_error(RuntimeError):  # the rank that keeps the store has ended
        mine = None
    if mine is not None:
        return not mine
    return report is not None and any(_same(line, diagnosis) for line in _lines(report, _starts.get(report, 0)))


class Claims:
    """Where the ranks of a job agree which of them says what; set while they are watched."""

    claim: Callable[[str], bool | None] = staticmethod(lambda key: None)


def _claim(folder: Path, key: str) -> bool:
    """Whether this process is the first with this key, or was so before."""
    path = folder / f"said-{crc32(key.encode()):08x}"
    me = str(os.getpid()).encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return path.read_bytes() == me
    except internal_error(OSError):  # the folder is gone with the parent: better twice than never
        return True
    os.write(descriptor, me)
    os.close(descriptor)
    return True


def _lines(report: Path, start: int) -> list[dict[str, Any]]:
    try:
        with report.open("rb") as file:
            if start <= os.fstat(file.fileno()).st_size:  # shorter: the launch's first process has begun it anew
                file.seek(start)
            return [json.loads(line) for line in file.read().splitlines() if line.endswith(b"}")]
    except internal_error(OSError, ValueError):
        return []


def _same(line: dict[str, Any], diagnosis: Diagnosis) -> bool:
    if line.get("rank") in (None, diagnosis.rank):
        return False
    place: dict[str, Any] = line.get("culprit") or next(iter(line.get("related") or ()), {})
    return (line.get("code"), place.get("file", ""), place.get("line", 0)) == diagnosis.key


# -- how the other ranks ended ----------------------------------------------------------------------------------------


def note_end(outcome: str) -> None:
    """Leaves word for the other spawned workers that this one has ended: "returned" or "raised"."""
    folder, own = os.environ.get(SHARED), os.environ.get("GRADGUARD_WORKER", "0")
    if folder is not None:
        try:
            Path(folder, f"end-{own}").write_text(outcome)
        except internal_error(OSError):
            pass


def ends(wait: float = 0.0) -> dict[int, str]:
    """How other spawned workers have ended, by their index; empty where nothing is known.

    Args:
        wait: seconds to wait for the first of them, whose connections may be closed a moment before its word is there.
    """
    folder = os.environ.get(SHARED)
    if folder is None:
        return {}
    until = time.monotonic() + wait
    while True:
        found = {}
        for path in Path(folder).glob("end-*"):
            try:
                found[int(path.name[4:])] = path.read_text()
            except internal_error(OSError, ValueError):
                continue
        if found or time.monotonic() >= until:
            return found
        time.sleep(0.02)
