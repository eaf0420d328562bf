"""What keeps tensors with their graphs from step to step: the variable, attribute or container, the line that puts them there, and how
to let the graphs go."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.holders import Holding, held_by_objects, holdings
from gradguard.analysis.places.source import ResolvedSite, at_line, function_def
from gradguard.analysis.program.differentiated import is_differentiated
from gradguard.analysis.program.index import GROWING_METHODS, Program, program_of
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.fixes.at_places import kept_detached
from gradguard.fixes.edits import before, patched
from gradguard.rules import wording
from gradguard.rules.spans import class_node

_PLAIN = {"list", "deque"}
_LOOKED_AT = 40  # tensors whose holders are searched for: each takes a look at everything alive


@dataclass
class Keeper:
    """One variable, attribute or container through which old graphs live.

    Attributes:
        holding: how one of the tensors is held.
        tags: what tells the old graphs apart, of those that are reached from here.
        tensors: how many tensors are held.
    """

    holding: Holding
    tags: set[int] = field(default_factory=set)
    tensors: int = 0

    @property
    def name(self) -> str:
        """As the program writes it."""
        return self.holding.name

    @property
    def is_chain(self) -> bool:
        """Whether a single value has all of them behind it, being computed from its own last value."""
        return self.tensors <= len(self.tags) // 2 + 1 and not self.holding.through


class Kept:
    """What is to be said of keepers: the largest, and those that keep at least half as much.

    Args:
        keepers: the largest first; at least one.
        each: what the graphs are of.
    """

    def __init__(self, incident: Incident, keepers: Sequence[Keeper], each: str = "step") -> None:
        self.each = each
        most = max(len(each.tags) for each in keepers)
        main = [each for each in keepers if 2 * len(each.tags) >= most]
        placed = sorted(((each, _place(incident, each)) for each in main), key=lambda item: _takes_over(item[0], item[1], main))
        self.main = [each for each, _ in placed]
        self.places = [place for _, place in placed]
        self.place = next((place for place in self.places if place is not None), None)
        self.names = list(dict.fromkeys(each.name for each in self.main[:3]))
        shown = [f"`{name}`" for name in self.names]
        self.subject = " and ".join([", ".join(shown[:-1]), shown[-1]] if shown[1:] else shown)

    def culprit(self) -> SourceSpan | None:
        """The line that keeps them."""
        first = next((each for each, place in zip(self.main, self.places, strict=True) if place is not None), self.main[0])
        return None if self.place is None else self.place.statement_span(self._label(first, self.place), "culprit")

    def related(self) -> list[SourceSpan]:
        """Further lines that do."""
        rest = [(each, place) for each, place in zip(self.main, self.places, strict=True) if place is not None and place is not self.place]
        return wording.spans(*(place.statement_span(self._label(each, place), "context") for each, place in rest[:2]))

    def _label(self, keeper: Keeper, place: ResolvedSite) -> str:
        name = keeper.holding.attribute
        if not keeper.is_chain:
            return f"keeps tensors of every {self.each} in `{keeper.name}` with their graphs"
        if _takes_over(keeper, place, self.main):
            return f"`{name}` is given a value that has the graphs of all {self.each}s before"
        return f"`{name}` is computed from its own last value, with the graphs of all {self.each}s before"

    def fix(self) -> Fix:
        """Lets the graphs go, and keeps the values; where a backward call needs the graphs, those of earlier steps alone."""
        if any(map(_is_needed, self.places)):
            return Fix(
                title=f"Begin anew in every {self.each} what {self.subject} has: nothing runs backward through the rest",
                reason=f"the graph of the {self.each} itself is needed",
            )
        entry = _entry(self.main, self.places)
        if entry is not None:
            return entry
        inner = any(_inner(each, place) for each, place in zip(self.main, self.places, strict=True))
        value = None if self.place is None else _value(self.place)
        lines = sorted({place.line for place in self.places if place is not None})
        if len(lines) > 1:
            listed = f"{', '.join(map(str, lines[:-1]))} and {lines[-1]}"
            return Fix(
                title=f"Detach what is kept at lines {listed}: `.detach()`, or `.item()` for a number",
                safety="safe",
                detail="The values stay the same; only the graphs are let go.",
                patch=_patch(self.main, self.places),
            )
        return Fix(
            title="Detach what is kept (`.detach()`, or `.item()` for a number)"
            if value is None
            else f"Keep {value} detached: `.detach()` of each tensor in it"
            if inner
            else f"Keep {value} detached (`.detach()`, or `.item()` for a number)",
            safety="safe",
            detail="The values stay the same; only the graph is let go.",
            patch=_patch(self.main, self.places),
        )


def _takes_over(keeper: Keeper, place: ResolvedSite | None, main: Sequence[Keeper]) -> bool:
    """Whether a statement gives a keeper the value of another one, so that it keeps no graph which that one lets go."""
    statement = None if place is None else place.statement
    value = getattr(statement, "value", None)
    if value is None or not keeper.is_chain or isinstance(statement, ast.AugAssign) or len(main) < 2:
        return False
    read = {
        node.attr if isinstance(node, ast.Attribute) else node.id for node in ast.walk(value) if isinstance(node, (ast.Attribute, ast.Name))
    }
    others = {each.holding.attribute for each in main if each is not keeper}
    return keeper.holding.attribute not in read and bool(read & others)


def _entry(main: Sequence[Keeper], places: Sequence[ResolvedSite | None]) -> Fix | None:
    """Detaches the one parameter from which a function makes all that several keepers keep, as it comes in."""
    found = [place for each, place in zip(main, places, strict=True) if place is not None and not _takes_over(each, place, main)]
    functions = {place.enclosing_function for place in places if place is not None}
    function = functions.pop() if len(functions) == 1 else None
    source = places[0].source if places and places[0] is not None else None
    if len(main) < 2 or None in places or not isinstance(function, ast.FunctionDef) or source is None or not function.body:
        return None
    given = {each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)} - {"self", "cls"}
    read = [{node.id for node in ast.walk(place.statement) if isinstance(node, ast.Name)} & given for place in found if place.statement]
    if not read or any(len(names) != 1 for names in read) or len(set.union(*read)) != 1:
        return None
    name = read[0].pop()
    for node in ast.walk(function):
        leaves = isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value is not None
        if leaves and any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node)):
            return None  # the caller may go on with it
        if isinstance(node, ast.Attribute) and node.attr in ("backward", "grad"):
            return None
    first = next((each for each in function.body if not _is_docstring(each)), None)
    patch = None if first is None else patched(source, insert=[before(source, first, f"{name} = {name}.detach()")])
    return Fix(
        title=f"Detach `{name}` at the top of `{function.name}`: all that is kept is made from it",
        safety="safe",
        detail="The values stay the same; only the graphs are let go.",
        patch=patch,
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)


def keepers(
    incident: Incident, tensors: Iterable[tuple[torch.Tensor, set[int]]], own: Iterable[int] = (), most: int = _LOOKED_AT
) -> list[Keeper]:
    """Who keeps these tensors, those first that keep the most of what the tensors reach (the sets of tags).

    Args:
        own: ids of containers of gradguard's that hold them.
        most: how many tensors' holders are searched for.
    """
    reached = sorted(tensors, key=lambda item: -len(item[1]))
    alone = [tensor for tensor, _ in reached]
    ignore = {*own, id(tensors), id(alone), id(reached), *(id(item) for item in reached)}
    named = {id(tensor) for tensor in held_by_objects(alone, ignore)}
    named |= {id(value) for view in incident.user_frames for value in view.locals.values()}  # running frames are no referrers
    reached = [item for item in reached if id(item[0]) in named][:most]
    ignore |= {id(reached)}
    alone = [tensor for tensor, _ in reached]
    found: OrderedDict[tuple[Any, ...], Keeper] = OrderedDict()
    for (_, tags), held in zip(reached, holdings(alone, incident.user_frames, ignore), strict=True):
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


def _is_needed(place: ResolvedSite | None) -> bool:
    """Whether a backward call begins at what a statement keeps."""
    program = None if place is None else program_of(place.source)
    value = None if place is None else getattr(place.statement, "value", None)
    if isinstance(value, ast.Call) and value.args and isinstance(value.func, ast.Attribute) and value.func.attr in GROWING_METHODS:
        value = value.args[-1]
    return program is not None and isinstance(value, ast.expr) and is_differentiated(program, value)


def _patch(main: Sequence[Keeper], places: Sequence[ResolvedSite | None]) -> str | None:
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
