"""Places of the user's source that a protocol rule points at: where an attribute is set, a step stands, a flag is switched."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterable, Iterator

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, at_line, dotted
from gradguard.analysis.program.expressions import calls_inside, inside, is_constant
from gradguard.analysis.program.index import program_of, programs_of, writes_in
from gradguard.analysis.program.syntax import FUNCTIONS, Source, load
from gradguard.analysis.program.user_files import loaded_files, sources_of
from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import class_attributes, function_code
from gradguard.fixes.edits import replaced

NOT_CALLED = "names the method: without `()` nothing runs"
Loop = ast.For | ast.AsyncFor | ast.While
_MOST_FILES = 200


def in_tiers(incident: Incident) -> Iterator[list[Source]]:
    """The user's loaded files: those that take part, then every other imported module's.

    What a rule looks for counts where a tier has exactly one such place; of two, neither is known to be the one.
    """
    files = dict.fromkeys(source.filename for source in incident.sources)
    for call in reversed(incident.journal.backwards):  # the newest: earlier ones may be another program's in this thread
        if call.site is not None:
            files.setdefault(call.site.code.co_filename)
            break
    first = dict(files)
    yield sources_of(first)
    files.update(dict.fromkeys(loaded_files()))
    yield sources_of([file for file in files if file not in first][:_MOST_FILES])


def written_in(incident: Incident, has: Callable[[str], object]) -> list[Source]:
    """The user's loaded files whose text has something: asked of sound training before anything dear is looked at.

    No other file is parsed, and no module looked for among all objects alive, which takes a tenth of a second in a large process.
    """
    files = dict.fromkeys(view.frame.f_code.co_filename for view in incident.user_frames)
    files.update(dict.fromkeys(file for file in list(linecache.cache) if USER_FILES[file]))  # a notebook's cells
    files.update(dict.fromkeys(loaded_files()))
    return sources_of([file for file in files if has("".join(linecache.getlines(file)))])


def only_one(made: ResolvedSite | None, found: Iterable[tuple[Source, ast.stmt]]) -> tuple[str, int] | None:
    """File and line of the one statement, of those that do not run before the optimizer is made; of several, none is known to be it."""

    def before(source: Source, node: ast.stmt) -> bool:
        same = made is not None and made.file == source.filename and made.enclosing_function is function_around(source, node)
        return same and made is not None and node.lineno <= made.line

    places = {(source.filename, node.lineno) for source, node in found if not before(source, node)}
    return places.pop() if len(places) == 1 else None


def function_around(source: Source, node: ast.AST) -> ast.AST | None:
    """The function whose body a node stands in."""
    return next((above for above in source.ancestors(node) if isinstance(above, FUNCTIONS)), None)


def the_one(incident: Incident, find: Callable[[list[Source]], Iterable[tuple[Source, ast.stmt]]]) -> ResolvedSite | None:
    """The statement that a search finds in the nearest tier that has any; of several there, none is known to be it."""
    for sources in in_tiers(incident):
        places = {(source.filename, node.lineno) for source, node in find(sources)}
        if places:
            return at_line(*places.pop()) if len(places) == 1 else None
    return None


def class_node(kind: type) -> tuple[Source, ast.ClassDef] | None:
    """The source of a class of the user's."""
    for base in kind.__mro__:
        for value in class_attributes(base).values():
            code = function_code(value)
            if code is None or value.__qualname__.rpartition(".")[0] != base.__qualname__:
                continue
            if not USER_FILES[code.co_filename]:
                break
            source = load(code.co_filename)
            if source is None or source.tree is None:
                break
            for node in source.scopes:
                inside_it = node.lineno <= code.co_firstlineno <= (node.end_lineno or 0) if isinstance(node, ast.ClassDef) else False
                if isinstance(node, ast.ClassDef) and node.name == base.__name__ and inside_it:
                    return source, node
        if base is kind and base.__module__.startswith("torch."):
            return None
    return None


def attribute_set(kind: type, name: str) -> ResolvedSite | None:
    """Where a class sets `self.<name>`, the first of several."""
    return next(iter(attribute_sets(kind, name)), None)


def attribute_sets(kind: type, name: str) -> list[ResolvedSite]:
    """Every place of the class where `self.<name>` is set."""
    source, tree = class_node(kind) or (None, None)
    program = program_of(source)
    writes = program.writes(name) if program is not None else []
    lines = [
        write.node.lineno
        for write in writes
        if program is not None and tree is not None and write.owner is not None
        and dotted(write.owner) == "self" and program.source.stands_in(write.node, tree)
    ]  # fmt: skip
    return [place for line in lines if source is not None and (place := at_line(source.filename, line)) is not None]


def gradient_writes(sources: Iterable[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    """The statements that set a `.grad` to something."""
    for source, write in (each for name in ("grad", "_grad") for each in writes_in(sources, name)):
        statement = source.statement(write.node)
        if statement is not None and not isinstance(statement, ast.AugAssign) and not is_constant(write.value, None):
            yield source, statement


def bindings(sources: Iterable[Source], name: str, any_owner: bool = False) -> Iterator[tuple[Source, ast.stmt]]:
    """The statements that bind a variable, or an attribute by its dotted name (`self.net`).

    Args:
        any_owner: whether a name without an owner stands for attributes of that name as well.
    """
    owner, _, last = name.rpartition(".")
    for program in programs_of(sources):
        nodes: list[ast.AST] = [] if owner else [each.node for each in program.definitions(name) if each.kind in ("assign", "loop", "with")]
        if owner or any_owner:
            nodes += [each.node for each in program.writes(last) if any_owner or (each.owner is not None and dotted(each.owner) == owner)]
        for statement in map(program.source.statement, nodes):
            if statement is not None:
                yield program.source, statement


def calls_of(source: Source, method: str, receiver: str | None = None) -> list[ast.Call]:
    """Calls `<receiver>.<method>(...)` in a file, in source order."""
    assert source.tree is not None
    found = []
    for node in calls_inside(source.tree, method):
        if isinstance(node.func, ast.Attribute):
            name = dotted(node.func.value)
            if receiver is None or (name is not None and name.split(".")[-1] == receiver.split(".")[-1]):
                found.append(node)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def gate_of(source: Source, call: ast.AST) -> ast.If | None:
    """The innermost `if` of the same function that decides whether a call is made."""
    child = call
    for above in source.ancestors(call):
        if isinstance(above, ast.If) and child is not above.test:
            return above
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            return None
        child = above
    return None


def statement_span(source: Source, node: ast.AST, label: str) -> SourceSpan:
    """A node's place as the culprit."""
    return source.span_of(node, label, "culprit")


def bare_name(source: Source, scope: ast.AST, method: str, receiver: str | None = None) -> ast.Attribute | None:
    """The one statement that only names a method (`optimizer.step`, without a call)."""
    found = [
        node.value
        for node in inside(scope, ast.Expr)
        if isinstance(node.value, ast.Attribute)
        and node.value.attr == method
        and (receiver is None or (dotted(node.value.value) or "").rpartition(".")[2] == receiver.rpartition(".")[2])
    ]
    return found[0] if len(found) == 1 else None


def named_not_called(source: Source, scope: ast.AST, method: str, receiver: str | None = None) -> SourceSpan | None:
    """The same as the culprit."""
    found = bare_name(source, scope, method, receiver)
    return None if found is None else statement_span(source, found, NOT_CALLED)


def not_called(sources: Iterable[Source], method: str, receiver: str | None = None) -> tuple[SourceSpan, str | None] | None:
    """The one such statement of several files, and the diff that calls the method."""
    named = [(each, bare_name(each, each.tree, method, receiver)) for each in sources if each.tree is not None]
    found = [(each, node) for each, node in named if node is not None]
    span = statement_span(*found[0], NOT_CALLED) if len(found) == 1 else None
    if span is None:
        return None
    source, node = found[0]
    return span, replaced(source, [(node, f"{source.segment(node)}()")])


def names_in(node: ast.AST | None) -> list[str]:
    """Variables that an expression reads, plain names and last parts of dotted ones."""
    found = dict.fromkeys(name for each in inside(node, ast.Name, ast.Attribute) if (name := dotted(each)) is not None)
    return [name for name in found if not any(other.startswith(name + ".") for other in found)]
