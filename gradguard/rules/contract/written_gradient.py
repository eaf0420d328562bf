"""A custom backward that writes into the gradient it is given, while another branch gets the very same tensor. Part of GG407.

An addition hands its gradient on to both operands as it is, not as copies. What the backward of one writes, the other sees,
if it runs later; autograd's order is that of the sequence numbers, the newest first. No version check guards gradients.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch

from gradguard.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.evidence.graph import walk
from gradguard.evidence.old_torch import output_shape
from gradguard.fixes.edits import inserted
from gradguard.rules.contract.dataflow import Spot
from gradguard.rules.contract.functions import FunctionView, user_functions, view_of
from gradguard.rules.contract.scopes import Scope
from gradguard.rules.incident import Incident
from gradguard.torch_internals import node_sequence

_KEY = "contract.written_gradient"
_MOST_LOOKS = 6  # the same Functions stand in the graph of every step
_MOST_NODES = 20_000
_VIEWS = {"view", "view_as", "t", "transpose", "permute", "unsqueeze", "squeeze", "narrow", "select", "detach"}


class Write(NamedTuple):
    """An in-place write in a backward: which of its gradients, and the statement."""

    gradient: str
    position: int
    statement: ast.stmt


def screen(memory: dict[str, Any], moment: str, traced: bool) -> bool:
    """Whether to look: in the first traced steps, where the user has Functions of their own."""
    if not traced or moment != "before_backward" or memory.get(_KEY, 0) >= _MOST_LOOKS:
        return False
    memory[_KEY] = memory.get(_KEY, 0) + 1
    return next(user_functions(), None) is not None


def look(incident: Incident) -> Diagnosis | None:
    """The first Function in the graph that is about to spoil the gradient of another branch."""
    written: dict[type, tuple[FunctionView, list[Write]]] = {}
    order: list[Any] = []
    consumers: dict[tuple[Any, int], list[Any]] = {}
    for node, _ in walk(incident.root_nodes, limit=_MOST_NODES):
        for source, output in node.next_functions:
            if source is not None:
                consumers.setdefault((source, output), []).append(node)
        cls = getattr(node, "_forward_cls", None)
        if isinstance(cls, type):
            if cls not in written:
                view = view_of(cls)
                written[cls] = (view, writes(view))
            if written[cls][1]:
                order.append(node)
    roots = {(root.grad_fn, root.output_nr) for root in incident.roots if isinstance(root, torch.Tensor)}
    for node in order:
        view, found = written[node._forward_cls]
        for write in found:
            other = _sharer(node, write.position, consumers, roots)
            if other is not None:
                incident.memory[_KEY] = _MOST_LOOKS
                return _told(incident, view, write, node, other)
    return None


def writes(view: FunctionView) -> list[Write]:
    """The writes that backward surely does to its gradients: statements of its own body, through names and views of them."""
    scope = view.backward
    if scope is None or scope.function is None:
        return []
    names = scope.parameters()[1:]
    holds = {name: name for name in names}
    found: list[Write] = []
    for statement in scope.function.body:
        target = _target(statement)
        root = None if target is None else _root(target)
        if root in holds:
            found.append(Write(holds[root], names.index(holds[root]), statement))
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            value = _root(statement.value)
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for bound in [item for t in targets for item in ast.walk(t) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)]:
                held = holds.get(value) if value is not None and bound in targets else None
                if held is not None:
                    holds[bound.id] = held
                else:
                    holds.pop(bound.id, None)
        elif not isinstance(statement, (ast.Expr, ast.Return, ast.Assert)):
            return found  # a branch or a loop: what runs in it is not sure
    return found


def _target(statement: ast.stmt) -> ast.expr | None:
    """What a statement writes into in place."""
    if isinstance(statement, ast.AugAssign):
        return statement.target
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Subscript):
        return statement.targets[0]
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign, ast.Return)) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        method = call.func.attr
        if method.endswith("_") and not method.endswith("__") and method != "requires_grad_":
            return call.func.value
    return None


def _root(node: ast.expr) -> str | None:
    """The variable that an expression is, or is a view of."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
            node = node.func.value
        else:
            return None
    return node.id


def _sharer(node: Any, position: int, consumers: dict[tuple[Any, int], list[Any]], roots: set[tuple[Any, int]]) -> Any:
    """The node that gets the same gradient tensor from an addition, and runs after this one."""
    above = consumers.get((node, position), [])
    if len(above) != 1 or (node, position) in roots or not above[0].name().startswith("AddBackward"):
        return None
    addition = above[0]
    edges = addition.next_functions
    if len(edges) != 2 or any(source is None for source, _ in edges) or getattr(addition, "_saved_alpha", 1) != 1:
        return None
    other, output = next(((s, o) for s, o in edges if s is not node or o != position), (None, 0))
    if other is None or hasattr(other, "variable") or not node_sequence(other) < node_sequence(node):
        return None
    shapes = [output_shape(addition), _shape(node, position), _shape(other, output)]
    if any(shape is None or tuple(shape) != tuple(shapes[0] or ()) for shape in shapes):
        return None
    early = [c for c in consumers.get((other, output), []) if c is not addition and node_sequence(c) > node_sequence(node)]
    return None if early else other  # what came together with another gradient before is a sum, and a tensor of its own


def _shape(node: Any, position: int) -> Any:
    metadata = getattr(node, "_input_metadata", None)
    if metadata is None or position >= len(metadata):
        return output_shape(node) if position == 0 else None
    return tuple(metadata[position].shape)


def _told(incident: Incident, view: FunctionView, write: Write, node: Any, other: Any) -> Diagnosis | None:
    scope = view.backward
    if scope is None:
        return None
    source, statement = scope.source, write.statement
    used = incident.place_of_node(int(node._sequence_nr()))
    addition = next((c for c, _ in walk(incident.root_nodes, limit=_MOST_NODES) if _joins(c, node, other)), None)
    place = None if addition is None else incident.place_of_node(int(addition._sequence_nr()))
    related: list[SourceSpan] = []
    if place is not None:
        related.append(place.span("the addition gives one and the same gradient tensor to both its operands", "made"))
    elif used is not None:
        related.append(used.span(f"`{view.name}` is used here", "context"))
    first = _first_mention(scope, write)
    patch = inserted(source, first.lineno, f"{write.gradient} = {write.gradient}.clone()") if first is not None else None
    where = f" of `{place.source.flat(place.node)}`" if place is not None and place.source is not None and place.node is not None else ""
    return Diagnosis(
        code="GG407",
        name="function-contract",
        headline=f"The `backward` of `{view.name}` writes into `{write.gradient}` in place, and the other operand{where} "
        "gets that same tensor",
        culprit=Spot(scope, _shown(statement)).span(f"changes the gradient `{write.gradient}` in place", "culprit"),
        related=related,
        explanation="A backward does not own the gradient it is given: an addition hands the same tensor to both branches. The other "
        f"branch runs its backward later, and finds what `{view.name}` has left there: its gradient is wrong, without an error.",
        fixes=[
            Fix(title=f"work on a copy: `{write.gradient} = {write.gradient}.clone()` first", safety="safe", patch=patch),
            Fix(title="compute out of place (`masked_fill`, `torch.where`, `*`)", safety="safe"),
        ],
    )


def _shown(statement: ast.stmt) -> Any:
    return statement.value if isinstance(statement, (ast.Expr, ast.Return)) and statement.value is not None else statement


def _joins(node: Any, *sources: Any) -> bool:
    return node.name().startswith("AddBackward") and all(any(s is source for s, _ in node.next_functions) for source in sources)


def _first_mention(scope: Scope, write: Write) -> ast.stmt | None:
    body = scope.function.body if scope.function is not None else []
    return next((s for s in body if any(isinstance(n, ast.Name) and n.id == write.gradient for n in ast.walk(s))), None)
