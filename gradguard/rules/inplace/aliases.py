"""Which variable's memory a written expression is: views and aliases followed backwards through the source.

`flat = disp.view(-1)` then `flat[0] = 1` writes `disp`. Read from the syntax tree: an assignment before the write in the same
function, a loop over a tensor, or, in a helper, the argument that the caller passed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import assignments_to, dotted, flatten
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.index import Definition, program_of
from gradguard.analysis.program.memory import iterated, peel
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.core.diagnosis import SourceSpan

MULTI = frozenset({"unbind", "chunk", "split", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "dsplit"})
OVERLAPPING = frozenset({"expand", "expand_as", "broadcast_to", "broadcast_tensors", "as_strided", "unfold"})


Lives = Callable[[str, ResolvedSite], bool | None]


@dataclass
class Alias:
    """`name` is `base` seen through `call` (`view`, `detach`, `[]`, `for`, an argument)."""

    name: str
    base: str
    call: str
    span: SourceSpan
    text: str

    @property
    def word(self) -> str:
        """What `name` is to `base`."""
        if self.call == "argument":
            return f"`{self.base}` passed as `{self.name}`"
        if self.call in ("detach", "data"):
            return f"`{self.text}`, which shares the memory of `{self.base}`"
        return f"a view of `{self.base}`"


def scope_node(place: ResolvedSite) -> ast.AST | None:
    """The function around a place, or the module."""
    if place.source is None:
        return None
    return place.enclosing_function or place.source.tree


def written_expression(place: ResolvedSite, by_module: bool = False) -> ast.expr | None:
    """The expression that a write's place writes to: the receiver, the target, `out=`, or a module call's first argument."""
    node = place.node
    if by_module and isinstance(node, ast.Call):
        return node.args[0] if node.args else None
    if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute) and node.args and not isinstance(node.args[0], ast.Starred):
        return node.args[0]
    found = place._receiver_node
    if isinstance(node, ast.AugAssign) and found is not None:
        return found
    return found


def written_name(place: ResolvedSite | None, by_module: bool = False) -> str | None:
    """The variable that a write's place names: `flat` in `flat[mask] = 0`, `self.u` in `self.u.copy_(v)`."""
    if place is None:
        return None
    node = written_expression(place, by_module)
    return None if node is None else dotted(peel(node)[0])


def list_item(place: ResolvedSite | None) -> ast.Subscript | None:
    """The item of a list or dict, as far as the source shows, that a place writes into: `rows[i]` of `rows[i][0] = x`."""
    if place is None or place.source is None:
        return None
    augmented = place.node if isinstance(place.node, ast.AugAssign) else None
    node = written_expression(place) if augmented is None else augmented.target
    inner = None
    while isinstance(node, (ast.Subscript, ast.Call, ast.Attribute)):
        if isinstance(node, ast.Subscript):
            inner = node
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            inner, node = None, node.func.value
        elif isinstance(node, ast.Attribute) and dotted(node) is None:
            inner, node = None, node.value
        else:
            break
    if inner is None or node is None or dotted(node) is None:
        return None
    keyed = isinstance(inner.slice, ast.Constant) and isinstance(inner.slice.value, str)  # no tensor has such an index
    return inner if keyed or _is_list(place, node) else None


def aliases(
    place: ResolvedSite | None, caller: ResolvedSite | None = None, by_module: bool = False, limit: int = 5, lives: Lives | None = None
) -> list[Alias]:
    """The chain from the written variable to the one whose memory it is; empty when it is no alias as far as the source shows.

    Args:
        lives: whether a variable of the function around a place is on the written memory, None where that is not known. What the
            source allows is refuted by it: an assignment in a branch that did not run is none.
    """
    node = None if place is None else written_expression(place, by_module)
    return [] if place is None or node is None else _chain(place, peel(node)[0], caller, limit, lives)


def aliases_of_name(place: ResolvedSite, name: str) -> list[Alias]:
    """The same chain for a variable that a place's statement reads."""
    read = _mention(place, name)
    return [] if read is None else _chain(place, read, None, 5, None)


def _mention(place: ResolvedSite, name: str | None) -> ast.expr | None:
    return next((node for node in inside(place.statement, ast.Name, ast.Attribute) if dotted(node) == name), None)


def _chain(place: ResolvedSite, read: ast.expr, caller: ResolvedSite | None, limit: int, lives: Lives | None) -> list[Alias]:
    found: list[Alias] = []
    where = place
    while (name := dotted(read)) is not None and len(found) < limit:
        step = _assigned(where, read, lives)
        if step is None and caller is not None and where is place:
            step, where = _passed(where, caller, name), caller
            if step is None or (lives is not None and lives(step[0].base, caller) is False):
                break
        if step is None or any(step[0].base == known.name and where is not caller for known in found):
            break
        found.append(step[0])
        read = step[1]
    return found


def _assigned(place: ResolvedSite, read: ast.expr, lives: Lives | None) -> tuple[Alias, ast.expr] | None:
    """What makes a variable a view of another one where it is read, and that other; of several that can reach the read, the last whose
    memory fits."""
    for statement, value, call in _bindings(place, read):
        base, calls = (None, list[str]()) if value is None else peel(value)
        name, base_name = dotted(read), None if base is None else dotted(base)
        if place.source is None or value is None or base is None or base_name in (None, name) or not (calls or call):
            return None
        if (call == "for" or calls == ["[]"]) and _is_list(place, base):
            return None  # an item of a list, not a view of a tensor
        how = call or next((item for item in calls if item != "[]"), calls[0] if calls else "")
        link = Alias(name or "", base_name or "", how, place.source.span_of(value), place.source.flat(value))
        scope = scope_node(place)
        rebound = scope is not None and any(other.lineno > statement.lineno for other in assignments_to(scope, link.base))
        if lives is None or rebound or lives(link.base, place) is not False:
            return link, base
    return None


def _bindings(place: ResolvedSite, read: ast.expr) -> list[tuple[ast.stmt, ast.expr | None, str]]:
    """What can have given a variable its value where it is read, the last first: the statement, the value, and how that goes to the
    variable (`for`, `chunk`). In-place operators leave a variable its memory, and are looked through."""
    program = program_of(place.source)
    if program is None:
        return []
    if isinstance(read, ast.Attribute):
        writes = [each for each in program.writes(read.attr) if each.owner is not None and dotted(each.owner) == dotted(read.value)]
        own = [each for each in writes if program.function(each.node) is place.enclosing_function and each.node.lineno < place.line]
        return [(each.node, each.value, "") for each in reversed(own) if isinstance(each.node, ast.stmt)]
    found: dict[Definition, tuple[ast.stmt, ast.expr | None, str]] = {}
    pending = list(program.reaching(read))
    for definition in pending:  # grows while it is read
        statement = program.source.statement(definition.node)
        if definition.kind == "augmented" and isinstance(definition.node, ast.Name):
            pending += [each for each in program.reaching(definition.node) if each not in pending]
        elif definition.kind in ("assign", "loop") and statement is not None:
            found[definition] = (statement, *_value_of(definition, statement))
    return sorted(found.values(), key=lambda each: (each[0].lineno <= place.line, each[0].lineno), reverse=True)


def _value_of(definition: Definition, statement: ast.stmt) -> tuple[ast.expr | None, str]:
    value = definition.value
    if definition.kind == "loop":
        return iterated(statement, definition.name) if isinstance(statement, (ast.For, ast.AsyncFor)) else None, "for"
    if not definition.path or value is None:
        return value, ""
    if last_part(value) in MULTI:
        return value, last_part(value)
    return (value, "for") if dotted(value) else (None, "")


def _is_list(place: ResolvedSite, read: ast.expr) -> bool:
    """Whether a variable was last filled with a list, tuple, dict or comprehension written out."""
    shown = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.Dict, ast.DictComp)
    return any(isinstance(value, shown) for _, value, _ in _bindings(place, read)[:1])


def assigned_before(place: ResolvedSite, name: str) -> ast.Assign | ast.AnnAssign | ast.AugAssign | None:
    """The last assignment to a variable above a place, in the same function."""
    scope = scope_node(place)
    found = [each for each in assignments_to(scope, name) if each.lineno < place.line] if scope is not None else []
    return next((each for each in reversed(found) if isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign))), None)


def is_loop_target(place: ResolvedSite, name: str | None) -> bool:
    """Whether a variable is what a loop around the place runs with: an assignment to it reaches nothing else."""
    loops = [loop for loop in place.enclosing_loops if isinstance(loop, (ast.For, ast.AsyncFor))]
    return name is not None and any(name in [dotted(target) for target in flatten(loop.target)] for loop in loops)


def is_view(place: ResolvedSite, name: str | None) -> bool:
    """Whether a variable was last assigned a view of something, named or not."""
    read = _mention(place, name)
    values = [value for _, value, _ in _bindings(place, read)[:1]] if read is not None else []
    return any(call != "data" for value in values if value is not None for call in peel(value)[1])


def parameters_of(function: ast.AST | None) -> list[str]:
    """A function's parameter names in order (positional ones first)."""
    if not isinstance(function, FUNCTIONS):
        return []
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _passed(place: ResolvedSite, caller: ResolvedSite, name: str) -> tuple[Alias, ast.expr] | None:
    """The argument that the caller passed for the written parameter."""
    call, function, program = caller.call, place.enclosing_function, program_of(caller.source)
    value = None if call is None or function is None or program is None else program.given(call, function, name)
    if value is None or caller.source is None:
        return None
    base, calls = peel(value)
    base_name = dotted(base)
    if base_name is None:
        return None
    how = next((item for item in calls if item in ("detach", "data")), "argument")
    return Alias(name, base_name, how, caller.source.span_of(value), caller.source.flat(value)), base
