"""Whether a failed allocation was made in code that only evaluates: whose graph no backward call of the program begins at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradguard.analysis.graph.walk import is_accumulate, nodes_from
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.holders import Holding
from gradguard.analysis.memory.allocations import allocation
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.differentiated import is_differentiated, repeated_by
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.analysis.program.index import Program, program_of
from gradguard.core.callsite import USER_FILES, is_torch_or_own
from gradguard.core.diagnosis import Role, SourceSpan
from gradguard.core.safe_read import in_training, parameters_in
from gradguard.torch_compat.private_api import grad_fn_of

_NODES = 30_000


@dataclass(eq=False)
class Evaluation:
    """Code that evaluates.

    Attributes:
        place: the call in it that was running.
        program: its file.
        around: the loop or comprehension that runs it again and again; None where there is none.
        models: the root modules whose parameters the graphs lead to, as they are called.
        in_eval_mode: whether all of them are.
        kept: the tensors that hold graphs, each with one tag for each time that a parameter was used.
    """

    place: ResolvedSite
    program: Program
    around: ast.stmt | ast.expr | None
    models: list[str]
    in_eval_mode: bool
    kept: list[tuple[torch.Tensor, set[int]]]
    _forwards: set[int] = field(default_factory=set)

    @property
    def loops(self) -> bool:
        return self.around is not None

    @property
    def repeated(self) -> ast.AST:
        """What runs: the loop, else the call."""
        node = self.around or self.place.node or self.place.statement
        assert node is not None
        return node

    @property
    def collects(self) -> bool:
        """Whether it is a comprehension, which keeps all that it makes."""
        return isinstance(self.around, (ast.ListComp, ast.SetComp, ast.DictComp))

    @property
    def is_lazy(self) -> bool:
        """Whether what runs may do so after its statement has: a generator."""
        function = self.program.function(self.repeated)
        return isinstance(self.around, ast.GeneratorExp) or any(inside(function, ast.Yield, ast.YieldFrom))

    def span(self, label: str, role: Role) -> SourceSpan:
        """The loop's header, or the call."""
        if self.around is None:
            return self.place.span(label, role)
        return self.program.source.span_of(self.around, label, role)

    def outlasts(self, holding: Holding) -> bool:
        """Whether what holds a tensor lasts longer than one iteration: no variable of a module's forward, which is part of it."""
        return holding.frame is None or id(holding.frame) not in self._forwards


def evaluation(incident: Incident) -> Evaluation | None:
    """The code around the incident that evaluates; None where something of it may be differentiated, or nobody can say."""
    program_begins = next((i for i, view in enumerate(incident.frames) if view.is_user and view.is_module_level), len(incident.frames) - 1)
    views = incident.frames[: program_begins + 1]
    if any(_is_library(view) for view in views):
        return None  # a trainer's loop, whose backward call is not in the program
    found: tuple[ResolvedSite, Program, ast.stmt | ast.expr | None] | None = None
    for view in views:
        if not view.is_user:
            continue
        place = resolve(view.site)
        program = None if place is None else program_of(place.source)
        node = None if place is None else place.node or place.statement
        if place is None or program is None or node is None or is_differentiated(program, node):
            return None
        if isinstance(view.locals.get("self"), nn.Module):
            continue
        around = repeated_by(program, node)
        if found is None or (around is not None and found[2] is None and not _trains(incident, view, program, around)):
            found = place, program, around
    failed = allocation(incident)
    if found is None or failed is None:
        return None
    roots: dict[int, nn.Module] = {}
    kept: list[tuple[torch.Tensor, set[int]]] = []
    for tensor in failed.graphed:
        uses = 1
        for leaf, users in _leaves(tensor):
            uses = max(uses, users)
            state = incident.names.state(leaf)
            if state is not None:
                roots[id(state.root)] = state.root
        kept.append((tensor, {hash((id(tensor), i)) for i in range(uses)}))
    if not roots:  # what held the graphs is gone with a comprehension: any model that is trained may be the one
        trained = (root for _, root in incident.names.modules if any(each.requires_grad for each in parameters_in(root)))
        roots = {id(root): root for root in trained}
    called = [incident.names.module_path(root) or type(root).__name__ for root in roots.values()]
    evaluates = bool(roots) and not any(in_training(root) for root in roots.values())
    forwards = {id(view.frame) for view in incident.frames if isinstance(view.locals.get("self"), nn.Module)}
    return Evaluation(*found, called, evaluates, kept, forwards)


def _trains(incident: Incident, view: FrameView, program: Program, around: ast.AST) -> bool:
    """Whether a loop runs backward calls: those that were seen came from it, or it has one."""
    if any(any(calls_inside(each, "backward")) for each in (around, *program.may_run(around)) if isinstance(each, ast.AST)):
        return True
    lines = range(getattr(around, "lineno", 0), (getattr(around, "end_lineno", None) or 0) + 1)
    code = view.frame.f_code
    return any(site.code is code and site.line in lines for call in incident.journal.backwards for site in call.stack)


def _leaves(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """The leaves that a tensor's graph leads to, each with how many nodes use it."""
    users: dict[Any, int] = {}
    for node in nodes_from([grad_fn_of(tensor)], _NODES):
        for source in {source for source, _ in node.next_functions if source is not None and is_accumulate(source)}:
            users[source] = users.get(source, 0) + 1
    for node, count in users.items():
        yield node.variable, count


def _is_library(view: FrameView) -> bool:
    name = view.frame.f_code.co_filename
    return "-packages" in name and not USER_FILES[name] and not is_torch_or_own(name)
