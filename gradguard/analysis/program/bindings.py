"""Names in a syntax tree: which a statement binds, which an expression reads, where a name is bound and used."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator

from gradguard.analysis.program.syntax import COMPREHENSIONS, FUNCTIONS, Source, header_parts

_LIBRARIES = {"torch", "torchvision", "torchaudio", "numpy", "einops"} | set(sys.stdlib_module_names)


def dotted(node: ast.AST) -> str | None:
    """`self.memory` of a Name or of Attributes on a Name; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def flatten(target: ast.expr) -> list[ast.expr]:
    """The single targets of a target: the elements of tuples and lists, without stars."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [single for element in target.elts for single in flatten(element)]
    return flatten(target.value) if isinstance(target, ast.Starred) else [target]


def targets_of(statement: ast.stmt) -> list[ast.expr]:
    """Every single target a statement assigns to, in source order (`with` and `for` included; not walruses)."""
    if isinstance(statement, ast.Assign):
        found = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.For, ast.AsyncFor)):
        found = [statement.target]
    elif isinstance(statement, ast.AnnAssign):
        found = [statement.target] if statement.value is not None else []
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        found = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        found = []
    return [single for target in found for single in flatten(target)]


def call_arguments(call: ast.Call) -> list[ast.expr | ast.keyword]:
    """A call's arguments, positional and by name, in source order."""
    both: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    return sorted(both, key=lambda item: (item.lineno, item.col_offset))


def library_module(source: Source, name: str) -> bool:
    """Whether a dotted name starts at an imported module of PyTorch, numpy, the standard library and the like: no data of the user's."""
    full = source.imports.get(name.partition(".")[0])
    return full is not None and full.partition(".")[0] in _LIBRARIES and full in sys.modules


def full_name(source: Source, name: str) -> str:
    """The dotted name with its first part replaced by what the file's imports bind it to: `F.relu` is `torch.nn.functional.relu`."""
    first, dot, rest = name.partition(".")
    return source.imports.get(first, first) + dot + rest


def names_read(source: Source, nodes: list[ast.AST]) -> list[str]:
    """Names and dotted attributes read in the nodes, in source order, each once.

    Of a method call it is the receiver that is read (`h` in `h.detach()`), except on `self` (`self.cell` in `self.cell(h)`).
    Left out: called builtins, called imports and functions of the file, library modules, a comprehension's or a lambda's own
    variables.
    """
    found: dict[str, None] = {}

    def add(name: str, bound: frozenset[str]) -> None:
        if name.partition(".")[0] not in bound and not library_module(source, name):
            found.setdefault(name)

    def called(function: ast.expr, bound: frozenset[str]) -> None:
        name = dotted(function)
        if name is None:
            visit(function.value if isinstance(function, ast.Attribute) else function, bound)
        elif "." not in name:
            if name in bound or not (name in source.imports or name in source.defined or hasattr(builtins, name)):
                add(name, bound)
        else:
            receiver = name.rpartition(".")[0]
            if full_name(source, receiver) not in sys.modules or receiver.partition(".")[0] not in source.imports:
                add(name if receiver in ("self", "cls") else receiver, bound)

    def visit(node: ast.AST, bound: frozenset[str]) -> None:
        name = dotted(node)
        if name is not None:
            if not isinstance(getattr(node, "ctx", None), ast.Store):
                add(name, bound)
            elif isinstance(node, ast.Attribute):
                visit(node.value, bound)
        elif isinstance(node, ast.Call):
            called(node.func, bound)
            for argument in call_arguments(node):
                visit(argument, bound)
        elif isinstance(node, ast.Lambda):
            arguments = node.args
            for default in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
                visit(default, bound)
            visit(node.body, bound | {argument.arg for argument in ast.walk(arguments) if isinstance(argument, ast.arg)})
        elif isinstance(node, COMPREHENSIONS):
            inner = bound
            for generator in node.generators:
                visit(generator.iter, inner)
                inner = inner | {single.id for single in flatten(generator.target) if isinstance(single, ast.Name)}
                for condition in generator.ifs:
                    visit(condition, inner)
            for element in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                visit(element, inner)
        elif isinstance(node, ast.AugAssign):
            target = dotted(node.target)
            if target is not None:
                add(target, bound)
            else:
                visit(node.target, bound)
            visit(node.value, bound)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                visit(node.value, bound)
        elif isinstance(node, ast.Assign):
            visit(node.value, bound)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, bound)

    for node in nodes:
        try:
            visit(node, frozenset())
        except RecursionError:
            continue
    return list(found)


def statement_names(source: Source, statement: ast.stmt) -> list[str]:
    """The names that a statement's right-hand side (a compound statement's header) reads."""
    return names_read(source, header_parts(statement))


def _scope(node: ast.AST, plain: str | None) -> Iterator[ast.AST]:
    """The nodes of a scope in source order. For a plain name, inner functions are left out unless they declare or share it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if plain is not None and isinstance(child, (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)) and _has_own(child, plain):
            continue
        yield from _scope(child, plain)


def _has_own(scope: ast.AST, name: str) -> bool:
    """Whether an inner scope has a variable of its own by that name."""
    if isinstance(scope, FUNCTIONS) and any(isinstance(item, ast.arg) and item.arg == name for item in ast.walk(scope.args)):
        return True
    if isinstance(scope, COMPREHENSIONS):
        return any(isinstance(single, ast.Name) and single.id == name for part in scope.generators for single in flatten(part.target))
    body: list[ast.AST] = [scope.body] if isinstance(scope, ast.Lambda) else list(getattr(scope, "body", []))
    inner = [item for part in body for item in (part, *_scope(part, name))]
    if any(isinstance(item, (ast.Global, ast.Nonlocal)) and name in item.names for item in inner):
        return False
    return any(_binds(item, name) for item in inner)


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, ast.ExceptHandler):
        return node.name == name
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name.partition(".")[0]) == name for alias in node.names)
    if isinstance(node, ast.NamedExpr):
        return node.target.id == name
    return isinstance(node, ast.stmt) and any((dotted(target) or ast.unparse(target)) == name for target in targets_of(node))


def assignments_to(tree: ast.AST, name: str) -> list[ast.stmt]:
    """Statements that bind `name` (`h`, `self.h`; `h[0]` as written), in source order.

    A plain name is looked for in the scope given and in inner functions that declare it `global` or `nonlocal`; a dotted
    one everywhere below. A walrus counts as its statement.
    """
    found: dict[ast.stmt, None] = {}

    def walk(node: ast.AST, statement: ast.stmt | None, top: bool) -> None:
        if isinstance(node, ast.stmt):
            statement = node
        if not top and _binds(node, name) and statement is not None:
            found.setdefault(statement)
        if not top and plain and isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not _shares(node, name):
            return
        for child in ast.iter_child_nodes(node):
            walk(child, statement, False)

    plain = name.isidentifier()
    walk(tree, None, isinstance(tree, (ast.Module, *FUNCTIONS, ast.ClassDef)))
    return sorted(found, key=lambda statement: (statement.lineno, statement.col_offset))


def _shares(scope: ast.AST, name: str) -> bool:
    return any(isinstance(item, (ast.Global, ast.Nonlocal)) and name in item.names for item in ast.walk(scope))


def uses_of(tree: ast.AST, name: str) -> list[ast.expr]:
    """Expressions that read `name` (plain or dotted), in source order; inner scopes with a variable of their own by that name left out."""
    plain = name if name.isidentifier() else None
    found = [node for node in _scope(tree, plain) if isinstance(node, (ast.Name, ast.Attribute)) and dotted(node) == name]
    reads: list[ast.expr] = [node for node in found if isinstance(node.ctx, ast.Load)]
    return sorted(reads, key=lambda node: (node.lineno, node.col_offset))
