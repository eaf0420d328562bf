"""An incident: what a rule is asked about, with everything that is known of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gradguard.analysis.graph.older_releases import described, saved_leaves
from gradguard.analysis.graph.walk import Mismatch, mismatches, root_nodes
from gradguard.analysis.live.frames import FrameView, traceback_frames
from gradguard.analysis.live.names import Names
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.syntax import Source
from gradguard.analysis.program.user_files import files_of, roots_taking_part, sources_of
from gradguard.core.callsite import CallSite
from gradguard.core.moments import Moment
from gradguard.core.notes import Notes
from gradguard.core.safe_read import message_of, unless_loud
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.journal import Journal

_NOTHING: dict[str, Any] = {
    "frame_source": tuple,
    "error": None,
    "roots": (),
    "inputs": (),
    "args": (),
    "kwargs": {},
    "optimizer": None,
    "models": (),
}


@dataclass
class Incident:
    """An exception out of forward, backward or optimizer, or a moment at which silent bugs are looked for.

    Lives only while rules are asked; it may hold tensors and frames, the diagnosis made from it does not.

    Attributes:
        moment: "error", or the moment of a silent check.
        where: what failed: "backward", "grad", "forward" (a torch call), "optimizer", "escape" (it left the `with`).
        error: the exception, None for silent checks.
        roots: the tensors backward was called on.
        inputs: `inputs=` of backward / the inputs of autograd.grad.
        frame_source: gives `frames`; asked only by rules that need them, since most moments need none.
        call: this backward call's fact.
        func, args, kwargs: the torch call that failed ("forward"), or what the moment is about.
        traced: whether the op probe has seen the current step.
        finding: what a monitor found, at the moment "finding".
        notes: what rules remember from moment to moment, of the guard's run.
    """

    moment: Moment
    where: str
    journal: Journal
    frame_source: Callable[[], Sequence[FrameView]]
    error: BaseException | None = None
    roots: tuple[torch.Tensor, ...] = ()
    inputs: tuple[torch.Tensor, ...] = ()
    call: BackwardFact | None = None
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    traced: bool = True
    step: int = 0
    optimizer: Any = None
    models: tuple[nn.Module, ...] = ()
    notes: Notes = field(default_factory=Notes)
    finding: Any = None

    def __post_init__(self) -> None:
        self.args = tuple(map(unless_loud, self.args))
        self.kwargs = {name: unless_loud(value) for name, value in self.kwargs.items()}

    def dispose(self) -> None:
        """Lets go of everything: what rules built around it may stand in reference cycles, and must not keep a step's tensors."""
        views = self.__dict__.get("all_frames", self.__dict__.get("frames", ()))  # all, where they were asked for
        kept = {item.name: getattr(self, item.name) for item in fields(self)} | _NOTHING
        self.__dict__.clear()
        self.__dict__.update(kept)
        for view in views:
            view.dispose()

    def options(self, rule: Any) -> Any:
        """The rule's own `Options`, as the settings have them."""
        return self.notes.options(rule)

    @cached_property
    def frames(self) -> Sequence[FrameView]:
        """Innermost first; live frames, or those of the traceback."""
        return self.frame_source()

    @cached_property
    def all_frames(self) -> list[FrameView]:
        """The frames of the exception's traceback, torch's own included, then those around the incident; innermost first."""
        return [*traceback_frames(None if self.error is None else self.error.__traceback__), *self.frames]

    @cached_property
    def message(self) -> str:
        """PyTorch's own words."""
        return "" if self.error is None else message_of(self.error)

    def is_ahead(self, file: str, line: int) -> bool:
        """Whether a line cannot have run yet: the module-level code of its file, which runs once, has not come to it."""
        for view in self.frames:
            place = resolve(view.site) if view.is_module_level and view.frame.f_code.co_filename == file else None
            statement = None if place is None else place.statement
            if place is not None and statement is not None:
                return line > max(each.end_lineno or each.lineno for each in (statement, *place.enclosing_loops))
        return False

    @cached_property
    def names(self) -> Names:
        return Names(self.frames, self.models)

    @cached_property
    def user_frames(self) -> list[FrameView]:
        return [view for view in self.frames if view.is_user]

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The root modules that take part; `names.modules` has every one alive."""
        return roots_taking_part(self.names, self.root_nodes)

    @cached_property
    def sources(self) -> list[Source]:
        """The user's files that take part: those of the frames, innermost first, and of the modules' classes."""
        return sources_of(files_of(self.user_frames, self.modules))

    @property
    def site(self) -> CallSite | None:
        """The user's line where the incident surfaced."""
        return self.user_frames[0].site if self.user_frames else None

    @cached_property
    def place(self) -> ResolvedSite | None:
        """`site`, resolved."""
        return resolve(self.site)

    @cached_property
    def root_nodes(self) -> list[Any]:
        return root_nodes(self.roots)

    @cached_property
    def mismatches(self) -> list[Mismatch]:
        """Saved values of the graph that were written since, in the order backward meets them."""
        found = mismatches(self.root_nodes)
        for item in found:
            if item.tensor is None:
                leaf = described(item.message, item.found, saved_leaves(item.node))
                item.tensor = leaf if leaf is not None else described(item.message, item.found, self.names.states())
        return found

    def site_of_node(self, seq: int) -> CallSite | None:
        """The user's line that made the graph node with this sequence number, if it was traced."""
        op = self.journal.op_at(seq)
        return None if op is None else op.site

    def place_of_node(self, seq: int) -> ResolvedSite | None:
        return resolve(self.site_of_node(seq))

    def says(self, *pieces: str) -> bool:
        """Whether PyTorch's text contains any of these (lower-case) pieces."""
        text = self.message.lower()
        return any(piece in text for piece in pieces)
