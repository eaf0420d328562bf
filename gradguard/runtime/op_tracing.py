"""The op probe on a thread's stack of function modes: where it stands, and when it has to step aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradguard.config.fields import Trace
from gradguard.instrumentation.fault_barrier import Shield
from gradguard.instrumentation.journal import Journal
from gradguard.probes.compilers import unseen
from gradguard.probes.finite_results import note_nonfinite
from gradguard.probes.listeners import local
from gradguard.probes.operators import OpProbe
from gradguard.torch_compat.private_api import call_alone, insert_mode, mode_is_active, remove_mode, stands_alone


class OpTracing:
    """See the module's docstring.

    Args:
        journal: of the thread.
        shield: of the session.
        failed: told of a torch call of the user's that raised.
        fault: told of an exception of gradguard's own.

    Attributes:
        on: whether the current step is traced.
    """

    def __init__(
        self,
        journal: Journal,
        shield: Shield,
        failed: Callable[[BaseException, Any, tuple[Any, ...], dict[str, Any]], None],
        fault: Callable[[BaseException], None],
    ) -> None:
        self.probe = OpProbe(journal, failed, fault)
        self.on = False
        self._shield = shield
        self._put = False  # whether the op probe stands on the mode stack, as far as it was put there from here
        self._stands = False  # whether the whole step is watched, apart from what an optimizer and torch's own functions do
        self._lifted = False  # whether the op probe was on the stack, or is to be on it, when what is compiled has ended
        self._stale = False  # whether the op probe may have been left on the stack

    def is_set(self, on: bool, nested: bool) -> bool:
        """Whether `switch(on)` would change nothing."""
        return on == self.on and (not on or self._put) and (not self._stale or nested)

    @property
    def was_taken(self) -> bool:
        """Whether an optimizer's step took the probe away, and has not put it back."""
        return self.on and not self._put

    def switch(self, on: bool, trace: Trace | None, nested: bool) -> None:
        """Begins or ends tracing.

        Args:
            on: whether to trace.
            trace: how, where it is on.
            nested: whether a backward call is under way.
        """
        if on and trace is not None:
            self.probe.prints.whose = trace.contents
            self.probe.locate = note_nonfinite if trace.locate_nonfinite else None
        self._stand(on, nested)
        self._lifted = on
        # a step that ends within a backward (an optimizer in a hook) leaves the probe where torch will put it back afterwards
        self._stale = not on and nested
        self.probe.live = on
        was, self.on, self._put = self._put, on, on
        if was and not on:
            self.probe.results.settle(going_on=False)

    def off(self) -> None:
        """Ends tracing, whatever state it is in."""
        self.on = self._put = self.probe.live = False
        remove_mode(self.probe)

    def abandon(self) -> None:
        """The guard was left in another thread: this thread's stack is out of reach."""
        self.on = self._put = self.probe.live = False
        self._stale = True

    def step_aside(self) -> None:
        """An optimizer steps: most torch calls of a small model's step are its own, and none of them is a clue."""
        if self.on:
            remove_mode(self.probe)
            self._put = False

    def _stand(self, on: bool, nested: bool, lifted: bool = True) -> None:
        """Puts the op probe on this thread's stack, where nothing compiled is under way, or takes it off.

        Args:
            on: whether it is to watch.
            nested: whether a backward call is under way.
            lifted: False where it is torch that will put it back on the stack, once the function has returned that it handles.
        """
        on = on and not local.compiled
        stands = on or (nested and not local.compiled)  # torch may put it back, see `switch`
        if stands != self._stands:
            unseen.keep(self.probe, stands)
            self._stands = stands
        if not on:
            remove_mode(self.probe)
        elif lifted and not mode_is_active(self.probe):
            insert_mode(self.probe)

    def compiled_begins(self, nested: bool) -> None:
        """A function compiled by Dynamo is called: no mode of ours may be in its sight."""
        self._lifted = mode_is_active(self.probe)
        self._stand(False, nested)

    def compiled_ends(self, nested: bool) -> None:
        """It has returned, or calls something that is not to be compiled."""
        if self._put and self.on:
            self._stand(True, nested, self._lifted)

    def run_engine(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op probe is off while torch handles `backward` itself; custom Functions' backwards shall be seen."""
        probe = self.probe
        put = False
        try:
            try:
                with self._shield:
                    if put := not (mode_is_active(probe) or local.compiled):
                        insert_mode(probe)
                return original(*args, **kwargs)
            finally:
                if put:
                    remove_mode(probe)
        except BaseException:
            if put:  # once more: an exception from outside may have come in the midst of it
                remove_mode(probe)
            raise

    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function without the op probe on the stack; modes of the user's stay."""
        taken = False
        with self._shield:
            if taken := mode_is_active(self.probe):
                remove_mode(self.probe)
        try:
            return function(*args, **kwargs)
        finally:
            if taken:
                with self._shield:
                    insert_mode(self.probe)

    def run_python(
        self, original: Callable[..., Any], function: Callable[..., Any], relevant: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A torch function written in Python, of plain tensors, for the modes on the stack."""
        __tracebackhide__ = True
        probe = self.probe
        return call_alone(probe, function, args, kwargs) if stands_alone(probe) else original(function, relevant, *args, **kwargs)
