"""# GG608 graph-retained

## What it is
The autograd graphs of old steps are still alive, and there are more of them with every step: something keeps tensors of
theirs with their `grad_fn`.

## Why it is wrong
A tensor with a `grad_fn` holds the whole graph it came from. Memory grows until it runs out, each step takes a little longer,
and a later backward through the old graph fails.

## Example
    self.loss_average = 0.9 * self.loss_average + 0.1 * loss     # holds the graph of every iteration
    losses.append(loss)

## Use instead
    self.loss_average = 0.9 * self.loss_average + 0.1 * loss.detach()
    losses.append(loss.item())

## Fix safety
Safe where the value is only looked at (logging, running statistics): values stay the same.

## When it speaks, what silences it
When five or more graphs that are at least 16 steps old live, over a span of 48 steps or more, and their number grows between
two looks (every eighth to 64th backward). And where a variable that is part of no loss, such as a running average of parameters, has
a graph that has grown by a node or more in each step at two surveys in a row (steps 3, 12, 24, 60, 150 ...), and reaches back behind
the survey before. Graphs kept within a step or for a window of steps are silent.
"""

from __future__ import annotations

import ast
import gc
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.holders import Holding, holdings
from gradguard.analysis.places.source import ResolvedSite, at_line, function_def
from gradguard.analysis.program.index import GROWING_METHODS, Program, program_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.foreign_exceptions import internal_error
from gradguard.fixes.at_places import kept_detached
from gradguard.monitors.retained_graphs import KEY, GraphsRetained, Tag
from gradguard.monitors.surveys import KeptGraphsDue
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.spans import class_node
from gradguard.torch_compat.private_api import node_sequence, sequence_number

CODE, NAME = "GG608", "graph-retained"


class Options(BaseModel):
    """What can be set under `rules: {GG608: ...}`."""

    model_config = ConfigDict(extra="forbid")

    age: int = Field(default=16, ge=2, le=1_000, description="steps after which a graph that still lives counts as kept")
    graphs: int = Field(default=5, ge=3, le=24, description="so many of them must live, over three times that many steps, before it speaks")


_NODES = 30_000
_NAMES, _LOOKS = 512, 2
_SIZES = "GG608 graphs"  # of the variables at the survey before
_TENSORS = 200
_PLAIN = {"list", "deque"}


@dataclass
class Keeper:
    """One variable, attribute or container through which old graphs live."""

    holding: Holding
    tags: set[int] = field(default_factory=set)
    tensors: int = 0


class _Size(NamedTuple):
    """The graph of a variable at a survey.

    Attributes:
        sequence: the number that the next node would have had.
        grown: at how many surveys in a row it had grown with each step.
    """

    steps: int
    nodes: int
    sequence: int
    grown: int


class Grown(NamedTuple):
    """Tensors whose graphs grow with each step.

    Attributes:
        before, now: nodes of the first one's at the survey before, and now.
        steps: between the two.
    """

    tensors: list[torch.Tensor]
    before: int
    now: int
    steps: int


def recognise(incident: Incident) -> Diagnosis | None:
    """What holds the old graphs, and the line that puts it there."""
    finding: GraphsRetained | KeptGraphsDue = incident.finding
    if isinstance(finding, KeptGraphsDue):
        grown = _grown(incident)
        keepers = [] if grown is None else _held(incident, [(tensor, set()) for tensor in grown.tensors])
        history = "" if grown is None else f"Their graph has grown from {grown.before} to {grown.now} nodes in {grown.steps} steps. "
    else:
        keepers = _keepers(incident, finding.tags)
        history = (
            f"Graphs of steps back to step {finding.since} are still alive at step {finding.step}, {finding.count} of those that "
            "were marked, and more at every look. "
        )
    if not keepers:
        return None
    most = max(len(each.tags) for each in keepers)
    main = [each for each in keepers if 2 * len(each.tags) >= most]
    first = main[0]
    names = [_shown(each) for each in main]
    places = [_place(incident, each) for each in main]
    culprit_place = next((place for place in places if place is not None), None)
    label = (
        f"`{first.holding.attribute}` is computed from its own last value, with the graphs of all steps before"
        if _is_chain(first)
        else f"keeps tensors of every step in `{first.holding.name}` with their graphs"
    )
    culprit: SourceSpan | None = None if culprit_place is None else culprit_place.statement_span(label, "culprit")
    related = [place.statement_span("and so does this", "context") for place in places[1:3] if place is not None]
    subject = " and ".join(f"`{name}`" for name in dict.fromkeys(names[:3]))
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"{subject} {'keep' if len(set(names[:3])) > 1 else 'keeps'} the graphs of old steps alive: memory grows with every step",
        culprit=culprit,
        related=wording.spans(*related),
        explanation=(
            f"{history}{'They hang' if isinstance(finding, GraphsRetained) else 'It hangs'} on {subject}: a tensor with a grad_fn holds "
            "everything it was computed from."
        ),
        fixes=[
            Fix(
                title=f"Keep {_value(culprit_place)} detached: `.detach()` of each tensor in it"
                if culprit_place is not None and any(_inner(each, place) for each, place in zip(main, places, strict=True))
                else f"Keep {_value(culprit_place)} detached (`.detach()`, or `.item()` for a number)"
                if culprit_place is not None
                else "Detach what is kept (`.detach()`, or `.item()` for a number)",
                safety="safe",
                detail="The values stay the same; only the graph is let go.",
                patch=_patch(main, places),
            )
        ],
        avoid=["`gc.collect()` or `torch.cuda.empty_cache()`: the memory is in use, not fragmented"],
    )


def _patch(main: list[Keeper], places: list[ResolvedSite | None]) -> str | None:
    """Detaches what each of them keeps, where it is a tensor by itself or an item of a plain container."""
    found = [place for place in places if place is not None]
    direct = all(not _inner(each, place) and set(each.holding.through) <= _PLAIN for each, place in zip(main, places, strict=True))
    return kept_detached(found) if direct and len(found) == len(places) else None


def _inner(keeper: Keeper, place: ResolvedSite | None) -> tuple[str, ...]:
    """The kinds of containers in what a statement keeps, with the tensor in the innermost."""
    whole = (
        place is not None and isinstance(place.statement, (ast.Assign, ast.AnnAssign)) and not any("[" in each for each in place.targets)
    )
    return keeper.holding.through if whole else keeper.holding.through[1:]


def _keepers(incident: Incident, old: Collection[Tag]) -> list[Keeper]:
    reached: list[tuple[torch.Tensor, set[int]]] = []
    for tensor in _live_tensors():
        tags = _old_tags(tensor, old)
        if tags:
            reached.append((tensor, tags))
        if len(reached) >= _TENSORS:
            break
    return _held(incident, reached)


def _held(incident: Incident, reached: list[tuple[torch.Tensor, set[int]]]) -> list[Keeper]:
    """What holds these tensors."""
    found: OrderedDict[tuple[Any, ...], Keeper] = OrderedDict()
    ignore = {id(reached), *(id(item) for item in reached)}
    reached.sort(key=lambda item: -len(item[1]))
    del reached[40:]
    tensors = [tensor for tensor, _ in reached]
    for (_, tags), held in zip(reached, holdings(tensors, incident.user_frames, ignore), strict=True):
        for holding in held[:2]:
            key = (
                holding.attribute,
                id(type(holding.owner)) if holding.owner is not None else None,
                holding.frame.f_code if holding.frame is not None else None,
            )
            keeper = found.setdefault(key, Keeper(holding))
            keeper.tags |= tags
            keeper.tensors += 1
    return sorted(found.values(), key=lambda each: -len(each.tags))


def _grown(incident: Incident) -> Grown | None:
    """The variables that are part of no loss and whose graphs have grown with each step, at two surveys in a row.

    A graph that grows within a step, such as a longer and longer rollout, has none of the nodes of the survey before.
    """
    sizes: dict[str, _Size] = incident.memory.get(_SIZES, {})
    now: dict[str, _Size] = {}
    steps, sequence = incident.finding.book.steps, sequence_number()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in islice(incident.names.tensor_bindings(), _NAMES):
        nodes = _nodes(tensor)
        if not nodes or any(KEY in node.metadata for node in nodes):
            continue
        before = sizes.get(name)
        oldest = min(node_sequence(node) for node in nodes)
        grows = before is not None and oldest < before.sequence and len(nodes) - before.nodes >= steps - before.steps > 0
        now[name] = _Size(steps, len(nodes), sequence, 1 + (before.grown if grows and before is not None else 0) if grows else 0)
        if now[name].grown == _LOOKS:
            found[name] = tensor
    incident.memory[_SIZES] = now
    if not found:
        return None
    name = next(iter(found))
    return Grown(list(found.values()), sizes[name].nodes, now[name].nodes, steps - sizes[name].steps)


def _nodes(tensor: torch.Tensor) -> set[Any]:
    """The nodes of a tensor's graph, without the leaves'; none of a graph that is too large."""
    try:
        stack = [tensor.grad_fn]
    except internal_error():  # of torch.func
        return set()
    found = set[Any]()
    while stack:
        node = stack.pop()
        if node is not None and node not in found and node.next_functions:
            found.add(node)
            stack += [each for each, _ in node.next_functions]
        if len(found) > _NODES:
            return set()
    return found


def _live_tensors() -> list[torch.Tensor]:
    found = []
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.Tensor):
            try:
                if obj.grad_fn is not None:
                    found.append(obj)
            except internal_error():
                continue
    return found


def _old_tags(tensor: torch.Tensor, old: Collection[Tag]) -> set[int]:
    """Backward counts of the old graphs that a tensor reaches."""
    node = tensor.grad_fn
    seen = {node}
    stack: list[Any] = [node]
    tags: set[int] = set()
    while stack and len(seen) < _NODES:
        node = stack.pop()
        tag = node.metadata.get(KEY) if node.next_functions else None
        if isinstance(tag, Tag) and tag in old:
            tags.add(tag.backward)
        for each, _ in node.next_functions:
            if each is not None and each not in seen:
                seen.add(each)
                stack.append(each)
    return tags


def _is_chain(keeper: Keeper) -> bool:
    return keeper.tensors <= len(keeper.tags) // 2 + 1 and not keeper.holding.through


def _shown(keeper: Keeper) -> str:
    return keeper.holding.name


def _place(incident: Incident, keeper: Keeper) -> ResolvedSite | None:
    """The statement that puts the tensor where it is kept."""
    holding = keeper.holding
    for program, scope in _programs(incident, holding):
        puts = [growth for growth in program.grows_in(holding.attribute) if growth.values]
        puts = [growth for growth in puts if not _is_plain(growth.values[-1])] or puts
        written = _written(program, scope, holding)
        again = [each for each in written if isinstance(each, ast.AugAssign) or _reads(program, each, holding)]
        chosen: list[ast.stmt | ast.Call] = [growth.node for growth in puts] if puts and (holding.through or not again) else [*again]
        if not chosen and holding.owner is not None:
            chosen = [each for each in written if getattr(program.function(each), "name", "") != "__init__"]
        elif not chosen:
            chosen = [*written[-1:]]
        if chosen:
            return at_line(program.source.filename, chosen[0].lineno)
    return None


def _programs(incident: Incident, holding: Holding) -> Iterator[tuple[Program, ast.AST | None]]:
    """The files in which the tensor may have been put there: that of the owner's class, then those of the frames, with the function of
    a variable."""
    owner = holding.owner if holding.owner is None or isinstance(holding.owner, type) else type(holding.owner)
    found = None if owner is None else class_node(owner)
    first = None if found is None else program_of(found[0])
    if first is not None:
        yield first, None
    for view in incident.user_frames:
        program = program_of(view.frame.f_code.co_filename)
        if program is None or program is first or (holding.frame is not None and view.frame is not holding.frame):
            continue
        function = None if view.is_module_level or owner is not None else function_def(view.frame.f_code)
        yield program, function if function is not None or owner is not None else program.source.tree


def _written(program: Program, scope: ast.AST | None, holding: Holding) -> list[ast.stmt]:
    """The statements that write the attribute or variable, of the owner as far as the source says whose it is."""
    if holding.owner is None:
        found = program.definitions(holding.attribute, scope)
        statements = {each for one in found if (each := program.source.statement(one.node)) is not None}
        return sorted(statements, key=lambda each: each.lineno)
    kinds = {base.__name__ for base in (holding.owner if isinstance(holding.owner, type) else type(holding.owner)).__mro__}
    return [
        write.node
        for write in program.writes(holding.attribute)
        if isinstance(write.node, ast.stmt) and write.owner is not None
        if any(not isinstance(each, ast.ClassDef) or each.name in kinds for each in program.classes(write.owner))
    ]


def _reads(program: Program, statement: ast.stmt, holding: Holding) -> bool:
    """Whether what a statement writes is made from what was there before."""
    value = getattr(statement, "value", None)
    read = [node for each in (program.slice(value, depth=0).expressions if value is not None else ()) for node in ast.walk(each)]
    if holding.owner is not None:
        return any(isinstance(node, ast.Attribute) and node.attr == holding.attribute for node in read)
    return any(isinstance(node, ast.Name) and node.id == holding.attribute for node in read)


def _is_plain(value: ast.expr) -> bool:
    """Whether what is kept has no graph, as far as the expression says."""
    if isinstance(value, (ast.Constant, ast.List, ast.Dict)) and not any(isinstance(node, ast.Name) for node in ast.walk(value)):
        return True
    return any(isinstance(node, ast.Attribute) and node.attr in ("detach", "item", "tolist", "numpy", "data") for node in ast.walk(value))


def _value(place: ResolvedSite) -> str:
    """The part of the statement that carries the graph, shortly."""
    statement = place.statement
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Call) and value.args and isinstance(value.func, ast.Attribute) and value.func.attr in GROWING_METHODS:
        value = value.args[-1]
    parts: list[ast.expr] = []
    if isinstance(value, ast.Dict):
        parts = value.values
    elif isinstance(value, (ast.Tuple, ast.List)):
        parts = value.elts
    carried = [part for part in parts if not isinstance(part, ast.Constant)]
    if carried:  # the container is none of torch's: what is in it can be detached
        return " and ".join(f"`{wording.short(ast.unparse(part), 32)}`" for part in carried[:3])
    return f"`{wording.short(ast.unparse(value), 40)}`" if isinstance(value, ast.AST) else "the value"


_ = nn
RULE = Rule(
    code=CODE,
    name=NAME,
    summary="graphs of old steps are kept alive and pile up",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
