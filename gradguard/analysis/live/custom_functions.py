"""Custom `autograd.Function`s: from the name in an error text to the class, its forward's signature and its backward's returns."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import assignments_to, dotted
from gradguard.analysis.program.definitions import returns_of
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.scopes import Scope, code_of, function_scope
from gradguard.analysis.program.syntax import header_range
from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import Role, SourceSpan
from gradguard.core.safe_read import class_attributes, peek, unwrapped
from gradguard.torch_compat.private_api import grad_fn_of


@dataclass(eq=False)
class FunctionView:
    """A custom Function's class with the sources of its two methods, as far as they are to be had."""

    cls: type
    forward: Scope | None
    backward: Scope | None

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def inputs(self) -> list[str]:
        """Forward's arguments without ctx, `*args` as `args[...]` left out."""
        names = [] if self.forward is None else self.forward.parameters()
        return names if takes_no_context(self.cls) else names[1:]

    @property
    def setup(self) -> Scope | None:
        """`setup_context`, where the Function has one of its own."""
        return _method(self.cls, "setup_context") if takes_no_context(self.cls) else None

    @property
    def context(self) -> str | None:
        """What forward calls its context object."""
        scope = self.setup or self.forward
        names = [] if scope is None else scope.parameters()
        return names[0] if names else None

    def signature(self, method: str = "forward") -> str:
        """`forward(ctx, x, weight)`, as written."""
        scope = self.forward if method == "forward" else self.backward
        if scope is None or scope.function is None:
            return method
        return f"{scope.function.name}({ast.unparse(scope.function.args)})"

    def header(self, method: str, label: str | None, role: Role = "declared") -> SourceSpan | None:
        """The `def` line of forward or backward."""
        scope = self.forward if method == "forward" else self.backward
        return None if scope is None or scope.function is None else def_span(scope, label, role)

    def returned(self, count: int | None = None) -> ast.expr | None:
        """What backward returns; of several returns the last that fits the number of gradients."""
        values = [] if self.backward is None else returns_of(self.backward)
        fitting = [value for value in values if count is None or count_of(value) in (count, None)]
        chosen = fitting or values
        return chosen[-1] if chosen else None


def def_span(scope: Scope, label: str | None, role: Role) -> SourceSpan:
    """A function's header as a span."""
    assert scope.function is not None
    return scope.source.span(header_range(scope.function), label, role, scope.qualname)


def count_of(value: ast.expr) -> int | None:
    """How many gradients a return expression gives; None when the source does not tell."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return None if any(isinstance(element, ast.Starred) for element in value.elts) else len(value.elts)
    if isinstance(value, (ast.Name, ast.Call, ast.Subscript, ast.Attribute, ast.IfExp)):
        return None if not isinstance(value, ast.Name) else 1
    return 1


def needs_none(view: FunctionView, name: str) -> bool:
    """Whether an input is evidently no tensor, or one without a gradient: its name is used as a flag, a number or a size in forward."""
    if view.forward is None or view.forward.function is None:
        return False
    arguments = view.forward.function.args
    annotated = next((a.annotation for a in (*arguments.posonlyargs, *arguments.args) if a.arg == name), None)
    if isinstance(annotated, ast.Name) and annotated.id in ("int", "float", "bool", "str"):
        return True
    for node in ast.walk(view.forward.tree):
        if isinstance(node, (ast.If, ast.IfExp)) and any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.test)):
            return True
        kept = isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == name
        if kept and any((dotted(target) or "").startswith(f"{view.context}.") for target in getattr(node, "targets", ())):
            return True
    return False


def takes_no_context(cls: type) -> bool:
    """Whether forward is in the newer style, with a `setup_context` of its own and no ctx."""
    return peek(cls, "setup_context") is not peek(torch.autograd.Function, "setup_context")


def view_of(cls: type) -> FunctionView:
    """The view of a Function's class."""
    return FunctionView(cls, _method(cls, "forward"), _method(cls, "backward") or _method(cls, "vjp"))


def _method(cls: type, name: str) -> Scope | None:
    code, _, names = code_of(peek(cls, name))
    return None if code is None else function_scope(code, names=names)


def find_function(incident: Incident, name: str) -> FunctionView | None:
    """The custom Function of this name: in the graph, among the tensors of the failing call, else among all that exist."""
    found: list[type] = [cls for cls in classes_in_graph(incident) if cls.__name__ == name]
    if not found:
        known = [cls for cls in user_functions() if cls.__name__ == name]
        visible = [
            cls
            for cls in known
            if any(_named(cls, view.globals.values()) or _named(cls, _values(view.locals)) for view in incident.user_frames)
        ]
        found = visible or known
    return view_of(found[-1]) if found else None


def _named(cls: type, values: Iterable[Any]) -> bool:
    return any(value is cls for value in values)


def _values(names: dict[str, Any]) -> list[Any]:
    return [value for value in names.values() if isinstance(value, type)]


def classes_in_graph(incident: Incident) -> list[type]:
    """The custom Functions in the graphs at hand, each once, the newest use first."""
    nodes = list(incident.root_nodes)
    for value in (*incident.args, *incident.kwargs.values()):
        if (node := grad_fn_of(value)) is not None:
            nodes.append(node)
    found: dict[type, None] = {}
    for node, _ in walk(nodes, limit=20_000):
        cls = getattr(node, "_forward_cls", None)
        if isinstance(cls, type):
            found.setdefault(cls)
    return list(found)


def user_functions() -> Iterator[type[Any]]:
    """Every custom Function of the user's that exists in this process."""
    stack: list[type[Any]] = [torch.autograd.Function]
    seen: set[int] = set()
    while stack:
        for cls in type.__subclasses__(stack.pop()):
            if id(cls) in seen:
                continue
            seen.add(id(cls))
            stack.append(cls)
            if any(_is_users(value) for value in class_attributes(cls).values()):
                yield cls


def _is_users(value: Any) -> bool:
    value = unwrapped(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)
    return isinstance(value, FunctionType) and USER_FILES[value.__code__.co_filename]


def element_spot(
    view: FunctionView,
    index: int,
    count: int | None = None,
    value: ast.expr | None = None,
    maker: Callable[[str], ast.expr | ast.stmt | None] = lambda name: None,
) -> tuple[Spot | None, Spot | None]:
    """What backward returned at an index: (the expression that made it, the return's element).

    Args:
        value: the expression of the return that ran, where that is known.
        maker: what gave a variable its value, where that is known.
    """
    value = value or view.returned(count)
    if view.backward is None or value is None:
        return None, None
    element: ast.expr = value
    slot = _in_slot(view.backward, value, index)
    if slot is not None and not isinstance(slot.node, ast.Name):
        return slot, Spot(view.backward, value)
    if slot is not None and isinstance(slot.node, ast.Name):
        element = slot.node
    elif isinstance(value, ast.Name):
        assigned = assignments_to(view.backward.tree, value.id)
        if assigned and isinstance(assigned[-1], ast.Assign) and isinstance(assigned[-1].value, ast.Tuple):
            value = assigned[-1].value
    if isinstance(value, (ast.Tuple, ast.List)):
        if any(isinstance(item, ast.Starred) for item in value.elts[: index + 1]) or index >= len(value.elts):
            return Spot(view.backward, value), Spot(view.backward, value)
        element = value.elts[index]
    returned = Spot(view.backward, element, element.id if isinstance(element, ast.Name) else None)
    made = returned
    if isinstance(element, ast.Name) and (node := maker(element.id)) is not None:
        made = Spot(view.backward, cast(ast.expr, node), element.id)
    elif isinstance(element, ast.Name):
        for statement in assignments_to(view.backward.tree, element.id)[::-1]:
            single = isinstance(statement, ast.Assign) and any(isinstance(t, ast.Name) and t.id == element.id for t in statement.targets)
            if isinstance(statement, ast.Assign) and single and not isinstance(statement.value, ast.Constant):
                made = Spot(view.backward, statement.value, element.id)
                break
            if isinstance(statement, ast.AugAssign):
                made = Spot(view.backward, statement, element.id)
                break
    return made, returned


def _in_slot(scope: Scope, value: ast.expr, index: int) -> Spot | None:
    """What was put at an index of the list that is returned, or made a tuple of; None where that is not seen in one statement."""
    if isinstance(value, ast.Call) and dotted(value.func) in ("tuple", "list") and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, ast.Name):
        return None
    kept = [
        node
        for node in ast.walk(scope.tree)
        if isinstance(node, (ast.Assign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id == value.id
    ]
    slots = [getattr(getattr(_target(node), "slice", None), "value", None) for node in kept]
    # the index of each must be known: `grads[i] = ...` may be this one
    found = [node for node, slot in zip(kept, slots, strict=True) if slot == index]
    if len(found) != 1 or not all(type(slot) is int for slot in slots):
        return None
    made = found[0].value if isinstance(found[0], ast.Assign) else found[0]
    return Spot(scope, made, f"{value.id}[{index}]")


def _target(node: ast.Assign | ast.AugAssign) -> ast.expr:
    return node.targets[0] if isinstance(node, ast.Assign) else node.target
