"""An allocation that failed: how much was asked for, by what call, and what held memory at the time.

Asked after the exception has passed the program's frames, which its traceback keeps alive with their variables: what held memory then
holds it now. Nothing here allocates a tensor with elements.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradguard.analysis.graph.walk import nodes_from
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.alive_tensors import alive
from gradguard.analysis.memory.accounting import account, step_began
from gradguard.core.account import Account
from gradguard.core.callsite import USER_FILES
from gradguard.core.foreign_exceptions import internal_error, was_raised_at
from gradguard.core.notes import Notes
from gradguard.core.safe_read import attributes, is_quiet, message_of
from gradguard.instrumentation.refusals import Refused, is_refusal
from gradguard.torch_compat.private_api import grad_fn_of, memory_of, node_sequence, saved_data, saved_slots

if TYPE_CHECKING:
    from gradguard.analysis.live.frames import FrameView
    from gradguard.instrumentation.journal import Journal

_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_INDEX = re.compile(r"\b[GX]PU (\d+)\b")
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]i?B|B)\b"
_ASKED = re.compile(rf"tried to allocate {_SIZE}", re.IGNORECASE)
_OURS = re.compile(rf"this process has {_SIZE} memory in use", re.IGNORECASE)
_CAPACITY = re.compile(rf"total capacity of {_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_SIZE} is free", re.IGNORECASE)
_UNUSED = re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated", re.IGNORECASE)
_ITSELF = 512 << 20  # bytes that Python and the libraries have, at most
_USED = re.compile(rf"{_SIZE} is allocated by PyTorch", re.IGNORECASE)


class Device(NamedTuple):
    """What PyTorch says of an accelerator's memory where an allocation on it fails, in bytes; None where it does not say."""

    capacity: int | None
    free: int | None
    ours: int | None  # of this process, memory that is not PyTorch's included
    allocated: int | None  # by PyTorch
    unused: int | None  # reserved by PyTorch's allocator, and not allocated

    @property
    def others(self) -> int | None:
        """What other processes have."""
        if self.capacity is None or self.free is None or self.ours is None:
            return None
        return max(0, self.capacity - self.free - self.ours)


class Allocation:
    """See the module's docstring; holds what the incident holds, for as long."""

    def __init__(self, incident: Incident) -> None:
        assert incident.error is not None
        self._incident = incident
        self.error = incident.error
        self.text = message_of(incident.error)
        self.is_torchs = not isinstance(incident.error, MemoryError)

    @cached_property
    def is_programs(self) -> bool:
        """Whether the program itself raised it, and means what it likes by it."""
        last = self.error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if self.is_torchs or last is None:
            return False
        return USER_FILES[last.tb_frame.f_code.co_filename] and was_raised_at(last.tb_frame.f_code, last.tb_lasti)

    @cached_property
    def asked(self) -> int:
        """The bytes that were asked for; 0 where nothing says how many."""
        found = _bytes(_ASKED, self.text)
        if found is None and not self.is_torchs:
            return _of_array(self.error)
        return found or 0

    @cached_property
    def call(self) -> Refused | None:
        """The operator call that was refused, where its step was traced."""
        noted = self._incident.notes.get(_RefusedCall)
        return None if noted is None or noted.arguments is not self.error.args else noted.call

    @cached_property
    def device(self) -> Device:
        """An accelerator's memory, in PyTorch's own numbers."""
        return Device(*(_bytes(pattern, self.text) for pattern in (_CAPACITY, _FREE, _OURS, _USED, _UNUSED)))

    @property
    def is_elsewhere(self) -> bool:
        """Whether what this process's tensors hold is not what is missing: others have it, the allocator's own pieces, Python's objects."""
        return self.is_outside or (self.on_cpu and self.is_mostly_python)

    @property
    def is_outside(self) -> bool:
        """Whether it is not this process's use of memory at all: other processes', or the allocator's own pieces."""
        return self.is_workers or self.is_fragmented or self.is_others

    @property
    def is_workers(self) -> bool:
        """Whether it was a worker process of a DataLoader that could not get memory."""
        return self.text.startswith("Caught ") and "DataLoader worker" in self.text

    @property
    def is_mostly_python(self) -> bool:
        """Whether most of this process's memory is no tensor's."""
        return self.process is not None and 4 * self.held + _ITSELF < self.process

    @property
    def is_fragmented(self) -> bool:
        """Whether PyTorch's allocator has as much unused as was asked for."""
        return self.device.unused is not None and 0 < self.asked <= self.device.unused

    @property
    def is_others(self) -> bool:
        """Whether other processes have more of the device than this one, and much of it."""
        others, capacity = self.device.others, self.device.capacity
        return others is not None and capacity is not None and others > max(self.device.ours or 0, capacity // 3)

    @property
    def on_cpu(self) -> bool:
        """Whether it was this machine's own memory."""
        return not isinstance(self.error, torch.OutOfMemoryError) and "MPS backend" not in self.text

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor alive in the memory that ran out: an accelerator's, or this machine's."""
        return [tensor for tensor in alive(torch.Tensor) if self._is_there(str(tensor.device))]

    @cached_property
    def graphed(self) -> list[torch.Tensor]:
        """Those that have a graph."""
        return [tensor for tensor in self.tensors if grad_fn_of(tensor) is not None]

    def own(self) -> set[int]:
        """ids of the containers in here, which hold every tensor and none for the user."""
        return {id(self.__dict__), id(self.tensors), id(self.graphed)}

    @cached_property
    def account(self) -> Account:
        """What is held, for backward and besides."""
        names = self._incident.names
        now = account(self.graphed, names.modules, names.optimizers(), self._incident.journal)
        then = None if self.call is None else self.call.account
        if then is None:
            return self._there(now)
        # what only a frame's stack held, such as a list that a comprehension builds, went when the exception passed
        known = {row.storage for row in now.rows} | {key for tensor in self.tensors for key, _ in memory_of(tensor)}
        return self._there(Account((*now.rows, *(row for row in then.rows if row.storage not in known)), now.hidden))

    def _there(self, found: Account) -> Account:
        return Account(tuple(row for row in found.rows if self._is_there(row.device)), found.hidden)

    def _is_there(self, device: str) -> bool:
        """Whether a device's memory is the one that ran out."""
        kind, _, index = device.partition(":")
        if self.on_cpu:
            return kind == "cpu"
        named = _INDEX.search(self.text)
        return kind not in ("cpu", "meta") and (named is None or index in ("", named[1]))

    @cached_property
    def loose(self) -> int:
        """The bytes of live tensors that the account does not have: inputs, results, what is kept detached."""
        counted = {row.storage for row in self.account.rows}
        found = dict(pair for tensor in self.tensors for pair in memory_of(tensor))
        return sum(nbytes for key, nbytes in found.items() if key not in counted)

    @cached_property
    def held(self) -> int:
        """The bytes of all live tensors and of what graphs have saved."""
        return self.account.total() + self.loose

    @cached_property
    def process(self) -> int | None:
        """The bytes of memory that this process has of its own, tensors included; None where the system does not say."""
        try:
            found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        except internal_error(OSError):
            return None
        return None if found is None else int(found[1]) << 10

    @cached_property
    def stepping(self) -> tuple[Any, FrameView] | None:
        """The optimizer whose step() could not allocate, and the frame of that; None where it was something that a closure ran."""
        for view in self._incident.all_frames:
            owner = view.locals.get("self")
            if isinstance(owner, torch.optim.Optimizer) and view.code_name == "step":
                return owner, view
            if view.is_user:
                return None
        return None

    @cached_property
    def outside(self) -> FrameView | None:
        """The innermost frame of the user's that is no method of a module's: the one that called the model, or what failed itself."""
        views = self._incident.user_frames
        return next((view for view in views if not isinstance(view.locals.get("self"), torch.nn.Module)), views[0] if views else None)

    def older(self) -> list[tuple[torch.Tensor, set[int]]]:
        """The tensors that reach what graphs of older steps have saved, and of which steps."""
        begin = step_began(self._incident.journal)
        marks = [step.seq for step in self._incident.journal.steps]
        found = [(tensor, self._saving(tensor, begin)) for tensor in self.graphed]
        return [(tensor, {_step_of(marks, seq) for seq in seqs}) for tensor, seqs in found if seqs]

    def _saving(self, tensor: torch.Tensor, before: int) -> set[int]:
        """The sequence numbers of the nodes made before one that a tensor reaches and that have saved something."""
        found = set()
        for node in nodes_from([grad_fn_of(tensor)], _NODES):
            seq = node_sequence(node)
            if 0 <= seq < before and any(saved_data(slot) is not None for _, slot in saved_slots(node)):
                found.add(seq)
        return found


_NODES = 30_000


class _RefusedCall(NamedTuple):
    """The operator call that an exception came out of, with what tells the exception."""

    arguments: tuple[Any, ...]
    call: Refused


def note_refused(notes: Notes, error: BaseException, call: Refused | None) -> None:
    """Remembers the call that an exception came out of, the innermost of several.

    The exception is told by its arguments, which are a tuple of its own: itself it would keep the frames, and a word left on it would be
    pickled with it.
    """
    if call is None or not error.args or not all(type(each) is str for each in error.args):
        return
    noted = notes.get(_RefusedCall)
    if noted is None or noted.arguments is not error.args:
        notes.put(_RefusedCall(error.args, call))


def graphs_now(journal: Journal) -> Account:
    """What the graphs of all live tensors have saved at this moment."""
    return account([tensor for tensor in alive(torch.Tensor) if grad_fn_of(tensor) is not None], journal=journal)


def allocation(incident: Incident) -> Allocation | None:
    """The failed allocation that leaves the guard, the same object for all rules.

    None where the incident is something else, and where the program itself raised the exception and means what it likes by it.
    """
    known = vars(incident)
    if "_allocation" not in known:
        refused = incident.error is not None and incident.where == "escape" and is_refusal(incident.error)
        made = Allocation(incident) if refused else None
        known["_allocation"] = None if made is None or made.is_programs else made
    found: Allocation | None = known["_allocation"]
    return found


def _step_of(marks: list[int], seq: int) -> int:
    return sum(mark <= seq for mark in marks)


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def _of_array(error: BaseException) -> int:
    """The bytes of the array that numpy could not allocate: its error has shape and dtype."""
    if not is_quiet(error):
        return 0
    held = attributes(error)
    shape, dtype = held.get("shape"), held.get("dtype")
    size = getattr(dtype, "itemsize", None)
    if type(shape) is not tuple or type(size) is not int or not type(error).__module__.startswith("numpy"):
        return 0
    try:
        for length in shape:
            size *= int(length)
    except internal_error():
        return 0
    return size
