"""Hooks on the calls and registrations of all modules, each in place only while a monitor asks for what it sees.

None is in place while a compiled function is under way or no guard is open: compilers see modules as they are.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from gradguard.instrumentation.fault_barrier import Shield
from gradguard.monitors import unaveraged_gradients
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.probes import replicas
from gradguard.probes.step_protocol import ModuleHook, take_census, watch_registrations
from gradguard.runtime.trace_schedule import Depth


class ModuleHooks:
    """See the module's docstring.

    Args:
        shield: the session's, around what the hooks do.
    """

    def __init__(self, shield: Shield) -> None:
        self._shield = shield
        self._census: ModuleHook | None = None  # on module calls, while there is one
        self._forwards: ModuleHook | None = None  # on forwards past DistributedDataParallel
        self._registrations: ModuleHook | None = None  # on what modules are given as parameters

    def follow(self, ledger: Ledger, depth: Depth) -> None:
        """Puts in place what the ledger asks for since it was told something, and takes away what it no longer needs."""
        if ledger.census_until:
            self._take_census(ledger, depth)
        if ledger.survey.watches_making != _stands(self._registrations):
            self._watch_registrations(ledger)
        if replicas.known or self._forwards is not None:
            self._watch_forwards()

    def idle_step(self) -> None:
        """An optimizer has stepped, and the ledger had nothing to note."""
        if self._forwards is not None:
            self._watch_forwards()

    def pause(self) -> None:
        """The guard is left, or is about to be: hooks see nothing until it is entered again."""
        for hook in (self._census, self._registrations, self._forwards):
            if hook is not None:
                hook.remove()
        self._census = self._registrations = self._forwards = None

    def resume(self, ledger: Ledger, depth: Depth) -> None:
        """The guard is entered again: a census that was under way goes on."""
        if ledger.census_until:
            self._take_census(ledger, depth)
        if ledger.survey.watches_making:
            self._watch_registrations(ledger)
        if replicas.known:
            self._watch_forwards()

    def _take_census(self, ledger: Ledger, depth: Depth) -> None:
        if ledger.steps >= ledger.census_until:
            ledger.severed.disarm()
            ledger.census_until = 0
            if self._census is not None:
                self._census.remove()
                self._census = None
        elif not _stands(self._census):
            shield = self._shield

            def called(module: Any, caller: FrameType) -> None:
                with shield:
                    ledger.census(module, caller)

            self._census = take_census(called)
            depth.incident()  # where paths are cut shows in a traced step only

    def _watch_registrations(self, ledger: Ledger) -> None:
        if self._registrations is not None:
            self._registrations.remove()
            self._registrations = None
        if ledger.survey.watches_making:
            self._registrations = watch_registrations(ledger.survey.registered)

    def _watch_forwards(self) -> None:
        wanted = unaveraged_gradients.watching()
        if self._forwards is not None and not wanted:
            self._forwards.remove()
            self._forwards = None
        elif wanted and not _stands(self._forwards):
            shield = self._shield

            def called(module: Any, caller: FrameType) -> None:
                with shield:
                    unaveraged_gradients.forward(module, caller)

            self._forwards = take_census(called)


def _stands(hook: ModuleHook | None) -> bool:
    return hook is not None and hook.stands
