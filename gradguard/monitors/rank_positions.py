"""Where a rank is: what it waits in or does, at which of the user's lines, and which collectives it made last.

Read only when it is asked for, by the watching thread or by the thread whose collective has failed. A position is plain data, and
small enough to be put into the store of the job.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from gradguard.core.callsite import PACKAGE_DIR, USER_FILES, CallSite
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.ranks import is_lost_connection
from gradguard.core.safe_read import peek, variables_of
from gradguard.probes import collective_ring, outliving, replicas
from gradguard.probes.collective_ring import Call, ring

State = Literal["waits", "runs", "finished", "failed", "gone"]
MOST_BYTES = 960
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# What torch's own functions are for, by file and name; the innermost one tells what a rank does.
_DOING = {
    ("utils/data/dataloader.py", "__next__"): "the data loader",
    ("serialization.py", "save"): "`torch.save`",
    ("serialization.py", "load"): "`torch.load`",
    ("autograd/graph.py", "_engine_run_backward"): "backward",
    ("nn/modules/module.py", "_call_impl"): "forward",
    ("optim/optimizer.py", "wrapper"): "the optimizer's step",
}
_FRAMES = 4
_STILL = 1.5
_TEXT = 160


class Place(NamedTuple):
    """A line of the user's."""

    file: str
    line: int
    function: str


class Past(NamedTuple):
    """A collective that was made, or is under way."""

    group: str
    number: int
    kind: str
    shape: tuple[int, ...] | None
    dtype: str | None
    file: str
    line: int

    @property
    def place(self) -> Place:
        """The user's line."""
        return Place(self.file, self.line, "")

    @property
    def size(self) -> int:
        """The elements that it brings; every rank must bring as many."""
        return prod(self.shape or ())


@dataclass(frozen=True)
class Position:
    """One rank's.

    Attributes:
        rank: of the default group.
        state: "waits" in a collective, "runs" something else, has "finished" or "failed", or is "gone": it does not answer.
        doing: what it waits in, or is in the midst of, by torch's functions; "" where none of those is on the stack.
        group, number, shape, dtype: of the collective that it waits in.
        seconds: for how long it has been there.
        step: the training step.
        stack: the user's frames, innermost first.
        past: its last collectives, oldest first.
        numbers: how many collectives it has begun, by group.
        error: of one that failed: what it raised, in one line.
        broken: whether what it raised is what a lost connection raises.
    """

    rank: int
    state: State
    doing: str = ""
    group: str = ""
    number: int = 0
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    seconds: float = 0.0
    step: int = 0
    stack: tuple[Place, ...] = ()
    past: tuple[Past, ...] = ()
    numbers: dict[str, int] = field(default_factory=dict)
    error: str = ""
    broken: bool = False

    @property
    def place(self) -> Place | None:
        """The user's innermost line."""
        return self.stack[0] if self.stack else None

    def begun(self, group: str) -> int | None:
        """How many collectives of a group it has begun; None where it has not been seen to use the group."""
        return self.numbers.get(group)

    def __str__(self) -> str:
        """On one line."""
        words = [f"rank {self.rank}", {"gone": "does not answer"}.get(self.state, self.state)]
        words += [f"in {self.doing}"] if self.doing else []
        words += [f"at {self.place.file}:{self.place.line}"] if self.place is not None else []
        words += [f"(step {self.step})"] if self.step else []
        return " ".join(words)

    # -- as it is put into the store ----------------------------------------------------------------------------------

    def packed(self) -> str:
        """JSON of less than `MOST_BYTES`: what was long ago is left out first."""
        past, stack = self.past, self.stack
        while True:
            text = replace(self, past=past, stack=stack)._json()
            if len(text.encode()) < MOST_BYTES:
                return text
            if len(past) > 2:
                past = past[1:]
            elif len(stack) > 1:
                stack = stack[:-1]
            elif past:
                past = ()
            elif stack:
                stack = ()
            else:
                return Position(self.rank, self.state, self.doing[:_TEXT], self.group[:_TEXT], self.number)._json()

    def _json(self) -> str:
        files = list(dict.fromkeys([*(each.file for each in self.stack), *(each.file for each in self.past)]))
        groups = list(dict.fromkeys(each.group for each in self.past))
        record: dict[str, Any] = {"r": self.rank, "s": self.state, "d": self.doing, "t": round(self.seconds, 1), "n": self.step}
        if self.number:
            record["c"] = [self.group, self.number, self.shape, self.dtype]
        if self.error:
            record["e"] = [self.error[:_TEXT], self.broken]
        record["g"] = dict(list(self.numbers.items())[:6])
        record["f"] = files
        record["at"] = [[files.index(each.file), each.line, each.function[-40:]] for each in self.stack]
        record["gs"] = groups
        record["p"] = [[groups.index(p.group), p.number, p.kind, p.shape, p.dtype, files.index(p.file), p.line] for p in self.past]
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def unpacked(cls, text: str | bytes) -> Position:
        """What another rank has put into the store."""
        record = json.loads(text)
        files, groups = record["f"], record["gs"]
        group, number, shape, dtype = record.get("c", ("", 0, None, None))
        error, broken = record.get("e", ("", False))
        return cls(
            rank=record["r"],
            state=record["s"],
            doing=record["d"],
            group=group,
            number=number,
            shape=None if shape is None else tuple(shape),
            dtype=dtype,
            seconds=record["t"],
            step=record["n"],
            stack=tuple(Place(files[file], line, function) for file, line, function in record["at"]),
            past=tuple(
                Past(groups[group], number, kind, None if shape is None else tuple(shape), dtype, files[file], line)
                for group, number, kind, shape, dtype, file, line in record["p"]
            ),
            numbers=record["g"],
            error=error,
            broken=broken,
        )


# -- this rank's ------------------------------------------------------------------------------------------------------


def here(thread: int, quiet: float, still: float, step: int) -> Position:
    """Where this rank is.

    Args:
        thread: the one that trains.
        quiet: for how many seconds it has begun no collective.
        still: for how many seconds it has been at the same instruction, as far as was seen.
        step: the training step.
    """
    frame = sys._current_frames().get(thread)
    waiting = min(list(ring.open.values()), key=lambda held: held[1], default=None)
    group = _reducing()
    common: dict[str, Any] = {"step": step, "stack": _places(frame), "past": past(), "numbers": numbers()}
    if waiting is not None:
        return _waiting(waiting[0], time.monotonic() - waiting[1], common)
    lost = ring.broken
    if lost is not None and lost[0] is ring.calls[-1] and is_lost_connection(lost[2]):  # the thread deals with what that raised
        return _waiting(lost[0], 0.0, common | {"stack": tuple(map(_place, lost[1][:_FRAMES])), "broken": True})
    doing = _doing(frame)
    if doing == "backward" and group is not None:
        return Position(dist.get_rank(), "waits", "backward", group, common["numbers"].get(group, 0), seconds=quiet, **common)
    last = ring.unfinished() if still >= _STILL and doing in ("", "backward") else None
    if last is not None:  # the thread waits for what was begun before
        return _waiting(last, quiet, common)
    return Position(dist.get_rank(), "runs", doing, seconds=quiet, **common)


def broken(step: int, frames: Iterable[CallSite]) -> Position:
    """Where this rank is while it looks at an error of its connection: still in the collective that raised it."""
    stack = tuple(_place(site) for site in list(frames)[:_FRAMES])
    group = _reducing()
    common: dict[str, Any] = {"step": step, "stack": stack, "past": past(), "numbers": numbers(), "broken": True}
    held = ring.open.get(threading.get_ident())
    call = held[0] if held is not None else None if ring.broken is None else ring.broken[0]
    if call is not None and ring.calls[-1] is call:
        return _waiting(call, 0.0, common)
    if group is not None:
        return Position(dist.get_rank(), "waits", "backward", group, common["numbers"].get(group, 0), **common)
    if ring.calls and ring.calls[-1].later:
        return _waiting(ring.calls[-1], 0.0, common)
    return Position(dist.get_rank(), "waits", **common)


def interrupted(error: BaseException, step: int) -> Position:
    """Where this rank was when an exception came from outside."""
    tb, stack, innermost = error.__traceback__, list[Place](), None
    while tb is not None:
        innermost = tb.tb_frame
        if USER_FILES[innermost.f_code.co_filename]:
            stack.append(_place(CallSite(innermost.f_code, tb.tb_lasti)))
        tb = tb.tb_next
    doing, group = _doing(innermost), _reducing()
    common: dict[str, Any] = {"step": step, "stack": tuple(stack[: -_FRAMES - 1 : -1]), "past": past(), "numbers": numbers()}
    if ring.broken is not None and ring.broken[0] is ring.calls[-1]:
        return _waiting(ring.broken[0], 0.0, common)
    if doing == "backward" and group is not None:
        return Position(dist.get_rank(), "waits", doing, group, common["numbers"].get(group, 0), **common)
    return Position(dist.get_rank(), "runs", doing, **common)


def ended(state: State, frames: Iterable[CallSite], step: int, error: str = "", is_broken: bool = False) -> Position:
    """Where this rank ends."""
    stack = tuple(_place(site) for site in list(frames)[:_FRAMES])
    return Position(dist.get_rank(), state, step=step, stack=stack, past=past(), numbers=numbers(), error=error, broken=is_broken)


def left_by(rank: int, path: str) -> Position | None:
    """Where a rank was that is gone, by what it has left on this machine."""
    records = outliving.left_by(path)
    if not records:
        return None
    found = []
    for each in records:
        shape = tuple(json.loads(each.shape)) if each.shape else None
        found.append(Past(each.group, each.number, each.kind, shape, each.dtype or None, each.file, each.line))
    last = found[-1]
    stack = (Place(last.file, last.line, ""),) if last.file else ()
    counted = {each.group: each.number for each in found}
    return Position(rank, "gone", stack=stack, past=tuple(found), numbers=counted)


def users(sites: Iterable[CallSite]) -> list[CallSite]:
    """Those in the user's files."""
    return [site for site in sites if USER_FILES[site.code.co_filename]]


def _waiting(call: Call, seconds: float, common: dict[str, Any]) -> Position:
    return Position(dist.get_rank(), "waits", call.kind, call.group, call.number, call.shape, call.dtype, seconds=seconds, **common)


def past() -> tuple[Past, ...]:
    """This rank's last collectives; sends and receives are not among them."""
    found = []
    for call in list(ring.calls):
        if call.kind not in collective_ring.POINT_TO_POINT:
            file, line = ("", 0) if call.site is None else (call.site.code.co_filename, call.site.line)
            found.append(Past(call.group, call.number, call.kind, call.shape, call.dtype, file, line))
    return tuple(found[-8:])


def numbers() -> dict[str, int]:
    """How many collectives this rank has begun, by group."""
    try:
        return ring.numbers()
    except internal_error():  # the groups are being destroyed
        return {}


def _reducing() -> str | None:
    """The group over which DDP averages gradients, where there is one such group."""
    groups: dict[str, Any] = {ddp.process_group.group_name: ddp.process_group for ddp in list(replicas.known)}
    if len(groups) != 1:
        return None
    (name, group), *_ = groups.items()
    ring.known(name, group)
    return name


def _places(frame: FrameType | None) -> tuple[Place, ...]:
    found: list[Place] = []
    while frame is not None and len(found) < _FRAMES:
        file, caller = frame.f_code.co_filename, frame.f_back
        made = file == "<string>" and caller is not None and caller.f_code.co_filename.startswith(PACKAGE_DIR)  # a named tuple's
        if USER_FILES[file] and not made:
            found.append(_place(CallSite(frame.f_code, frame.f_lasti)))
        frame = caller
    return tuple(found)


def _place(site: CallSite) -> Place:
    code = site.code
    return Place(code.co_filename, site.line, str(getattr(code, "co_qualname", code.co_name)))


def _doing(frame: FrameType | None) -> str:
    """What the innermost function of torch is for; a forward in which some module is in evaluation mode is an evaluation."""
    found = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_TORCH):
            what = _DOING.get((code.co_filename[len(_TORCH) :].replace(os.sep, "/"), code.co_name), "")
            if what == "forward":
                what = "forward" if peek(variables_of(frame).get("self"), "training", True) is not False else "evaluation"
            elif what and not found:
                return what
            found = what or found
        frame = frame.f_back
    return found
