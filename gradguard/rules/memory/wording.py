"""What the rules of memory say in common: sizes, what holds how much, what is asked for."""

from __future__ import annotations

from gradguard.analysis.memory.allocations import Allocation
from gradguard.core.account import KINDS, Kind, size

_WORDS: dict[Kind, str] = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "saved": "saved for backward",
    "older graphs": "graphs of earlier steps",
}
AVOID = ["`gc.collect()` or `torch.cuda.empty_cache()`: this memory is in use, not lost"]


def shape(sizes: tuple[int, ...]) -> str:
    """`[8, 4096, 4096]`."""
    return str(list(sizes))


def asked(failed: Allocation) -> str:
    """How much was asked for, as the end of a sentence's subject: `the next 4.0 MiB`."""
    return f"the next {size(failed.asked)}" if failed.asked else "the next allocation"


def ran_out(failed: Allocation) -> str:
    """What a headline begins with."""
    where = "Out of memory" if failed.on_cpu else "Out of memory on the accelerator"
    return f"{where} ({size(failed.asked)} asked for)" if failed.asked else where


def breakdown(failed: Allocation) -> list[str]:
    """What is held, the most first, and what an accelerator's allocator has unused."""
    account = failed.account
    parts = [(account.total(kind), _WORDS[kind]) for kind in KINDS] + [(failed.loose, "other tensors")]
    known = [f"{word} {size(nbytes)}" for nbytes, word in sorted(parts, key=lambda part: -part[0]) if nbytes >= 1 << 10]
    notes = [f"held by tensors: {', '.join(known)}"] if known else []
    if account.hidden:
        notes.append(f"{account.hidden} saved values are kept by hooks of the program's, which do not say how large they are")
    device = failed.device
    if device.allocated is not None and device.unused is not None:
        notes.append(
            f"of PyTorch's memory on the device {size(device.allocated)} is held by tensors, "
            f"and {size(device.unused)} is reserved by its allocator but unused"
        )
    return notes
