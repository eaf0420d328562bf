"""A stretch of calm steps that is coasted through: what happens is only written down, and told afterwards, all at once.

Most steps of a long training are untraced, stand between two windows in which gradients are followed, and have nothing odd
about them. Python that asks there whether there is anything to do costs three times what it costs in a loop of its own, since
torch's operators run in between and leave none of it in the processor's caches. So while a `Coast` is on, a backward call costs
a look at its loss and an entry in a list, an optimizer's step an entry, zero_grad nothing; `runtime.fast_path` decides how far that may go,
and reads the list when it ends. Whatever is out of the ordinary ends it before it is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, Protocol

import torch

from gradguard.core.callsite import USER_FILES, KnownStacks
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.notes import Notes
from gradguard.instrumentation.tensor_refs import TensorRef, UncountedRef
from gradguard.torch_compat.private_api import dispatch_modes, function_modes, sequence_number

ODD = 1e9  # a loss beyond this is worth a closer look
_TURNS = 256  # a scheduler may be stepped so often

Place = tuple[int, int]  # a code object's id, and an instruction's offset in it
Where = tuple[CodeType | None, int]  # a frame of the user's, if there is one: its code, and the instruction
_stacks = KnownStacks()

# The entries of the list, plain tuples for what they cost. A backward call: the frames of the user's around it, innermost first; its
# loss, its node's number, the thread's next one, whether it keeps the graph, the loss itself.
BackwardEvent = tuple[Literal["backward"], list[tuple[CodeType, int]], float, int, int, bool, TensorRef]
# An optimizer's step: where, the thread's next number, which optimizer, its id and its learning rate.
StepEvent = tuple[Literal["step"], Where, int, weakref.ref[Any], int, Any]
TurnEvent = tuple[Literal["turn"], Where, weakref.ref[Any], int]  # a scheduler's step: where, which, its id
Event = BackwardEvent | StepEvent | TurnEvent


class GraphSizes(Protocol):
    """Where the step began and how many graph nodes steps make (`gradguard.runtime.trace_schedule.Depth`)."""

    sequence: int
    sizes: set[int]

    @property
    def heeds_sizes(self) -> bool: ...


class Coast:
    """See the module's docstring.

    Args:
        session: the thread's.
        run: of the outermost guard.
        steps: optimizer steps that may go by.
        backwards: backward calls that may go by.
        calls: of these, how many at each place whose loss is looked at; elsewhere none.
        optimizers: the ids of those that may step, each with what says whether its gradients are unlike those of the steps before.
        sizes: what is known of the numbers of nodes a step makes; None where they tell nothing.
    """

    __slots__ = (
        "_heeds",
        "_optimizers",
        "_since",
        "_sizes",
        "_steps",
        "_turns",
        "backwards",
        "calls",
        "inside",
        "log",
        "opened",
        "run",
        "session",
        "steps",
    )

    def __init__(
        self,
        session: Any,
        run: Any,
        steps: int,
        backwards: int,
        calls: dict[Place, int],
        optimizers: dict[int, Callable[[], bool]],
        sizes: GraphSizes | None,
    ) -> None:
        self.session = session
        self.run = run
        self.steps = self._steps = steps
        self.backwards = self._since = backwards
        self.calls = calls
        self.log: list[Event] = []
        self.inside = False  # whether the newest entry is a backward call that has not returned
        self.opened = -1  # how long the list was when a guard was last entered
        self._optimizers = optimizers
        self._sizes = sizes
        self._heeds = sizes is not None and sizes.heeds_sizes
        self._turns = _TURNS

    # -- what is written down -----------------------------------------------------------------------------------------

    def backward(self, frame: FrameType, args: tuple[Any, ...]) -> bool:
        """A backward call begins: written down, unless it is not of the form in which `Tensor.backward` hands it on, or not calm."""
        try:
            if self.backwards <= 0 or self.inside or len(args) < 4 or args[3] or function_modes() or dispatch_modes():
                return False
            root = args[0]
            if type(root) is not torch.Tensor:
                return False
            frames = _stacks.around(frame, 2)
            code, lasti = frames[0]
            place = (id(code), lasti)
            left = self.calls[place]
            if left <= 0 or not root.is_cpu:
                return False
            value = root.item()  # raises where there are several
            if type(value) is not float or not -ODD < value < ODD:  # as neither NaN nor infinity is
                return False
            seq = root.grad_fn._sequence_nr()  # type: ignore[union-attr]
            self.log.append(("backward", frames, value, seq, sequence_number(), args[2], TensorRef(root)))
        except internal_error():  # a place that is not known, a root without a graph or a value: looked at the long way, if at all
            return False
        self.calls[place] = left - 1
        self.backwards -= 1
        self.inside = True
        return True

    def step(self, optimizer: Any, frame: FrameType | None) -> bool:
        """An optimizer has stepped: written down, unless it ends the stretch."""
        try:
            key = id(optimizer)
            if self.steps <= 1 or self.inside or key not in self._optimizers or self._optimizers[key]():
                return False
            if self.log and self.log[-1][0] == "step" and self.log[-1][4] == key:
                return False  # it has stepped, and no backward call has come since
            now = sequence_number()
            sizes = self._sizes
            if sizes is not None and self._heeds and now - sizes.sequence not in sizes.sizes:
                return False  # something has changed: the next steps may be traced
            rate = optimizer.param_groups[0].get("lr")
            if type(rate) is not float and type(rate) is not int:  # a tensor, which may hang on a graph
                rate = None
            self.log.append(("step", _where(frame), now, UncountedRef(optimizer), key, rate))
        except internal_error():  # an optimizer without groups
            return False
        if sizes is not None:
            sizes.sequence = now
        self.steps -= 1
        return True

    def turn(self, scheduler: Any, frame: FrameType | None) -> bool:
        """A learning-rate scheduler was stepped by the user."""
        if self._turns <= 0 or self.inside:
            return False
        self.log.append(("turn", _where(frame), UncountedRef(scheduler), id(scheduler)))
        self._turns -= 1
        return True

    # -- entering and leaving its run's guards ------------------------------------------------------------------------

    def enter(self) -> None:
        """A guard of the same run is entered, between two steps."""
        self.opened = len(self.log)
        self._since = self.backwards
        if self._sizes is not None:
            self._sizes.sequence += sequence_number()

    def leave(self) -> None:
        """The guard is left: the nodes made until it is entered again are none of its business."""
        if self._sizes is not None:
            self._sizes.sequence -= sequence_number()

    def stop(self) -> None:
        """Nothing more is written down: the next event ends the stretch."""
        self._steps -= self.steps  # so that what has been counted stays as it is
        self._since -= self.backwards
        self.steps = self.backwards = self._turns = 0

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> int:
        """Steps written down."""
        return self._steps - self.steps

    @property
    def since_opened(self) -> int:
        """Backward calls written down since a guard was last entered."""
        return self._since - self.backwards

    @property
    def open_ended(self) -> bool:
        """Whether a backward call has come since the last step: a guard that is entered then begins another."""
        for event in reversed(self.log):
            if event[0] != "turn":
                return event[0] == "backward"
        return False

    def rates_of(self, optimizer: int) -> list[Any]:
        """The learning rate at each of the steps written down of the optimizer with this id."""
        return [event[5] for event in self.log if event[0] == "step" and event[4] == optimizer]


def _where(frame: FrameType | None) -> Where:
    files = USER_FILES
    while frame is not None and not files[frame.f_code.co_filename]:
        frame = frame.f_back
    return (None, -1) if frame is None else (frame.f_code, frame.f_lasti)


class Ahead(NamedTuple):
    """Backward calls that may go by with no more than a look at their loss: finite, and of no odd size.

    Attributes:
        calls: gets the run's notes; how many of them at each place, from here on.
        told: gets the run's notes, afterwards: a place, the number of the last call there, and the losses of all, newest last.
    """

    calls: Callable[[Notes], dict[Place, int]]
    told: Callable[[Notes, Place, int, list[float]], None]
