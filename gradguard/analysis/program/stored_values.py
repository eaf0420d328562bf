"""What a statement puts where it stores: nothing that can carry a graph, or something into a part of a container that a local
name stands for.
"""

from __future__ import annotations

import ast
import re

from gradguard.analysis.program.bindings import dotted, targets_of
from gradguard.analysis.program.defuse import STORING_METHODS, stores_into
from gradguard.analysis.program.syntax import FUNCTIONS, OPERATOR_OPS, Source
from gradguard.core.safe_read import elements, in_class, pairs

_CONTAINERS = frozenset({"list", "dict", "deque", "set", "OrderedDict"})
_MAKERS = frozenset(
    {"zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye", "tensor", "from_numpy"}
)
_MAKERS_BY = frozenset(
    {"new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like"}
)
_CARRYING = frozenset(
    {"clone", "to", "float", "double", "half", "cpu", "cuda", "repeat", "expand", "view", "reshape", "unsqueeze", "squeeze"}
)
_REGISTERING = re.compile(r"register_(module_)?forward(_pre)?_hook")
_PARTS = frozenset({"get", "setdefault"})


def without_graph(value: ast.expr | None) -> bool:
    """Whether what is written makes nothing that has a history: constants, empty containers, fresh tensors, containers of those."""
    if value is None:
        return False
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, (ast.Tuple, ast.List, ast.Set)):
        return all(map(without_graph, value.elts))
    if isinstance(value, ast.Dict):
        return all(map(without_graph, value.values))
    if isinstance(value, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
        return without_graph(value.elt)
    if isinstance(value, ast.DictComp):
        return without_graph(value.value)
    if isinstance(value, ast.UnaryOp):
        return without_graph(value.operand)
    if isinstance(value, ast.BinOp):
        return without_graph(value.left) and without_graph(value.right)
    return isinstance(value, ast.Call) and _fresh(value)


def _fresh(call: ast.Call) -> bool:
    called = (dotted(call.func) or "").rpartition(".")[2]
    if called in _CONTAINERS:
        return all(map(without_graph, call.args)) and all(without_graph(keyword.value) for keyword in call.keywords)
    if any(keyword.arg in (None, "requires_grad", "out") for keyword in call.keywords):
        return False
    if isinstance(call.func, ast.Attribute):
        if call.func.attr in _MAKERS_BY or (call.func.attr in _MAKERS and isinstance(call.func.value, ast.Name)):
            return True
        return call.func.attr in _CARRYING and without_graph(call.func.value)
    return False


def stores_through_names(tree: ast.AST, name: str) -> list[ast.stmt]:
    """Statements that fill a part of the container `name` by a local name: `rows = self.rows[k]`, then `rows[i] = x`."""
    found: dict[ast.stmt, None] = {}
    for function in ast.walk(tree):
        if not isinstance(function, FUNCTIONS) or isinstance(function, ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _is_part_of(node.value, name):
                for local in targets_of(node):
                    if isinstance(local, ast.Name):
                        found.update(dict.fromkeys(stores_into(function, local.id)))
            elif isinstance(node, (ast.For, ast.AsyncFor)) and _is_part_of(node.iter, name):
                for inner in ast.walk(node.target):
                    if isinstance(inner, ast.Name):
                        found.update(dict.fromkeys(stores_into(node, inner.id)))
    return sorted(found, key=lambda statement: statement.lineno)


def _is_part_of(value: ast.expr, name: str) -> bool:
    """Whether an expression is the container itself, an item of it, or all of its items."""
    while True:
        if dotted(value) == name:
            return True
        if isinstance(value, ast.Subscript):
            value = value.value
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in {*_PARTS, "values", "items"}:
            value = value.func.value
        elif (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id in ("enumerate", "list", "zip")
            and value.args
        ):
            value = value.args[0]
        else:
            return False


def puts_result_of(value: ast.expr | None, op: str) -> bool:
    """Whether what is stored is, as it is written, the result of this op: `x.abs() + eps` of `add`, `bank.append(a.exp())` of `exp`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in STORING_METHODS and value.args:
        value = value.args[-1]
    if isinstance(value, ast.BinOp):
        return OPERATOR_OPS.get(type(value.op)) == op
    called = value.func if isinstance(value, ast.Call) else None
    return (called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else None) == op


def is_run_by_a_hook(source: Source, function: ast.AST) -> bool:
    """Whether a module's hook runs this function: registered itself, or made by what is called there. No line calls it then, and each
    forward pass runs it."""
    inside = [above for above in source.ancestors(function) if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = {getattr(each, "name", "") for each in (function, *inside)}
    for node in ast.walk(source.tree) if source.tree is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _REGISTERING.fullmatch(node.func.attr):
            for argument in node.args[:1]:
                parts = [argument.func, *argument.args] if isinstance(argument, ast.Call) else [argument]  # partial(self.capture, name)
                if any((dotted(part) or "").rpartition(".")[2] in names for part in parts):
                    return True
    return False


def built_with(source: Source, kind: type, field: str) -> list[ast.stmt]:
    """Statements that build a record with something for one of its fields: `State(h, c)`, `replace(self, h=h)`, `state._replace(h=h)`."""
    fields = [*(name for name, _ in pairs(in_class(kind, "__dataclass_fields__"))), *elements(in_class(kind, "_fields"))]
    if field not in fields:
        return []
    found: dict[ast.stmt, None] = {}
    for node in ast.walk(source.tree) if source.tree is not None else ():
        if not isinstance(node, ast.Call):
            continue
        called = (dotted(node.func) or "").rpartition(".")[2]
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in (kind.__name__, "cls"):
            given |= dict(zip(fields, node.args, strict=False))
        elif called not in ("replace", "_replace") or not set(given) <= {*fields, None}:
            continue
        statement = source.statement(node)
        if field in given and statement is not None and not without_graph(given[field]):
            found.setdefault(statement)
    return sorted(found, key=lambda statement: statement.lineno)
