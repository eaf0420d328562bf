"""From a call site to source: which expression, assigned to what, inside which blocks.

Used only when a diagnosis is being made. Nothing here raises over missing source (exec'd code), a file edited since it was
imported, or a notebook cell: what is not known is None or empty, and `line` alone is right in any case.
"""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

from gradguard.analysis.places.instructions import NOWHERE, exact_range, function_def, line_of, locate, scope_of
from gradguard.analysis.program import bindings
from gradguard.analysis.program.bindings import assignments_to, dotted, names_read, uses_of
from gradguard.analysis.program.syntax import (
    FUNCTIONS,
    Function,
    Range,
    Source,
    header_range,
    load,
    module_ast,
    parent_of,
    range_of,
    segment,
    span_of,
)
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Role, SourceSpan
from gradguard.core.foreign_exceptions import internal_error

__all__ = [
    "ResolvedSite", "WithBlock", "assignments_to", "at_line", "dotted", "from_frame", "from_traceback", "function_def", "module_ast",
    "parent_of", "resolve", "segment", "span_of", "uses_of",
]  # fmt: skip

Loop = ast.For | ast.AsyncFor | ast.While


class WithBlock(NamedTuple):
    """A `with` block around a place, or a decorator on its function: `torch.no_grad()`, and where that is written."""

    text: str
    line: int
    span: SourceSpan
    node: ast.expr


@dataclass(eq=False)
class ResolvedSite:
    """A place in the user's source. Lines are 1-based, columns 0-based character offsets (`end_column` exclusive)."""

    file: str
    line: int
    end_line: int
    column: int | None = None
    end_column: int | None = None
    function: str = "<module>"
    """Qualified name of the enclosing function (a comprehension's is that of the function around it)."""
    node: ast.AST | None = None
    """The exact expression; for `x[i] = v`, `x.a = v` and `x += v` the statement; None when only the statement is known."""
    statement: ast.stmt | None = None
    text: str | None = None
    """The expression as written; the statement (or its header) when only that is known; None without source."""
    source: Source | None = field(default=None, repr=False)
    target: ast.expr | None = field(default=None, repr=False)
    """The one target stored to, when the site is a store into one of several."""

    @property
    def exact(self) -> bool:
        """Whether the columns mark the very expression that was executing."""
        return self.node is not None

    def span(self, label: str | None = None, role: Role = "context") -> SourceSpan:
        """The expression as a span."""
        return SourceSpan(
            file=self.file, line=self.line, end_line=self.end_line, column=self.column, end_column=self.end_column,
            function=self.function, text=self.text, label=label, role=role,
        )  # fmt: skip

    def statement_span(self, label: str | None = None, role: Role = "context") -> SourceSpan:
        """The whole statement (of a compound one, its header) as a span; the expression's span when the statement is not known."""
        if self.statement is None or self.source is None:
            return self.span(label, role)
        return self.source.span(header_range(self.statement), label, role, self.function)

    # --- what is done ---

    @cached_property
    def targets(self) -> list[str]:
        """What the value goes to (`h`, `self.state`, `a[i]`): tuples flattened, loop and `with` targets and walruses included.

        Empty for what is returned, for an argument of a bare call statement, and for an index inside a target.
        """
        if self.source is None or self.statement is None:
            return []
        node, statement, found = self.node or self.statement, self.statement, list[str]()
        child: ast.AST = node
        for above in self.source.ancestors(node) if node is not statement else ():
            if isinstance(above, ast.NamedExpr):
                found.append(above.target.id)
            if isinstance(above, (*FUNCTIONS, ast.Yield, ast.YieldFrom)):
                return found
            if above is statement:
                break
            child = above
        if isinstance(node, ast.NamedExpr):
            found.insert(0, node.target.id)
        return found + [self.source.flat(target) for target in self._statement_targets(statement, child)]

    def _statement_targets(self, statement: ast.stmt, child: ast.AST) -> list[ast.expr]:
        """The statement's targets that `child`, a direct child of it or itself, is assigned to."""
        if child is statement:
            return [self.target] if self.target is not None else bindings.targets_of(statement)
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            wanted = [item.optional_vars for item in statement.items if item is child and item.optional_vars is not None]
            return [single for target in wanted for single in bindings.flatten(target)]
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            return bindings.flatten(statement.target) if child is statement.iter else []
        if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or child is not statement.value:
            return []
        if isinstance(statement, ast.Assign) and isinstance(child, ast.Tuple) and self.node is not None and self.node is not child:
            found = []
            for target in statement.targets:
                if not isinstance(target, (ast.Tuple, ast.List)) or len(target.elts) != len(child.elts):
                    return bindings.targets_of(statement)
                for element, value in zip(target.elts, child.elts, strict=True):
                    if isinstance(element, ast.Starred) or isinstance(value, ast.Starred):
                        return bindings.targets_of(statement)
                    if value is self.node or (self.source is not None and value in self.source.ancestors(self.node)):
                        found += bindings.flatten(element)
            return found
        return bindings.targets_of(statement)

    @cached_property
    def returned(self) -> bool:
        """Whether the expression is, or is part of, what a `return`, a `yield` or a lambda gives back."""
        if self.source is None:
            return False
        node = self.node or self.statement
        for above in (node, *self.source.ancestors(node)) if node is not None else ():
            if isinstance(above, (ast.Return, ast.Yield, ast.YieldFrom)) or (isinstance(above, ast.Lambda) and above is not node):
                return True
            if isinstance(above, ast.stmt):
                return isinstance(above, ast.Expr) and self.node is None and isinstance(above.value, (ast.Yield, ast.YieldFrom))
        return False

    @property
    def call(self) -> ast.Call | None:
        """The call, when the expression is one."""
        return self.node if isinstance(self.node, ast.Call) else None

    @cached_property
    def callee(self) -> str | None:
        """What is called, as written: `F.relu`, `model`, `loss.backward`."""
        return None if self.call is None or self.source is None else self.source.flat(self.call.func)

    @cached_property
    def callee_full_name(self) -> str | None:
        """The same with imports followed: `torch.nn.functional.relu` for `F.relu`."""
        name = None if self.call is None else dotted(self.call.func)
        return None if name is None or self.source is None else bindings.full_name(self.source, name)

    @cached_property
    def arguments(self) -> list[str]:
        """The call's arguments as written, `name=value` included."""
        if self.call is None or self.source is None:
            return []
        return [self.source.flat(item) for item in bindings.call_arguments(self.call)]

    @cached_property
    def keywords(self) -> dict[str, str]:
        """The call's keyword arguments: name to the value as written."""
        if self.call is None or self.source is None:
            return {}
        return {keyword.arg: self.source.flat(keyword.value) for keyword in self.call.keywords if keyword.arg is not None}

    @cached_property
    def receiver(self) -> str | None:
        """What is acted upon: `x` in `x.add_(1)`, `x[i] = v`, `x += 1`, `x.data`, `torch.relu_(x)` and `torch.add(a, b, out=x)`."""
        node = self._receiver_node
        return None if node is None or self.source is None else self.source.flat(node)

    @cached_property
    def _receiver_node(self) -> ast.expr | None:
        node = self.node
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            target = self.target or (node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and not isinstance(node, ast.AugAssign)):
                return target.value
            return target if isinstance(node, ast.AugAssign) else None
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return node.value
        if not isinstance(node, ast.Call):
            return None
        written_to = next((keyword.value for keyword in node.keywords if keyword.arg == "out"), None)
        if self._is_library_function(node):
            return written_to or (node.args[0] if node.args and not isinstance(node.args[0], ast.Starred) else None)
        return written_to or (node.func.value if isinstance(node.func, ast.Attribute) else None)

    def _is_library_function(self, node: ast.Call) -> bool:
        """Whether a library's function is called, by its module (`F.relu`) or imported by name, and not a method of some object."""
        if self.source is None:
            return False
        if isinstance(node.func, ast.Name):
            return node.func.id in self.source.imports and self.source.imports[node.func.id].startswith(("torch.", "numpy."))
        name = dotted(node.func)
        return name is not None and bindings.library_module(self.source, name)

    @cached_property
    def inner_names(self) -> list[str]:
        """Names and dotted attributes that the expression reads, in source order, each once (see `bindings.names_read`)."""
        return [] if self.source is None or self.node is None else names_read(self.source, [self.node])

    @cached_property
    def statement_names(self) -> list[str]:
        """The same for the whole statement's right-hand side."""
        return [] if self.source is None or self.statement is None else bindings.statement_names(self.source, self.statement)

    # --- what stands around it ---

    def _around(self) -> list[tuple[ast.AST, ast.AST]]:
        """Pairs (node, its parent) from the expression outwards, up to and with the enclosing function."""
        node = self.node or self.statement
        pairs: list[tuple[ast.AST, ast.AST]] = []
        if self.source is None or node is None:
            return pairs
        for above in self.source.ancestors(node):
            pairs.append((node, above))
            if isinstance(above, FUNCTIONS) and not self._in_header(node, above):
                break
            node = above
        return pairs

    @staticmethod
    def _in_header(child: ast.AST, function: Function) -> bool:
        """Whether the child is a decorator, a default or an annotation, evaluated outside the function."""
        return child is not function.body if isinstance(function, ast.Lambda) else child not in function.body

    def enclosing_withs(self) -> list[WithBlock]:
        """The `with` items around the place, innermost first, within the same function."""
        found: list[WithBlock] = []
        for child, above in self._around():
            if isinstance(above, (ast.With, ast.AsyncWith)):
                before = above.items[: above.items.index(child)] if isinstance(child, ast.withitem) else above.items
                found += [self._block(item.context_expr) for item in reversed(before)]
        return found

    def decorators(self) -> list[WithBlock]:
        """The decorators of the enclosing function, in source order."""
        function = self.enclosing_function
        return [] if function is None or isinstance(function, ast.Lambda) else [self._block(node) for node in function.decorator_list]

    def _block(self, node: ast.expr) -> WithBlock:
        assert self.source is not None  # without source there are no nodes
        place = range_of(node) or (node.lineno, node.col_offset, node.lineno, node.col_offset)
        return WithBlock(self.source.flat(node), node.lineno, self.source.span(place, function=self.function), node)

    @cached_property
    def enclosing_function(self) -> Function | None:
        """The function or lambda whose code the place is in."""
        pairs = self._around()
        last = pairs[-1] if pairs else None
        if last is None or not isinstance(last[1], FUNCTIONS) or self._in_header(last[0], last[1]):
            return None
        return last[1]

    @cached_property
    def enclosing_class(self) -> ast.ClassDef | None:
        """The innermost class around the place."""
        node = self.node or self.statement
        above = self.source.ancestors(node) if self.source is not None and node is not None else ()
        return next((item for item in above if isinstance(item, ast.ClassDef)), None)

    @cached_property
    def enclosing_loops(self) -> list[Loop]:
        """The loops that run the place again and again, innermost first, within the same function."""
        found: list[Loop] = []
        for child, above in self._around():
            if isinstance(above, (ast.For, ast.AsyncFor, ast.While)):
                repeated = [*above.body, above.test if isinstance(above, ast.While) else above.target]
                if child in repeated:
                    found.append(above)
        return found

    @cached_property
    def is_conditional(self) -> bool:
        """Whether the place runs only under some condition of its function: an `if` or `match` branch, a handler, a short circuit."""
        for child, above in self._around():
            if isinstance(above, (ast.If, ast.IfExp)) and child is not above.test:
                return True
            if isinstance(above, (ast.ExceptHandler, ast.match_case)) or (isinstance(above, ast.BoolOp) and child is not above.values[0]):
                return True
        return False


def resolve(site: CallSite | None) -> ResolvedSite | None:
    """The source of a call site; None only when there is no call site. Never raises."""
    if site is None:
        return None
    code, lasti = site
    try:
        return _resolve(code, lasti)
    except internal_error():  # a diagnosis must not fail over odd code objects: the line is still worth saying
        return _line_only(code, lasti, None)


def _resolve(code: CodeType, lasti: int) -> ResolvedSite:
    source = load(code.co_filename)
    found = NOWHERE if source is None else locate(source, code, lasti)
    if source is None or found.place is None:
        return _line_only(code, lasti, source)
    function = _function_name(code, source)
    return _site(source, found.place, function, found.node, found.statement, found.target)


def _site(
    source: Source, place: Range, function: str, node: ast.AST | None, statement: ast.stmt | None, target: ast.expr | None = None
) -> ResolvedSite:
    first, start, last, end = place
    return ResolvedSite(
        source.filename, first, last, source.characters(first, start), source.characters(last, end), function, node, statement,
        source.text(place), source, target,
    )  # fmt: skip


def _line_only(code: CodeType, lasti: int, source: Source | None) -> ResolvedSite:
    place = exact_range(code, lasti) if 0 <= lasti < len(code.co_code) else None
    line = place[0] if place else line_of(code, lasti)
    return ResolvedSite(file=code.co_filename, line=line, end_line=line, function=_function_name(code, source))


def _function_name(code: CodeType, source: Source | None) -> str:
    name = getattr(code, "co_qualname", None)  # Python 3.11
    if name is None:
        scope = None if source is None else scope_of(source, code)
        name = code.co_name if source is None or scope is None else source.qualname(scope)
    parts = str(name).split(".")
    while parts and parts[-1] in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<locals>"):
        parts.pop()
    name = ".".join(parts)
    return "<module>" if not name or name.startswith("<cell line") else name


def from_frame(frame: FrameType) -> ResolvedSite | None:
    """The source of what a frame is executing."""
    linecache.lazycache(frame.f_code.co_filename, frame.f_globals)  # code imported from a zip has its text with its loader
    return resolve(CallSite(frame.f_code, frame.f_lasti))


def from_traceback(tb: TracebackType) -> ResolvedSite | None:
    """The source of what raised, or passed on, the exception in this entry of a traceback."""
    linecache.lazycache(tb.tb_frame.f_code.co_filename, tb.tb_frame.f_globals)
    return resolve(CallSite(tb.tb_frame.f_code, tb.tb_lasti))


def at_line(filename: str, line: int) -> ResolvedSite | None:
    """The statement on a line (of a compound one, its header); None when the file has no such line or no statement there.

    `node` is the value of an expression, a `return` or a plain assignment, or the statement when it changes something in
    place; the columns are the statement's.
    """
    source = load(filename)
    if source is None or not 0 < line <= len(source.lines):
        return None
    statement = source.statement_at(line)
    if statement is None:
        return ResolvedSite(file=filename, line=line, end_line=line, source=source) if source.tree is None else None
    node: ast.AST | None = None
    if isinstance(statement, (ast.Expr, ast.Return, ast.Assign, ast.AnnAssign)):
        node = statement.value
    stored = any(isinstance(target, (ast.Subscript, ast.Attribute)) for target in bindings.targets_of(statement))
    if isinstance(statement, ast.AugAssign) or (node is not None and stored):
        node = statement
    return _site(source, header_range(statement), source.qualname_around(statement), node, statement)
