"""The last collectives of this rank: what each was, where the program made it, and which is under way.

Nothing is synchronised and nothing sent. A collective's number is that of its process group, which gloo and NCCL count by themselves:
collectives that DDP's reducer makes in C++ have theirs too. Sends and receives, which only some ranks make, do not count.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradguard.core.callsite import CallSite, user_frame, user_stack
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import message_of
from gradguard.instrumentation.fault_barrier import say
from gradguard.probes import outliving
from gradguard.torch_compat.private_api import function_modes, quiet

POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"})
# Of these every rank must bring a tensor of the same shape and dtype; by the argument that holds it.
_ALIKE = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
}
_OTHERS = (
    *("all_reduce_coalesced", "all_gather_coalesced", "all_gather_single", "all_gather_object", "_all_gather_base"),
    *("reduce_scatter_single", "_reduce_scatter_base", "broadcast_object_list", "barrier", "monitored_barrier"),
    *("scatter_object_list", "gather_object", "all_to_all", "all_to_all_single"),
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KEPT = 32
_MOST_FACTS = 1024


class Call(NamedTuple):
    """One collective, as this rank made it.

    Attributes:
        kind: the function's name.
        group: the process group's name.
        number: its place among the group's collectives, from 1.
        shape, dtype: of the tensor that every rank must bring alike; None where there is none, or it cannot be looked at.
        site: the user's line.
        later: whether the call returns before the collective is over: `async_op=True`, or a backend that runs on the device.
    """

    kind: str
    group: str
    number: int
    shape: tuple[int, ...] | None
    dtype: str | None
    site: CallSite | None
    later: bool


class _Facts(NamedTuple):
    """What the calls of one line with like tensors have in common; the group and the site's code live as long, and so do their ids."""

    of: Any
    group: str
    point: bool
    shape: tuple[int, ...] | None
    dtype: str | None
    site: CallSite | None
    later: bool
    text: bytes


class Ring:
    """What this process knows of its own collectives.

    Attributes:
        on: whether anything is written down: from the first guard in a job of several ranks on.
        calls: the last ones, oldest first.
        open: those under way, by thread, with the time at which they began.
        broken: the last that raised, with the user's frames then and what was raised.
        begun: how many were made.
        work: the handle of the last that was begun with `async_op=True`.
        file: what is left of the last ones if the process is ended.
    """

    def __init__(self) -> None:
        self.on = False
        self.calls: deque[Call] = deque(maxlen=_KEPT)
        self.open: dict[int, tuple[Call, float]] = {}
        self.broken: tuple[Call, tuple[CallSite, ...], str] | None = None
        self.begun = 0
        self.work: weakref.ref[Any] | None = None
        self.file: outliving.Outliving | None = None
        self._uncounted: dict[str, int] = {}  # sends and receives, by group
        self._own: dict[str, int] = {}  # collectives of groups whose backend does not number them
        self._groups: dict[str, Any] = {}
        self._facts: dict[Any, _Facts] = {}

    def reset(self) -> None:
        """The process groups are gone, or this is another process."""
        self.calls.clear()
        self.open.clear()
        self.broken = None
        self.file = None
        self._uncounted.clear()
        self._own.clear()
        self._groups.clear()
        self._facts.clear()

    def begin(self, kind: str, group: Any, tensor: Any, later: Any, frame: FrameType) -> Call | None:
        """A collective is about to be made."""
        thread = threading.get_ident()
        if thread in self.open:  # one that another is made of
            return None
        shape = dtype = None
        if type(tensor) in _PLAIN:
            if function_modes():
                with quiet():
                    shape, dtype = tensor.shape, tensor.dtype
            else:
                shape, dtype = tensor.shape, tensor.dtype
        caller = user_frame(frame)
        key = (kind, id(group), shape, dtype, later is True) + (() if caller is None else (id(caller.f_code), caller.f_lasti))
        facts = self._facts.get(key) or self._new_facts(key, kind, group, shape, dtype, later is True, caller)
        if facts is None:
            return None
        name = facts.group
        number = self._number(name, facts.of) + (not facts.point)
        if facts.point:
            if name not in self._uncounted:
                Watched.passing_on()
            self._uncounted[name] = self._uncounted.get(name, 0) + 1
        elif name in self._own:
            self._own[name] += 1
        call = Call(kind, name, number, facts.shape, facts.dtype, facts.site, facts.later)
        self.begun += 1
        if self.file is not None and not facts.point:
            self.file.put(self.begun, number, facts.text)
        self.calls.append(call)
        self.open[thread] = (call, time.monotonic())
        return call

    def _new_facts(self, key: Any, kind: str, group: Any, shape: Any, dtype: Any, later: bool, caller: FrameType | None) -> _Facts | None:
        of = dist.distributed_c10d._get_default_group() if group is None else group
        if not isinstance(of, dist.ProcessGroup):  # this rank is not in it
            return None
        if len(self._facts) >= _MOST_FACTS:
            self._facts.clear()
        name, on_device = of.group_name, dist.get_backend(of) not in ("gloo", "mpi")
        self._groups.setdefault(name, of)
        site = None if caller is None else CallSite(caller.f_code, caller.f_lasti)
        if on_device and kind == "all_gather":  # NCCL lets them differ
            shape = dtype = None
        sizes, named = None if shape is None else tuple(shape), None if dtype is None else str(dtype)[6:]
        line, file = (0, "") if site is None else (site.line, site.code.co_filename)
        text = outliving.text(name, kind, sizes, named, line, file)
        facts = self._facts[key] = _Facts(of, name, kind in POINT_TO_POINT, sizes, named, site, later or on_device, text)
        return facts

    def outlive(self) -> str:
        """From now on the last collectives outlive the process; the name of the file."""
        self.file = outliving.Outliving()
        return self.file.path

    def end(self, frame: FrameType | None = None, error: BaseException | None = None) -> None:
        """The collective of this thread has returned, or raised."""
        call = self.open.pop(threading.get_ident(), None)
        if error is not None and call is not None:
            text = message_of(error) if isinstance(error, RuntimeError) else ""
            self.broken = (call[0], user_stack(frame, 6), text)

    def numbers(self) -> dict[str, int]:
        """How many collectives this rank has begun, by the names of the groups it has been seen to use."""
        default = dist.distributed_c10d._get_default_group()
        self._groups.setdefault(default.group_name, default)
        return {name: self._number(name, group) for name, group in list(self._groups.items())}

    def unfinished(self) -> Call | None:
        """The last collective, where its call has returned and it is not over, as far as that can be known."""
        last = self.calls[-1] if self.calls else None
        if last is None or not last.later:
            return None
        if self.work is None:
            return last
        work = self.work()
        return last if work is not None and not work.is_completed() else None

    def known(self, name: str, group: Any) -> None:
        """A group that only C++ has been seen to use."""
        self._groups.setdefault(name, group)

    def members(self, name: str) -> list[int]:
        """The ranks of a group."""
        group = self._groups.get(name)
        return [] if group is None else list(dist.get_process_group_ranks(group))

    def _number(self, name: str, group: Any) -> int:
        own = self._own.get(name)
        if own is not None:
            return own
        try:
            return int(group._get_sequence_number_for_group()) - self._uncounted.get(name, 0)
        except internal_error():  # a backend that does not count
            self._own[name] = 0
            return 0


ring = Ring()


class Watched:
    """What is called when process groups come and go, and at a group's first send or receive; set by who watches the ranks."""

    begun: Callable[[], None] = staticmethod(lambda: None)
    passing_on: Callable[[], None] = staticmethod(lambda: None)
    ending: Callable[[FrameType], None] = staticmethod(lambda frame: None)


def install(divert: Callable[..., Any]) -> None:
    """Diverts the collectives of torch.distributed, below the decorator that logs what they raise."""
    if not dist.is_available():
        return
    for name in (*_ALIKE, *_OTHERS, *sorted(POINT_TO_POINT)):
        function = inspect.unwrap(getattr(dist.distributed_c10d, name, None))  # type: ignore[arg-type]
        if function is not None:
            divert(SimpleNamespace(function=function), "function", _recorded(name, function))
    for name, make in (("init_process_group", _init), ("destroy_process_group", _destroy)):
        divert(SimpleNamespace(function=inspect.unwrap(getattr(dist.distributed_c10d, name))), "function", make)


def _recorded(kind: str, function: Any) -> Callable[[Any], Any]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    at = names.index("group") if "group" in names else -1
    later = names.index("async_op") if "async_op" in names else -1
    alike = names.index(_ALIKE[kind]) if _ALIKE.get(kind) in names else -1

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if not ring.on:
                return original(*args, **kwargs)
            call = None
            try:
                group, tensor, after = (args[i] if i >= 0 else None for i in (at, alike, later))
                call = ring.begin(kind, group, tensor, after, sys._getframe(1))
            except internal_error() as fault:
                ring.on = False
                say("the record of collectives", "a hang of several ranks is not explained", fault)
            if call is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                ring.end(sys._getframe(1), error)
                raise
            ring.end()
            if call.later:
                ring.work = None if result is None else weakref.ref(result)
            return result

        return guarded

    return make


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            Watched.begun()
        except internal_error() as fault:
            say("the watch over the ranks", "a hang is not explained", fault)
        return result

    return guarded


def _destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(group: Any = None) -> Any:
        if group is None or group is dist.group.WORLD:
            try:
                Watched.ending(sys._getframe(1))
            except internal_error() as fault:
                say("the watch over the ranks", "other ranks do not know that this one has finished", fault)
        return original(group)

    return guarded
