"""A rank's last collectives in a mapped file: what stands there can be read when the process is gone.

Gloo ends a process from a thread of C++ when another rank brings more bytes than it expects, and the kernel kills one for want of
memory: neither runs any Python. A record is a copy of some bytes into memory. The file is removed by its process, or an hour after the
process's death by the next job.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from gradguard.core.foreign_exceptions import internal_error

_SLOT, _KEPT = 512, 8
_PREFIX = "gradguard-ring-"
_MEMORY = "/dev/shm"
_READ = 3600.0  # seconds in which the ranks of the job have looked at it


class Record(NamedTuple):
    """One collective, as it is written down.

    Attributes:
        group, kind, shape, dtype: of `gradguard.probes.collective_ring.Call`; "" for no shape, dtype or file.
    """

    number: int
    group: str
    kind: str
    shape: str
    dtype: str
    line: int
    file: str


def text(group: str, kind: str, shape: tuple[int, ...] | None, dtype: str | None, line: int, file: str) -> bytes:
    """What collectives of one line have in common."""
    sizes = "" if shape is None else repr(list(shape))
    return "\t".join((group, kind, sizes, dtype or "", str(line), file)).encode(errors="replace")[: _SLOT - 64].replace(b"\n", b" ")


class Outliving:
    """This process's file."""

    def __init__(self) -> None:
        _sweep()
        descriptor, self.path = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_folder())
        try:
            os.ftruncate(descriptor, _SLOT * _KEPT)
            self._map = mmap.mmap(descriptor, _SLOT * _KEPT)
        finally:
            os.close(descriptor)

    def put(self, index: int, number: int, text: bytes) -> None:
        """Writes a collective over an older one."""
        record = b"%d\t%d\t%b\n" % (index, number, text)
        at = index % _KEPT * _SLOT
        self._map[at : at + len(record)] = record

    def remove(self) -> None:
        """The process ends as it should."""
        _remove(Path(self.path))


def left_by(path: str) -> list[Record]:
    """What a process that is gone has left on this machine, oldest first."""
    file = Path(path)
    if not file.name.startswith(_PREFIX) or file.is_symlink() or not file.is_file():
        return []
    try:
        content = file.read_bytes()
    except internal_error(OSError):
        return []
    found: list[tuple[int, Record]] = []
    for at in range(0, len(content), _SLOT):
        fields = content[at : at + _SLOT].partition(b"\n")[0].decode(errors="replace").split("\t")
        try:
            index, number, group, kind, shape, dtype, line, name = fields
            found.append((int(index), Record(int(number), group, kind, shape, dtype, int(line), name)))
        except internal_error(ValueError):  # not used yet, or the process died while it wrote
            continue
    return [record for _, record in sorted(found)]


def _folder() -> str:
    """One in memory, where the system has it."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()


def _sweep() -> None:
    """Removes the files of processes that were killed."""
    for file in Path(_folder()).glob(f"{_PREFIX}*"):
        try:
            if time.time() - file.stat().st_mtime > _READ:
                os.kill(int(file.name.removeprefix(_PREFIX).partition("-")[0]), 0)
        except internal_error(ProcessLookupError):
            _remove(file)
        except internal_error(OSError, ValueError):  # another user's
            continue


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except internal_error(OSError):
        pass
