"""From an instruction of running code to the node of the syntax tree that it was compiled from.

Python 3.11 and later keep every instruction's exact range, and the node is the one with that range. Python 3.10 (and
`-X no_debug_ranges`) keeps lines only: there the n-th call among the instructions of a statement is the n-th call among
the statement's nodes in evaluation order, provided both counts agree; otherwise only the statement is known.

A wrong node is worse than none, so a node counts only when it lies in the code object's own function and every name in
it is known to the code object; both fail when the file was edited after it was imported.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import CodeType
from typing import NamedTuple

from gradguard.analysis.program.syntax import (
    COMPREHENSIONS,
    FUNCTIONS,
    Function,
    Range,
    Source,
    first_line,
    header_parts,
    header_range,
    load,
    range_of,
)

_COMPREHENSION_NAMES = {
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
    "<genexpr>": ast.GeneratorExp,
}
_ITERATION = ("GET_ITER", "FOR_ITER", "GET_AITER", "GET_ANEXT", "END_ASYNC_FOR", "SEND")
_LINES_ONLY = sys.version_info < (3, 11)


class Location(NamedTuple):
    """What is known of an instruction's place in the tree. `node` is None where only the statement is known."""

    node: ast.AST | None
    statement: ast.stmt | None
    place: Range | None
    target: ast.expr | None = None
    """The one target that the instruction stores to, when it is a store."""


NOWHERE = Location(None, None, None)


def locate(source: Source, code: CodeType, lasti: int) -> Location:
    """Where the instruction at byte offset `lasti` of `code` stands in the source; `NOWHERE` when the two do not fit together."""
    scope = scope_of(source, code)
    if scope is None:
        return NOWHERE
    lasti = _instruction(code, lasti)
    operation = _operation(code, lasti)
    place = exact_range(code, lasti)
    if place is None:
        return _by_line(source, scope, code, lasti, operation)
    found = _by_range(source, scope, place, operation, code, lasti)
    outside = isinstance(scope, COMPREHENSIONS) and found.node is scope.generators[0].iter  # evaluated by the code around
    if found.node is not None and not outside and not _names_fit(found.node, code):
        return NOWHERE
    return found


def _instruction(code: CodeType, lasti: int) -> int:
    """The instruction itself: a frame inside a call may point into the inline cache that follows the instruction."""
    lasti = min(max(lasti, 0), len(code.co_code) - 2)
    while not _LINES_ONLY and lasti > 0 and code.co_code[lasti] == 0:
        lasti -= 2
    return lasti


def _operation(code: CodeType, offset: int) -> str:
    """The operation's name; the in-place forms of BINARY_OP (arguments 13 to 25) are called INPLACE_OP."""
    name = dis.opname[code.co_code[offset]]
    return "INPLACE_OP" if name == "BINARY_OP" and 13 <= code.co_code[offset + 1] <= 25 else name


def exact_range(code: CodeType, lasti: int) -> Range | None:
    """The instruction's exact range; None on Python 3.10 and where none was recorded."""
    if sys.version_info >= (3, 11):
        for first, last, start, end in islice(code.co_positions(), lasti // 2, lasti // 2 + 1):
            if first is not None and last is not None and start is not None and end is not None:
                return (first, start, last, end)
    return None


def line_of(code: CodeType, lasti: int) -> int:
    """The line of the instruction, 1-based."""
    for start, end, line in code.co_lines():
        if start <= lasti < end and line is not None:
            return line
    return code.co_firstlineno


# --- the code object's own node ---


def scope_of(source: Source, code: CodeType) -> ast.AST | None:
    """The function, class, lambda, comprehension or module that was compiled to `code`; None when the text has no such thing there."""
    if code.co_name == "<module>" or code.co_name.startswith(("<cell line", "<generic parameters")):  # IPython names cells so
        return source.tree
    wanted = _COMPREHENSION_NAMES.get(code.co_name)
    fitting = []
    for node in source.scopes:
        if first_line(node) != code.co_firstlineno:
            continue
        if isinstance(node, ast.Lambda):
            fits = code.co_name == "<lambda>" and _arguments(node) == code.co_varnames[: len(_arguments(node))]
        elif isinstance(node, COMPREHENSIONS):
            fits = wanted is not None and isinstance(node, wanted)
        else:
            fits = getattr(node, "name", None) == code.co_name
        if fits:
            fitting.append(node)
    if len(fitting) > 1:
        places = [place for index in range(0, len(code.co_code), 2) if (place := exact_range(code, index)) is not None and place[3]]
        fitting = [node for node in fitting if all(_inside(place, node) for place in places)]
        if not places:
            fitting = [node for node in fitting if all(_names_fit(part, code) for part in _units(node, 0))]
        fitting.sort(key=lambda node: sum(1 for _ in source.ancestors(node)))  # of one lambda in another, the inner has the fewer places
        if len(fitting) > 1 and not all(fitting[0] in source.ancestors(node) for node in fitting[1:]):
            return None
        return fitting[-1] if fitting else None
    return fitting[0] if fitting else None


def _arguments(node: ast.Lambda) -> tuple[str, ...]:
    arguments = node.args
    return tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _inside(place: Range, node: ast.AST) -> bool:
    start = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
    end = (getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0))
    return start <= place[:2] and place[2:] <= end


def function_def(code: CodeType) -> Function | None:
    """The `def` or `lambda` that was compiled to `code` (for a comprehension's code, the function around it); None when not found."""
    source = load(code.co_filename)
    scope = None if source is None else scope_of(source, code)
    if source is None or scope is None:
        return None
    for node in (scope, *source.ancestors(scope)):
        if isinstance(node, ast.ClassDef):
            return None
        if isinstance(node, FUNCTIONS):
            return node
    return None


# --- by exact range ---


def _by_range(source: Source, scope: ast.AST, place: Range, operation: str, code: CodeType, lasti: int) -> Location:
    candidates = source.ranges.get(place, [])
    inside = [node for node in candidates if isinstance(scope, ast.Module) or node is scope or scope in source.ancestors(node)]
    expressions: list[ast.AST] = [node for node in inside if isinstance(node, ast.expr)]
    if operation.startswith(("STORE_", "DELETE_", "UNPACK_")) and expressions:
        return _store(source, expressions[0], operation)
    called = operation.startswith(("CALL", "PRECALL"))
    expressions.sort(key=lambda node: isinstance(node, ast.Call) != called)  # in a chain over lines `.f` and `.f(...)` may share a range
    if expressions:
        node = expressions[0]
        if operation in _ITERATION and isinstance(node, COMPREHENSIONS) and len(node.generators) == 1:
            node = node.generators[0].iter
        return _at(source, _formatted(node))
    statement = next((node for node in inside if isinstance(node, ast.stmt)), None)
    if statement is None:
        return NOWHERE
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        # until 3.11 entering and leaving a context manager carry the range of the whole statement
        entered = _ordinal(code, lasti, place) if operation.startswith("BEFORE_") else 0
        certain = len(statement.items) == 1 or operation.startswith("BEFORE_")
        if certain and entered < len(statement.items):
            return _at(source, statement.items[entered].context_expr)
    elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While, ast.If, ast.Match)):
        return _at(source, header_parts(statement)[0])
    elif isinstance(statement, (ast.Expr, ast.Return)) and statement.value is not None:
        return _at(source, statement.value)
    else:
        place = header_range(statement)
        return Location(statement if place == (statement.lineno, statement.col_offset, *place[2:]) else None, statement, place)
    return Location(None, statement, header_range(statement))


def _at(source: Source, node: ast.AST) -> Location:
    place = getattr(node, "lineno", 0), getattr(node, "col_offset", 0), getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
    if sys.version_info < (3, 12):
        string = next((above for above in source.ancestors(node) if isinstance(above, ast.JoinedStr)), None)
        if string is not None and not _text_is(source.text(place), node):  # positions inside f-strings could be off until 3.12
            place = string.lineno, string.col_offset, string.end_lineno or string.lineno, string.end_col_offset or 0
    return Location(node, source.statement(node), place)


def _text_is(text: str | None, node: ast.AST) -> bool:
    try:
        return text is not None and ast.dump(ast.parse(f"({text})", mode="eval").body) == ast.dump(node)
    except (SyntaxError, ValueError, RecursionError):
        return False


def _formatted(node: ast.AST) -> ast.AST:
    """The value that is formatted, where an f-string has only one."""
    if isinstance(node, ast.JoinedStr):
        values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
        return values[0].value if len(values) == 1 else node
    return node.value if isinstance(node, ast.FormattedValue) else node


def _store(source: Source, target: ast.AST, operation: str) -> Location:
    """A store is its whole statement's doing: `x[i] = v` is an Assign with the target `x[i]`."""
    single = target if isinstance(target, ast.expr) else None
    for above in source.ancestors(target):
        if isinstance(above, (ast.Assign, ast.AnnAssign)) and operation.startswith("UNPACK_") and above.value is not None:
            return _at(source, above.value)
        if isinstance(above, (ast.For, ast.AsyncFor)) and operation.startswith("UNPACK_"):
            return _at(source, above.iter)
        if isinstance(above, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            return _at(source, above)._replace(target=single)
        if not isinstance(above, (ast.Tuple, ast.List, ast.Starred)):
            break
    return _at(source, target)._replace(target=single)


def _ordinal(code: CodeType, lasti: int, place: Range) -> int:
    """How many instructions of the same operation and range come before this one."""
    return sum(1 for index in range(0, lasti, 2) if code.co_code[index] == code.co_code[lasti] and exact_range(code, index) == place)


# --- by line ---


def _by_line(source: Source, scope: ast.AST, code: CodeType, lasti: int, operation: str) -> Location:
    line = line_of(code, lasti)
    units = _units(scope, line)  # more than one where several statements share the line
    parts = [part for unit in units for part in (header_parts(unit) if isinstance(unit, ast.stmt) else [unit])]
    if not units or not all(_names_fit(part, code) for part in parts):
        return NOWHERE
    places = [header_range(unit) if isinstance(unit, ast.stmt) else range_of(unit) or (line, 0, line, 0) for unit in units]
    lines = range(min(place[0] for place in places), max(place[2] for place in places) + 1)
    family = "CALL" if operation.startswith("CALL") else operation
    same = [start for start in range(0, len(code.co_code), 2) if _operation(code, start).startswith(family)]
    same = [start for start in same if line_of(code, start) in lines]
    made = _made_by(operation)
    nodes = [node for part in parts for node in _evaluated(part) if made(node)]
    if operation.startswith(("SETUP_WITH", "BEFORE_WITH", "BEFORE_ASYNC_WITH")):
        nodes = [item.context_expr for unit in units if isinstance(unit, (ast.With, ast.AsyncWith)) for item in unit.items]
    elif operation == "GET_ITER":  # a loop's own comes after those of comprehensions in what it loops over
        own = [*nodes, *(unit.iter for unit in units if isinstance(unit, (ast.For, ast.AsyncFor)))]
        nodes = own if len(units) == 1 and not isinstance(scope, COMPREHENSIONS) else []
    if any(isinstance(unit, (ast.With, ast.AsyncWith)) for unit in units):
        same = same[: len(nodes)]  # the calls that leave the block stand on the same line
    if lasti in same and len(nodes) == len(same):
        node = nodes[same.index(lasti)]
        if operation.startswith(("STORE_", "UNPACK_")):
            return _store(source, node, operation)
        if operation == "GET_ITER" and isinstance(node, COMPREHENSIONS) and node is not getattr(units[0], "iter", None):
            node = node.generators[0].iter
        return _at(source, node)
    if len(units) > 1:
        return NOWHERE
    unit, place = units[0], places[0]
    if operation in _ITERATION and isinstance(unit, (ast.For, ast.AsyncFor)):
        return _at(source, unit.iter)
    if isinstance(unit, (ast.With, ast.AsyncWith)) and len(unit.items) == 1 and operation.startswith(("CALL", "WITH_")):
        return _at(source, unit.items[0].context_expr)
    return Location(None, source.statement(unit), place)


def _units(scope: ast.AST, line: int) -> list[ast.AST]:
    """The statements of the scope's own code that have the line in their own part (their header), in source order.

    Of a lambda or a comprehension: the expressions that run in its own code.
    """
    if isinstance(scope, ast.Lambda):
        return [scope.body]
    if isinstance(scope, COMPREHENSIONS):
        first, *others = scope.generators  # the first iterable is evaluated outside
        inner: list[ast.AST] = list(first.ifs)
        for generator in others:
            inner += [generator.iter, *generator.ifs]
        return inner + ([scope.key, scope.value] if isinstance(scope, ast.DictComp) else [scope.elt])
    found: list[ast.AST] = []
    pending: list[ast.AST] = list(getattr(scope, "body", []))
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            place = header_range(node)
            if place[0] <= line <= place[2]:
                found.append(node)
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.expr)):
            pending += ast.iter_child_nodes(node)
    return sorted(found, key=lambda node: range_of(node) or (0, 0, 0, 0))


_OPERATORS: dict[str, type[ast.AST]] = {
    "BINARY_ADD": ast.Add, "BINARY_SUBTRACT": ast.Sub, "BINARY_MULTIPLY": ast.Mult, "BINARY_MATRIX_MULTIPLY": ast.MatMult,
    "BINARY_TRUE_DIVIDE": ast.Div, "BINARY_FLOOR_DIVIDE": ast.FloorDiv, "BINARY_MODULO": ast.Mod, "BINARY_POWER": ast.Pow,
    "BINARY_AND": ast.BitAnd, "BINARY_OR": ast.BitOr, "BINARY_XOR": ast.BitXor, "BINARY_LSHIFT": ast.LShift, "BINARY_RSHIFT": ast.RShift,
    "UNARY_NEGATIVE": ast.USub, "UNARY_POSITIVE": ast.UAdd, "UNARY_INVERT": ast.Invert, "UNARY_NOT": ast.Not,
}  # fmt: skip


def _made_by(operation: str) -> Callable[[ast.AST], bool]:
    """Tells the nodes that make exactly one instruction of this operation each."""
    if operation.startswith("CALL"):
        return lambda node: isinstance(node, (ast.Call, *COMPREHENSIONS))
    if operation.startswith("INPLACE_"):
        return lambda node: isinstance(node, ast.AugAssign)
    if operation == "GET_ITER":
        return lambda node: isinstance(node, COMPREHENSIONS)
    if operation.startswith("UNPACK_"):
        return lambda node: isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Store)
    if operation in _OPERATORS:
        return lambda node: isinstance(getattr(node, "op", None), _OPERATORS[operation]) and isinstance(node, (ast.BinOp, ast.UnaryOp))
    kinds: dict[str, tuple[type[ast.AST], type[ast.AST]]] = {
        "STORE_SUBSCR": (ast.Subscript, ast.Store), "BINARY_SUBSCR": (ast.Subscript, ast.Load),
        "STORE_ATTR": (ast.Attribute, ast.Store), "LOAD_ATTR": (ast.Attribute, ast.Load),
    }  # fmt: skip
    if operation in kinds:
        kind, context = kinds[operation]
        return lambda node: isinstance(node, kind) and isinstance(getattr(node, "ctx", None), context)
    simple = {"COMPARE_OP": ast.Compare, "BINARY_OP": ast.BinOp}.get(operation)
    return lambda node: simple is not None and isinstance(node, simple)


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that one code object evaluates for a statement or expression, in the order in which it finishes them."""
    children: list[ast.AST]
    if isinstance(node, ast.Assign):
        children = [node.value, *node.targets]
    elif isinstance(node, ast.AnnAssign):
        children = [part for part in (node.value, node.target) if part is not None]
    elif isinstance(node, ast.Lambda):
        children = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
    elif isinstance(node, COMPREHENSIONS):
        children = [node.generators[0].iter]  # all else runs in the comprehension's own code
    elif isinstance(node, ast.Dict):
        children = [part for pair in zip(node.keys, node.values, strict=True) for part in pair if part is not None]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _evaluated(child)
    yield node


# --- does the text fit the code? ---


def _names_fit(node: ast.AST, code: CodeType) -> bool:
    """Whether every name that the node evaluates is known to the code object (a private one with its class's name before it)."""
    known = _known(code)
    return all(name in known or (name.startswith("__") and any(other.endswith(name) for other in known)) for name in _names(node))


def _known(code: CodeType) -> set[str]:
    known = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            known |= _known(constant)
    return known


def _names(node: ast.AST) -> Iterator[str]:
    """Identifiers that evaluating the node must mention; those that the compiler may fold away are left out."""
    if isinstance(node, ast.Name):
        if node.id != "__debug__":
            yield node.id
    elif isinstance(node, ast.AnnAssign):
        for part in (node.target, *([node.value] if node.value else [])):
            yield from _names(part)
        return
    elif isinstance(node, ast.Attribute):
        yield node.attr
    if isinstance(node, (ast.IfExp, ast.BoolOp)) and any(isinstance(child, ast.Constant) for child in ast.iter_child_nodes(node)):
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _names(child)
