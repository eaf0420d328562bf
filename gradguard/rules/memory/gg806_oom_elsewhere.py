"""# GG806 oom-elsewhere

## What it is
Memory ran out, and neither graphs nor an optimizer hold it: numpy's arrays and Python's own objects, tensors that are kept without a graph,
other processes on the accelerator, or memory that PyTorch's allocator has reserved in pieces that do not fit.

## Why it is wrong
A smaller batch or a checkpointed model does not help where training is not what fills the memory.

## Example
    data = np.stack([load(path) for path in paths])     # the whole data set at once

## Use instead
    data = np.memmap("data.bin", mode="r", dtype="float32", shape=shape)

## Fix safety
Manual: it depends on what is kept for what.

## When it speaks, what silences it
Where an exception that says that memory could not be had leaves the guard, and nothing else of the family GG8 fits.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.memory.allocations import Allocation, allocation
from gradguard.core.account import size
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.rules.base import Rule
from gradguard.rules.memory.wording import breakdown, ran_out

CODE, NAME = "GG806", "oom-elsewhere"


def recognise(incident: Incident) -> Diagnosis | None:
    """What else there is."""
    failed = allocation(incident)
    if failed is None:
        return None
    said, fixes = _of_worker(failed) or _of_device(failed) or _of_process(failed)
    place = incident.place
    label = f"asks for {size(failed.asked)} at once" if failed.asked else "could not get memory"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed)}: {said}",
        culprit=None if place is None or not failed.asked or failed.asked < failed.held else place.span(label, "culprit"),
        related=[] if place is None or failed.asked >= max(failed.held, 1) else [place.span(label, "context")],
        explanation=f"All tensors together hold {size(failed.held)}, of which graphs have saved {size(failed.account.total('saved'))}.",
        notes=[*breakdown(failed), *_process(failed)],
        fixes=fixes,
        confidence="likely",
    )


def _of_worker(failed: Allocation) -> tuple[str, list[Fix]] | None:
    """A worker of a DataLoader ran out."""
    if not failed.is_workers:
        return None
    return "a worker process of a DataLoader could not get memory for what it loads", [
        Fix(title="Load less at once: each of `num_workers` processes holds `prefetch_factor` batches, and its own copy of the data set")
    ]


def _of_device(failed: Allocation) -> tuple[str, list[Fix]] | None:
    """What PyTorch says of the accelerator."""
    device = failed.device
    if failed.is_fragmented and device.unused is not None:
        return (
            f"PyTorch's allocator has {size(device.unused)} reserved and unused, in pieces that are too small",
            [
                Fix(
                    title="Let the allocator's pieces grow: start the program with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`",
                    safety="safe",
                )
            ],
        )
    if failed.is_others and device.others is not None and device.capacity is not None:
        return (
            f"other processes have {size(device.others)} of the device's {size(device.capacity)}, this one {size(device.ours or 0)}",
            [Fix(title="End what else runs on the device (`nvidia-smi` lists it), or choose another one")],
        )
    return None


def _of_process(failed: Allocation) -> tuple[str, list[Fix]]:
    process = failed.process if failed.on_cpu else None
    if not failed.is_torchs and failed.asked > max(failed.held, process or 0):
        return f"one array of {size(failed.asked)} is asked for, and not by PyTorch", []
    if process is not None and failed.is_mostly_python:
        what = f"of this process's {size(process)} only {size(failed.held)} are tensors"
        return what, [
            Fix(title="Look for what else is large: arrays, data read at once, what libraries keep (`tracemalloc` shows Python's part)")
        ]
    loose = failed.loose
    if loose > failed.held // 2:
        return f"tensors without a graph hold {size(loose)}: data, results, what is kept", []
    return f"tensors hold {size(failed.held)} in all", []


def _process(failed: Allocation) -> list[str]:
    if not failed.on_cpu or failed.process is None:
        return []
    return [f"this process has {size(failed.process)} of memory of its own, tensors included"]


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="memory ran out, and neither graphs nor an optimizer hold it",
    recognise=recognise,
    priority=-9,
)
