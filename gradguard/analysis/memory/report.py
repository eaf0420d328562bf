"""From an account of memory to what is said of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from linecache import getline

import torch

from gradguard.analysis.memory.savings import savings
from gradguard.core.account import KINDS, Account, Group, Line
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.memory_report import DeviceMemory, HeldByLine, HeldByName, MemoryReport


def report_of(
    account: Account,
    step: int,
    moment: str,
    *,
    gradients: int = 0,
    evaluation: int = 0,
    process: int | None = None,
    devices: Sequence[DeviceMemory] = (),
) -> MemoryReport:
    """The report of an account.

    Args:
        account: at the fullest moment.
        step, moment: when that was.
        gradients: bytes of all gradients after backward.
        evaluation: see `savings`.
        process, devices: of that moment; see `process_memory` and `device_memory`.
    """
    kinds: dict[str, int] = {kind: account.total(kind) for kind in KINDS}
    held = sum(each.allocated for each in devices) if devices else process
    return MemoryReport(
        step=step,
        moment=moment,
        kinds=kinds,
        gradients=max(gradients, kinds["gradients"]),
        process=process,
        devices=list(devices),
        rest=max(0, (held or 0) - sum(kinds.values())),
        hidden=account.hidden,
        lines=[_line(group) for group in account.by_line()],
        modules=[_named(group) for group in account.by_module()],
        operations=[_named(group) for group in account.by_op()],
        savings=savings(account, evaluation),
    )


def _line(group: Group[Line]) -> HeldByLine:
    where = group.key
    if where is None:
        return HeldByLine(file=None, line=0, function="", text="", nbytes=group.nbytes, tensors=len(group.rows), largest=_largest(group))
    text = getline(where.file, where.line).strip()
    return HeldByLine(
        file=where.file,
        line=where.line,
        function=where.function,
        text=text,
        nbytes=group.nbytes,
        tensors=len(group.rows),
        largest=_largest(group),
    )


def _named(group: Group[str]) -> HeldByName:
    return HeldByName(name=group.key or None, nbytes=group.nbytes, tensors=len(group.rows), largest=_largest(group))


def _largest(group: Group[Line] | Group[str]) -> str:
    row = group.rows[0]
    return f"{str(row.dtype).removeprefix('torch.')} {list(row.shape)}"


def process_memory() -> int | None:
    """Resident bytes of this process; None where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except internal_error(OSError, ValueError, IndexError):
        pass
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the peak; in kilobytes but on macOS
        return usage if sys.platform == "darwin" else usage * 1024
    except internal_error(ImportError, OSError):
        return None


def device_memory() -> list[DeviceMemory]:
    """What PyTorch's allocator has of each CUDA device that is in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        reserved = torch.cuda.memory_reserved(i)
        if reserved:
            allocated, peak = torch.cuda.memory_allocated(i), torch.cuda.max_memory_allocated(i)
            found.append(DeviceMemory(device=f"cuda:{i}", allocated=allocated, reserved=reserved, peak=peak))
    return found
