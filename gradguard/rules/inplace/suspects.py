"""Where an untraced step may have written over a saved value: in-place statements of the step's functions, ranked.

Evidence: the saved value's op and slot, the parameter or buffer whose memory it is, the variables of the frames that live in
that memory, and how values flow from name to name (views, arguments, results).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradguard.analysis.graph.walk import op_name
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted, flatten
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.memory import memory_writes, own_nodes, peel
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.core.safe_read import modules_in, peek, store_of
from gradguard.rules.inplace.aliases import parameters_of
from gradguard.rules.inplace.flags import holder_of
from gradguard.rules.inplace.last_write import fits
from gradguard.rules.inplace.other_iterations import belongs_elsewhere, over_parameters
from gradguard.rules.inplace.reaching_writes import Scope, live_value, module_types, step_scopes
from gradguard.rules.inplace.threads import held_in_threads
from gradguard.rules.inplace.wording import same_op
from gradguard.rules.inplace.write_history import Story, Write

_NUMBERS = ("item", "len", "float", "int", "time", "perf_counter", "numel", "size", "tolist")
_MOST = 8
_NAMED = 1.5  # a score that a variable which may be the saved value gives


@dataclass(eq=False)
class Suspect:
    """A statement that may have written, and how much speaks for it."""

    scope: Scope
    node: ast.AST | None  # None: a child of a container, which no line names
    written: str | None
    module: nn.Module | None = None
    score: float = 0.0
    counts: bool = False  # what looks like a counter has to have the saved value's name
    unlikely: bool = False

    @property
    def place(self) -> ResolvedSite | None:
        """The write as a resolved place."""
        return None if self.node is None else site_at(self.scope.source, self.node)


class _Flow:
    """Variables that may be the same memory: classes of (scope, name)."""

    def __init__(self, scopes: list[Scope]) -> None:
        self.parent: dict[tuple[ast.AST, str], tuple[ast.AST, str]] = {}
        self.scopes = scopes
        by_name: dict[str, list[Scope]] = {}
        for scope in scopes:
            by_name.setdefault(scope.name, []).append(scope)
        for scope in scopes:
            self._assignments(scope, by_name)
            for call in scope.calls:
                for callee in [*self.callees(call, by_name), *(each for each in scopes if (call, each.node) in scope.by_value)]:
                    self._arguments(scope, call, callee)

    def find(self, key: tuple[ast.AST, str]) -> tuple[ast.AST, str]:
        """The class of a variable."""
        while key in self.parent and self.parent[key] != key:
            key = self.parent[key]
        return key

    def join(self, one: tuple[ast.AST, str], other: tuple[ast.AST, str]) -> None:
        """Makes two variables one class."""
        first, second = self.find(one), self.find(other)
        if first != second:
            self.parent[first] = second

    def key(self, scope: Scope, name: str) -> tuple[ast.AST, str]:
        """A variable's key; attributes of `self` belong to the class."""
        if name.startswith("self.") and scope.owner is not None:
            return (scope.owner, name)
        return (scope.node, name)

    def callees(self, call: ast.Call, by_name: dict[str, list[Scope]]) -> list[Scope]:
        """The reachable functions a call may run."""
        last = (dotted(call.func) or "").rpartition(".")[2]
        if last in by_name and last not in ("forward",):
            return by_name[last]
        return []

    def _assignments(self, scope: Scope, by_name: dict[str, list[Scope]]) -> None:
        for statement in scope.statements:
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
                continue
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            value, _ = peel(statement.value)
            names = [name for target in targets for single in flatten(target) if (name := dotted(single)) is not None]
            base = dotted(value)
            if base is not None:
                for name in names:
                    self.join(self.key(scope, name), self.key(scope, base))
            elif isinstance(value, ast.Call):
                for callee in self.callees(value, by_name):
                    for returned in _returned(callee):
                        for name in names:
                            self.join(self.key(scope, name), self.key(callee, returned))

    def _arguments(self, scope: Scope, call: ast.Call, callee: Scope) -> None:
        program = program_of(scope.source)
        if program is None or not isinstance(callee.node, FUNCTIONS):
            return
        for parameter in parameters_of(callee.node):
            value = program.given(call, callee.node, parameter)
            base = None if value is None else dotted(peel(value)[0])
            if base is not None:
                self.join(self.key(callee, parameter), self.key(scope, base))


def _returned(scope: Scope) -> list[str]:
    found = []
    for statement in scope.statements:
        if isinstance(statement, ast.Return) and statement.value is not None:
            parts = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
            found += [name for part in parts if (name := dotted(peel(part)[0])) is not None]
    return found


def suspects_of(story: Story) -> list[Suspect]:
    """The statements that can have written, the likeliest first, and at the end the unlikely ones; empty when the source shows none."""
    incident = story.incident
    scopes = step_scopes(incident)
    modules = [child for root in incident.modules for child in modules_in(root)]
    everything = [*(suspect for scope in scopes for suspect in writes_of(incident, scope)), *_module_writes(story, scopes, modules)]
    found = [suspect for suspect in everything if fits(story.mismatch, suspect.node, suspect.module)]
    state = story.state
    if state is not None:
        attribute = state.path.rpartition(".")[2]
        kind = type(state.owner).__name__
        for suspect in found:
            suspect.score += _state_score(suspect, attribute, kind, state.is_buffer)
            elsewhere = belongs_elsewhere(incident, suspect.scope, suspect.node, suspect.written, state)
            suspect.unlikely = suspect.score <= 0 or elsewhere
    else:
        flow = _Flow(scopes)
        seeds = _seeds(story, scopes, flow, module_types(modules))
        for suspect in found:
            if suspect.written is not None and flow.find(flow.key(suspect.scope, suspect.written)) in seeds:
                suspect.score += seeds[flow.find(flow.key(suspect.scope, suspect.written))]
        if story.mismatch.tensor is not None and any(suspect.score >= 2 for suspect in found):
            for suspect in found:
                suspect.unlikely = suspect.score < 1
    for suspect in found:
        suspect.unlikely |= suspect.counts and suspect.score < _NAMED
    return sorted(found, key=lambda suspect: (suspect.unlikely, -suspect.score))


def guesses_for(story: Story) -> tuple[list[Write], list[Write]]:
    """The candidates as writes, one a line, each with how sure it is; and the unlikely ones."""
    found: list[Write] = []
    unlikely: list[Write] = []
    suspects = suspects_of(story)
    lines: set[tuple[str, int]] = set()
    scores: list[float] = []
    for suspect in suspects:
        place = suspect.place
        key = ("", id(suspect.module)) if place is None else (place.file, place.line)
        if key in lines or (place is None and suspect.module is None):
            continue
        lines.add(key)
        unguarded = place is None or not _under_no_grad(place)
        write = Write(
            "op", 0, None, (place.callee if place else None) or "", module=suspect.module, grad_enabled=unguarded, sure="possible"
        )
        write.__dict__["place"] = place
        if suspect.unlikely:
            unlikely.append(write)
        else:
            scores.append(suspect.score)
            found.append(write)
    if found and (len(found) == 1 or (scores[0] >= 1.5 and scores[0] > scores[1])):
        found[0].sure = "likely"
    return found[:_MOST], [*found[_MOST:], *unlikely]


def _under_no_grad(place: ResolvedSite) -> bool:
    return any("no_grad" in block.text for block in (*place.enclosing_withs(), *place.decorators()))


def _state_score(suspect: Suspect, attribute: str, kind: str, is_buffer: bool) -> float:
    written, owner = suspect.written or "", suspect.scope.owner
    if written.rpartition(".")[2] == attribute and "." in written:
        return 4.0 if owner is not None and owner.name == kind else 3.0
    if not is_buffer and over_parameters(suspect.scope, suspect.node, suspect.written):
        return 3.0
    return 0.0


def _seeds(story: Story, scopes: list[Scope], flow: _Flow, types: dict[str, set[str]]) -> dict[tuple[ast.AST, str], float]:
    """Classes of variables that may be the saved value, with the weight of what says so."""
    seeds: dict[tuple[ast.AST, str], float] = {}

    def add(scope: Scope, name: str | None, weight: float) -> None:
        if name is not None:
            key = flow.find(flow.key(scope, name))
            seeds[key] = max(seeds.get(key, 0.0), weight)

    storage = story.mismatch.storage
    around = story.incident.names.of_storage(storage) if storage is not None else []
    for scope in scopes:
        for name in around:
            value = live_value(story.incident, scope, name)
            if isinstance(value, torch.Tensor):
                add(scope, name, 3.0)
            if name.startswith("self."):
                add(scope, name, 3.0)
    for scope, name in () if storage is None else held_in_threads(scopes, storage):
        add(scope, name, 3.0)
    result = story.mismatch.slot in ("result", "output", "result0")
    op = same_op(op_name(story.mismatch.node))
    for scope in scopes:
        for statement in scope.statements:
            for call in own_nodes(statement):
                if not isinstance(call, (ast.Call, ast.BinOp)) or not _is_op(call, op, types):
                    continue
                if not result:
                    operands = (
                        [call.left, call.right]
                        if isinstance(call, ast.BinOp)
                        else [*call.args, *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
                    )
                    for operand in operands:
                        add(scope, dotted(peel(operand)[0]), 2.0)
                elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                    if peel(statement.value)[0] is call:
                        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                        for target in targets:
                            for single in flatten(target):
                                add(scope, dotted(single), 2.0)
                elif isinstance(statement, ast.Return):
                    for caller in scopes:
                        for received in _receiving(caller, scope):
                            add(caller, received, 1.5)
    return seeds


def _receiving(caller: Scope, scope: Scope) -> Iterator[str]:
    """Variables that a call of the scope (or, for `forward`, of any module) is assigned to."""
    for statement in caller.statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            called = (dotted(statement.value.func) or "").rpartition(".")[2]
            if called == scope.name or scope.name == "forward":
                for target in statement.targets:
                    yield from (name for single in flatten(target) if (name := dotted(single)) is not None)


_OPERATORS: dict[str, tuple[type[ast.operator], ...]] = {"mul": (ast.Mult,), "div": (ast.Div,), "pow": (ast.Pow,), "matmul": (ast.MatMult,)}


def _is_op(node: ast.Call | ast.BinOp, op: str, types: dict[str, set[str]]) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _OPERATORS.get(op, ()))
    last = last_part(node)
    names = {last.rstrip("_")} | {kind.lower() for kind in types.get(last, ())}
    return op in {same_op(name) for name in names} or op.replace("_", "") in names


def writes_of(incident: Incident, scope: Scope) -> Iterator[Suspect]:
    """The in-place statements of a scope that can have written a tensor."""
    for statement in scope.statements:
        for node, written in memory_writes(scope.source, statement):
            base, calls = peel(written)
            name = dotted(base)
            if "data" in calls or (isinstance(node, ast.Call) and _goes_on(written)):
                continue
            if isinstance(node, ast.AugAssign):
                if not _is_number(incident, scope, node, name):
                    yield Suspect(scope, node, name, score=0.1, counts=_looks_like_a_counter(node))
            elif isinstance(node, ast.Call):
                yield Suspect(scope, node, name, score=0.5)
            elif isinstance(written, ast.Subscript) and not _is_container(incident, scope, written, name):
                yield Suspect(scope, node, name, score=0.2)


def _goes_on(written: ast.expr) -> bool:
    """Whether a call writes into a gradient, or goes on with a chain whose first call stands for it."""
    return (isinstance(written, ast.Attribute) and written.attr == "grad") or (
        isinstance(written, ast.Call) and last_part(written).endswith("_")
    )


def _is_number(incident: Incident, scope: Scope, statement: ast.AugAssign, name: str | None) -> bool:
    """Whether `x += y` counts or adds up Python numbers, strings or lists."""
    if name is not None:
        value = live_value(incident, scope, name.partition(".")[0])
        if value is not None and "." not in name:
            return not isinstance(value, torch.Tensor)
    value_node = statement.value
    if isinstance(value_node, (ast.List, ast.ListComp, ast.JoinedStr, ast.Tuple)):
        return True
    if isinstance(value_node, ast.Constant) and isinstance(value_node.value, (str, bytes)):
        return True
    called = {last_part(item) for item in inside(value_node, ast.Call)}
    return bool(called & set(_NUMBERS))


def _looks_like_a_counter(statement: ast.AugAssign) -> bool:
    """`n += 1`: a number that counts, unless something tells that it is the saved value."""
    value = statement.value
    return isinstance(value, ast.Constant) and isinstance(value.value, int) and not isinstance(statement.op, (ast.Mult, ast.Div))


def _is_container(incident: Incident, scope: Scope, target: ast.Subscript, name: str | None) -> bool:
    """Whether `x[k] = v` fills a dict or list."""
    if name is not None and "." not in name:
        value = live_value(incident, scope, name)
        if value is not None:
            return not isinstance(value, torch.Tensor)
        for statement in scope.statements:
            bound = isinstance(statement, ast.Assign) and any(dotted(item) == name for item in statement.targets)
            if bound and isinstance(getattr(statement, "value", None), (ast.Dict, ast.List, ast.ListComp, ast.DictComp)):
                return True
    return isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)


def _module_writes(story: Story, scopes: list[Scope], modules: list[nn.Module]) -> Iterator[Suspect]:
    """Calls of modules that work in place, by attribute name."""
    active = [module for module in modules if peek(module, "inplace", False) is True and _writes_now(module)]
    if not active or story.state is not None:
        return
    roots = story.incident.modules
    held: dict[str, Any] = {}
    for module in active:
        place = holder_of(module, roots)
        if place is not None:
            held.setdefault(place[1], (module, type(place[0]).__name__))
    for module in active:
        weight = _in_container(story, module, roots)
        if weight and scopes:
            yield Suspect(scopes[0], None, None, module, weight)
    for scope in scopes:
        for call in scope.calls:
            last = (dotted(call.func) or "").rpartition(".")[2]
            if last in held and call.args and scope.owner is not None and scope.owner.name == held[last][1]:
                module = held[last][0]
                # an in-place module right after the op that saved its result is the usual suspect
                weight = 0.6 if type(module).__name__.lower() != op_name(story.mismatch.node).replace("_", "") else 0.3
                yield Suspect(scope, call, dotted(peel(call.args[0])[0]), module, weight)


def _in_container(story: Story, module: nn.Module, roots: list[nn.Module]) -> float:
    """How much speaks for a child of a `Sequential`: it follows the module whose op saved its result."""
    held = holder_of(module, roots)
    if held is None or not held[1].isdigit():
        return 0.0
    before = store_of(held[0], "_modules").get(str(int(held[1]) - 1))
    saver = op_name(story.mismatch.node).replace("_", "")
    return 2.0 if before is not None and type(before).__name__.lower() == saver else 0.3


def _writes_now(module: nn.Module) -> bool:
    return module.training or "Dropout" not in type(module).__name__
