"""What the rules about DistributedDataParallel share: the replica, its parameters, and where its submodules are used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import dotted, function_def, parent_of, resolve, segment, span_of
from gradguard.analysis.program.bindings import assignments_to
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import UNKNOWN, programs_of
from gradguard.analysis.program.user_calls import calls, only, user_files
from gradguard.analysis.program.user_files import sources_of
from gradguard.core.diagnosis import Role, SourceSpan, TensorFacts
from gradguard.core.safe_read import (
    named_children,
    named_modules,
    named_parameters,
    parameters_in,
    peek,
)
from gradguard.probes import replicas
from gradguard.rules.spans import class_node

_LEAVES = (ast.Return, ast.Continue, ast.Break)


def replica(incident: Incident) -> Any:
    """The DDP module of an incident: the one in the stack, or the only one there is."""
    for view in incident.frames:
        owner = view.locals.get("self")
        if isinstance(owner, DistributedDataParallel):
            return owner
    alive = list(replicas.known)
    if len(alive) == 1:
        return alive[0]
    named = list({id(value): value for _, value in incident.names.bindings if isinstance(value, DistributedDataParallel)}.values())
    return named[0] if len(named) == 1 else None


def name_of(incident: Incident, ddp: Any) -> str:
    """What the user calls the DDP module."""
    return incident.names.of(ddp) or "model"


def made(incident: Incident, ddp: Any, label: str, role: Any = "declared") -> SourceSpan | None:
    """The call that made the DDP module."""
    place = resolve(replicas.described(ddp).site)
    if place is not None:
        return place.span(label, role)
    found = [*calls(incident, "DistributedDataParallel"), *calls(incident, "DDP")]
    return only(found, label, role)


def at_indices(incident: Incident, ddp: Any) -> list[str]:
    """The parameters that PyTorch's message speaks of, by dotted path."""
    text = incident.message
    told = re.search(r"Parameters which did not receive grad for rank \d+:([^\n]*)", text)
    if told is not None:
        return [name.strip() for name in told[1].split(",") if name.strip()]
    single = re.search(r"Parameter at index (\d+)(?: with name (\S+))?", text)
    many = re.search(r"Parameter indices which did not receive grad for rank \d+:([\d\s]*)", text)
    if single is not None and single[2]:
        return [single[2]]
    indices = [int(single[1])] if single is not None else [int(each) for each in many[1].split()] if many is not None else []
    names = replicas.described(ddp).names
    return [names[i] for i in indices if i < len(names)]


def facts(ddp: Any, names: list[str]) -> list[TensorFacts]:
    """A handful of parameters as a diagnosis lists them."""
    held = dict(named_parameters(ddp.module))
    return [
        TensorFacts(name=name, kind="parameter", shape=list(held[name].shape), dtype=str(held[name].dtype).removeprefix("torch."))
        for name in names[:5]
        if name in held
    ]


def blamed(root: nn.Module, names: set[str]) -> list[str]:
    """The fewest modules and parameters that hold just these parameters (and, it may be, frozen ones)."""
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        held = [(f"{path}{name}", p) for name, p in named_parameters(module)]
        own = [name for name, p in held if p.requires_grad or name in names]
        if path and own and all(name in names for name in own):
            found.append(path[:-1])
            return
        found.extend(f"{path}{name}" for name, _ in named_parameters(module, recurse=False) if f"{path}{name}" in names)
        for name, child in named_children(module):
            visit(child, f"{path}{name}.")

    visit(root, "")
    return found


def written_later(files: Iterable[str], attributes: Iterable[str], label: str, role: Role, value: object = UNKNOWN) -> list[SourceSpan]:
    """The lines, outside of constructors, that write one of these attributes; with a value, those alone that can write this constant."""
    programs = programs_of(sources_of(dict.fromkeys(files)))
    nodes = {write.node: program for program in programs for name in attributes for write in program.writes(name, value)}
    spans = [program.source.span_of(node, label, role) for node, program in nodes.items()]
    return [span for span in spans if not (span.function or "").endswith("__init__")]


def frozen_at(incident: Incident) -> SourceSpan | None:
    """The line, outside of constructors, that freezes parameters; None if there is not just one."""
    found = written_later(user_files(incident), ["requires_grad"], "freezes parameters that DDP waits for", "culprit", value=False)
    return found[0] if len(found) == 1 else None


# -- where a submodule is used ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """A place in a class's methods that uses an attribute; `condition` decides whether it is reached, None if nothing does."""

    path: str
    file: str
    node: ast.AST
    condition: ast.expr | None
    inverted: bool

    @property
    def condition_text(self) -> str:
        """The condition under which the place is reached, as written."""
        if self.condition is None:
            return ""
        text = segment(self.file, self.condition) or ast.unparse(self.condition)
        return f"not ({text})" if self.inverted else text

    def span(self, label: str, role: Any = "culprit") -> SourceSpan:
        return span_of(self.file, self.node, label=label, role=role)


def uses(root: nn.Module, path: str) -> list[Use]:
    """Where the module or parameter at a path is used, in the methods of the class of the user's that holds it."""
    parts = path.split(".")
    for i in range(len(parts) - 1, -1, -1):
        owner = root.get_submodule(".".join(parts[:i])) if i else root
        found = [use for file, methods in _methods(owner) for use in _in_methods(path, file, methods, parts[i])]
        if found or _methods(owner):
            return found
    return []


def conditional_uses(root: nn.Module) -> list[Use]:
    """Every conditional use of a submodule with parameters."""
    found: list[Use] = []
    for path, module in named_modules(root):
        if path and any(p.requires_grad for p in parameters_in(module)):
            parent = root.get_submodule(path.rpartition(".")[0])
            if _methods(parent):
                found += [use for use in uses(root, path) if use.condition is not None]
    return found


def _methods(module: nn.Module) -> list[tuple[str, dict[str, ast.FunctionDef]]]:
    found = []
    for cls in type(module).__mro__:
        source, node = class_node(cls) or (None, None)
        if source is not None and node is not None and node.name == cls.__name__:
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            found.append((source.filename, {method.name: method for method in methods if method.name != "__init__"}))
    return found


def _in_methods(path: str, file: str, methods: dict[str, ast.FunctionDef], attribute: str, depth: int = 0) -> list[Use]:
    found: list[Use] = []
    for name, method in methods.items():
        for node in inside(method, ast.Attribute):
            if node.attr != attribute or dotted(node.value) != "self":
                continue
            for place in _run(file, node):
                test, inverted = _condition(file, place, method)
                if test is None and name != "forward" and depth < 3:
                    callers = _in_methods(path, file, methods, name, depth + 1)
                    found += callers or [Use(path, file, place, None, False)]
                else:
                    found.append(Use(path, file, place, test, inverted))
    return found


def _run(file: str, node: ast.AST) -> list[ast.AST]:
    """The calls that run what is read here: directly, by item, or as the variable of a loop over it."""
    child, above = node, parent_of(file, node)
    while isinstance(above, (ast.Subscript, ast.Attribute)) and above.value is child:
        child, above = above, parent_of(file, above)
    if isinstance(above, ast.Call) and above.func is child:
        return [above]
    outer: ast.AST | None = above
    while isinstance(outer, ast.Call):  # enumerate(self.layers), zip(...)
        child, outer = outer, parent_of(file, outer)
    if isinstance(outer, ast.For) and outer.iter is child:
        names = {item.id for item in inside(outer.target, ast.Name)}
        run = [
            item
            for statement in outer.body
            for item in inside(statement, ast.Call)
            if isinstance(item.func, ast.Name) and item.func.id in names
        ]
        return list(run) or [node]
    return [node]


def _condition(file: str, node: ast.AST, method: ast.FunctionDef) -> tuple[ast.expr | None, bool]:
    child, above = node, parent_of(file, node)
    while above is not None:
        if isinstance(above, ast.IfExp) and child is not above.test:
            return above.test, child is above.orelse
        if isinstance(above, ast.If) and child is not above.test:
            return above.test, child in above.orelse
        if isinstance(above, ast.While) and child in above.body:
            return above.test, False
        if isinstance(child, ast.stmt):
            for block in (getattr(above, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(block, list) and child in block:
                    for before in reversed(block[: block.index(child)]):
                        if isinstance(before, ast.If) and any(isinstance(item, _LEAVES) for item in before.body):
                            return before.test, True
        if above is method:
            break
        child, above = above, parent_of(file, above)
    return None, False


def deciding(incident: Incident, use: Use) -> SourceSpan | None:
    """The line, outside of constructors, that sets the attribute a condition reads; None if there is not just one."""
    if use.condition is None:
        return None
    read = {node.attr for node in inside(use.condition, ast.Attribute)}
    found = written_later([*user_files(incident), use.file], read, "decides whether it runs", "context")
    running = [view.frame.f_code for view in incident.user_frames if not view.is_module_level]
    near = [span for span in found if any(_within(span, code) for code in running)]
    chosen = near if len(found) > 1 else found
    return chosen[0] if len(chosen) == 1 else None


def _within(span: SourceSpan, code: CodeType) -> bool:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return span.file == code.co_filename and min(lines) <= span.line <= max(lines)


# -- what expressions in the user's functions stand for ---------------------------------------------------------------


def evaluated(incident: Incident, file: str, node: ast.expr) -> Any:
    """What a dotted name stands for where it is written, by the running frames; None where unknown. Runs no code of the user's."""
    name = dotted(node)
    if name is None:
        return None
    first, *rest = name.split(".")
    around = [above for above in _above(file, node) if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for view in incident.user_frames:
        if view.frame.f_code.co_filename != file:
            continue
        running = function_def(view.frame.f_code)
        inner = around[: around.index(running)] if running in around else around
        if first != "self" and any(_own(each, first) for each in inner):
            continue  # a variable of a function that is not running: another's of the same name tells nothing
        seen = first == "self" or running in around or not around
        value = view.locals.get(first, view.globals.get(first)) if seen else view.globals.get(first)
        for part in rest:
            value = None if isinstance(value, torch.Tensor) else peek(value, part, None)
        if value is not None:
            return value
    return None


def _above(file: str, node: ast.AST) -> Iterator[ast.AST]:
    above = parent_of(file, node)
    while above is not None:
        yield above
        above = parent_of(file, above)


def _own(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Whether a name is a function's parameter or variable."""
    return any(argument.arg == name for argument in inside(function.args, ast.arg)) or bool(assignments_to(function, name))
