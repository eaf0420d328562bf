"""Source text and syntax trees of files, and the questions that need nothing but a tree.

Text comes from `linecache`, so what was typed into a notebook or an interactive prompt is found as well. A tree is parsed
once for a given text. Nothing here raises over a missing, changed or broken file: the answer is None or empty.

Columns inside trees are UTF-8 byte offsets (as `ast` has them); columns given out are character offsets.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator

from gradguard.core.diagnosis import Role, SourceSpan

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# the ops that operators between tensors call, as graph nodes name them
OPERATOR_OPS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
if sys.version_info >= (3, 11):
    _TRY: tuple[type[ast.stmt], ...] = (ast.Try, ast.TryStar)
else:
    _TRY = (ast.Try,)
_COMPOUND: tuple[type[ast.stmt], ...] = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.AsyncFor),
    *(ast.While, ast.If, ast.With, ast.AsyncWith, ast.Match, *_TRY),
)
_CONVENTIONS = {
    "torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "optim": "torch.optim", "np": "numpy", "numpy": "numpy", "math": "math",
}  # fmt: skip
_MAX_FILES = 128  # a notebook makes a new "file" of every cell

Range = tuple[int, int, int, int]
"""First line, first column, last line, end column: lines 1-based, columns in UTF-8 bytes."""


class Source:
    """One text with its tree, each node's parent, and an index from exact ranges to nodes."""

    def __init__(self, filename: str, lines: list[str]) -> None:
        self.filename = filename
        self.lines = lines
        self.tree: ast.Module | None = None
        self.parents: dict[ast.AST, ast.AST] = {}
        self.ranges: dict[Range, list[ast.AST]] = {}
        self.scopes: list[ast.AST] = []
        """Every node that has a code object of its own (functions, lambdas, classes, comprehensions)."""
        self.imports: dict[str, str] = {}
        """Local name -> dotted name of what an import statement binds it to."""
        self.defined: set[str] = set()
        try:
            self.tree = ast.parse("".join(lines), filename)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
        self._index(self.tree)

    def _index(self, tree: ast.Module) -> None:
        bound: set[str] = set()
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)):  # shared between all trees
                    self.parents[child] = node
            place = range_of(node)
            if place is not None:
                self.ranges.setdefault(place, []).append(node)
                for alternative in _chained_ranges(node):
                    self.ranges.setdefault(alternative, []).append(node)
            if isinstance(node, (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)):
                self.scopes.append(node)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    self.imports[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for name, full in _CONVENTIONS.items():  # a notebook's imports stand in another cell
            if name not in bound and name not in self.defined:
                self.imports.setdefault(name, full)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The node's parents, innermost first."""
        current = self.parents.get(node)
        while current is not None:
            yield current
            current = self.parents.get(current)

    def stands_in(self, node: ast.AST, block: ast.AST) -> bool:
        """Whether a node is another one, or is in it."""
        return node is block or any(above is block for above in self.ancestors(node))

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The innermost statement the node is, or is in."""
        if isinstance(node, ast.stmt):
            return node
        return next((above for above in self.ancestors(node) if isinstance(above, ast.stmt)), None)

    def characters(self, line: int, byte: int) -> int:
        """The character offset of a byte offset into a line (1-based)."""
        if not 0 < line <= len(self.lines):
            return byte
        text = self.lines[line - 1]
        return byte if text.isascii() else len(text.encode("utf-8", "surrogatepass")[:byte].decode("utf-8", "ignore"))

    def text(self, place: Range) -> str | None:
        """The text of a range, as written; None when the range is not inside the text."""
        first, start, last, end = place
        if not 0 < first <= last <= len(self.lines):
            return None
        start, end = self.characters(first, start), self.characters(last, end)
        if first == last:
            return self.lines[first - 1][start:end] or None
        return "".join([self.lines[first - 1][start:], *self.lines[first : last - 1], self.lines[last - 1][:end]])

    def segment(self, node: ast.AST) -> str | None:
        """The node's text, as written."""
        place = range_of(node)
        return None if place is None else self.text(place)

    def flat(self, node: ast.AST) -> str:
        """The node's text on one line: as written where that is one line, else as `ast.unparse` writes it."""
        written = self.segment(node)
        if written is not None and "\n" not in written:
            return written
        try:
            return ast.unparse(node)
        except (ValueError, RecursionError, AttributeError):
            return " ".join((written or "").split())

    def span(self, place: Range, label: str | None = None, role: Role = "context", function: str | None = None) -> SourceSpan:
        """The range as a `SourceSpan`, columns in characters."""
        first, start, last, end = place
        return SourceSpan(
            file=self.filename, line=first, end_line=last, column=self.characters(first, start), end_column=self.characters(last, end),
            function=function, text=self.text(place), label=label, role=role,
        )  # fmt: skip

    def span_of(self, node: ast.AST, label: str | None = None, role: Role = "context") -> SourceSpan:
        """A node as a `SourceSpan`; of a compound statement, its header."""
        place = header_range(node) if isinstance(node, ast.stmt) else range_of(node)
        line = first_line(node) or 1
        return self.span(place or (line, 0, line, 0), label, role, self.qualname_around(node))

    def qualname(self, node: ast.AST) -> str:
        """The qualified name, as Python gives it, of the function, lambda or class body that the node is in."""
        parts: list[str] = []
        for above in (node, *self.ancestors(node)):
            if isinstance(above, FUNCTIONS):
                name = "<lambda>" if isinstance(above, ast.Lambda) else above.name
                parts = [name, "<locals>", *parts] if parts else [name]
            elif isinstance(above, ast.ClassDef):
                parts = [above.name, *parts]
        return ".".join(parts) or "<module>"

    def qualname_around(self, node: ast.AST) -> str:
        """The same, for what the node itself is written in (a `def` statement is not inside itself)."""
        return self.qualname(self.parents.get(node, node) if isinstance(node, (ast.stmt, ast.Lambda)) else node)

    def statement_at(self, line: int, within: ast.AST | None = None) -> ast.stmt | None:
        """The innermost statement that has this line; of several on one line, the first."""
        best: ast.stmt | None = None
        inside: list[ast.AST] = [within or self.tree or ast.Module([], [])]
        for node in inside:  # grows while it is read
            if isinstance(node, ast.stmt):
                if not first_line(node) <= line <= (node.end_lineno or node.lineno):
                    continue
                if best is None or _length(node) < _length(best) or best in self.ancestors(node):
                    best = node
            inside.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        if isinstance(best, _COMPOUND) and line > header_range(best)[2]:
            return None  # a blank line or a comment inside a block belongs to no statement
        return best


def range_of(node: ast.AST) -> Range | None:
    """The node's exact range; None for nodes that have none."""
    first, start = getattr(node, "lineno", None), getattr(node, "col_offset", None)
    last, end = getattr(node, "end_lineno", None), getattr(node, "end_col_offset", None)
    if first is None or start is None or last is None or end is None:
        return None
    return (first, start, last, end)


def _chained_ranges(node: ast.AST) -> list[Range]:
    """In a chain over several lines the compiler starts an attribute, and a call of it, at the attribute's own name."""
    attribute = node.func if isinstance(node, ast.Call) else node
    if not isinstance(attribute, ast.Attribute):
        return []
    whole, place = range_of(node), range_of(attribute)
    if whole is None or place is None or place[0] == place[2]:
        return []
    start = (place[2], place[3] - len(attribute.attr.encode()))
    return [(*start, whole[2], whole[3]), (*start, place[2], place[3])][: 1 if node is attribute else 2]


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - first_line(node)


def first_line(node: ast.AST) -> int:
    """The first line of a node, a decorator's where there is one; 0 for nodes that have none."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return decorators[0].lineno if decorators else getattr(node, "lineno", 0)


def header_parts(statement: ast.stmt) -> list[ast.AST]:
    """What a compound statement computes itself, without its body; a simple statement's all."""
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return [statement.iter]
    if isinstance(statement, (ast.While, ast.If)):
        return [statement.test]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [item.context_expr for item in statement.items]
    if isinstance(statement, ast.Match):
        return [statement.subject]
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [*statement.decorator_list, *statement.args.defaults, *(d for d in statement.args.kw_defaults if d is not None)]
    if isinstance(statement, ast.ClassDef):
        return [*statement.decorator_list, *statement.bases, *(keyword.value for keyword in statement.keywords)]
    return [] if isinstance(statement, _TRY) else [statement]


def header_range(statement: ast.stmt) -> Range:
    """A compound statement's range up to its colon (or near it); a simple statement's whole range."""
    first, start, last, end = range_of(statement) or (statement.lineno, statement.col_offset, statement.lineno, statement.col_offset + 1)
    if not isinstance(statement, _COMPOUND):
        return (first, start, last, end)
    parts = [part for part in header_parts(statement) if getattr(part, "lineno", 0) >= first]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        parts += [item.optional_vars for item in statement.items if item.optional_vars is not None]
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = statement.args
        parts += [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parts += filter(None, (arguments.vararg, arguments.kwarg, statement.returns))
    ends = [place[2:] for place in map(range_of, parts) if place is not None]
    if ends:
        return (first, start, *max(ends))
    named = len(getattr(statement, "name", "").encode())
    keyword = {ast.FunctionDef: 4, ast.AsyncFunctionDef: 10, ast.ClassDef: 6}.get(type(statement), 3 if isinstance(statement, _TRY) else 0)
    return (first, start, first, start + keyword + named)


_sources: dict[str, Source] = {}


def load(filename: str) -> Source | None:
    """The file's text and tree as they stand now; None when there is no text to be had."""
    lines = linecache.getlines(filename)
    linecache.checkcache(filename)  # a file edited since it was cached is read again
    lines = linecache.getlines(filename) or lines
    if not lines:
        return None
    known = _sources.get(filename)
    if known is not None and known.lines == lines:
        return known
    while len(_sources) >= _MAX_FILES:
        _sources.pop(next(iter(_sources)), None)
    source = _sources[filename] = Source(filename, list(lines))
    return source


def module_ast(filename: str) -> ast.Module | None:
    """The file's syntax tree, parsed once; None when the text is missing or is not Python."""
    source = load(filename)
    return None if source is None else source.tree


def parent_of(filename: str, node: ast.AST) -> ast.AST | None:
    """The parent of a node of `module_ast(filename)`."""
    source = load(filename)
    return None if source is None else source.parents.get(node)


def segment(filename: str, node: ast.AST) -> str | None:
    """The text of a node of that file, as written; None when the text is missing or the node has no place in it."""
    source = load(filename)
    return None if source is None else source.segment(node)


def span_of(filename: str, node: ast.AST, label: str | None = None, role: Role = "context", function: str | None = None) -> SourceSpan:
    """A node of that file as a span; of a compound statement, its header. `function` is worked out when it is not given."""
    place = header_range(node) if isinstance(node, ast.stmt) else range_of(node)
    source = load(filename)
    if place is None or source is None:
        line = place[0] if place else first_line(node) or 1
        last = place[2] if place else line
        return SourceSpan(file=filename, line=line, end_line=last, function=function, text=None, label=label, role=role)
    if function is None and (node in source.parents or node is source.tree):
        function = source.qualname_around(node)
    return source.span(place, label, role, function)
