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
from gradguard.analysis.program.syntax import FUNCTIONS, Source, range_of
from gradguard.core.diagnosis import Role, SourceSpan

VIEWS = frozenset(
    {
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "flatten",
        "unflatten",
        "ravel",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "t",
        "T",
        "mT",
        "H",
        "mH",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "expand",
        "expand_as",
        "broadcast_to",
        "narrow",
        "select",
        "diagonal",
        "unfold",
        "as_strided",
        "detach",
        "data",
        "real",
        "imag",
        "unbind",
        "chunk",
        "split",
        "tensor_split",
        "split_with_sizes",
        "hsplit",
        "vsplit",
        "dsplit",
        "contiguous",
        "view_as_real",
        "view_as_complex",
        "alias",
        "to",
        "float",
        "numpy",
        "cpu",
        "requires_grad_",
        "as_tensor",
        "from_numpy",
        "asarray",
        "broadcast_tensors",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "rearrange",
    }
)
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


def peel(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """The expression under views, in-place calls and subscripts, and the names of those, outermost first."""
    calls: list[str] = []
    while True:
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                library = isinstance(function.value, ast.Name) and function.value.id in ("torch", "np", "numpy", "einops", "F")
                if function.attr in VIEWS or _in_place(function.attr):
                    calls.append(function.attr)
                    if library:
                        if not node.args:
                            return node, calls
                        node = node.args[0]
                    else:
                        node = function.value
                    continue
            elif (
                isinstance(function, ast.Name)
                and function.id in ("rearrange", "from_numpy", "enumerate", "zip", "reversed", "iter", "list", "tuple")
                and node.args
            ):
                calls.append("for" if function.id in ("enumerate", "reversed", "iter", "list", "tuple", "zip") else function.id)
                node = node.args[0]
                continue
            return node, calls
        if isinstance(node, ast.Subscript):
            calls.append("[]")
            node = node.value
        elif isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "H", "mH", "data", "real", "imag"):
            calls.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Starred):
            node = node.value
        else:
            return node, calls


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and not name.startswith("_")


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
    node, scope = written_expression(place) if augmented is None else augmented.target, scope_node(place)
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
    name = None if node is None else dotted(node)
    if inner is None or name is None or scope is None:
        return None
    keyed = isinstance(inner.slice, ast.Constant) and isinstance(inner.slice.value, str)  # no tensor has such an index
    return inner if keyed or _is_list(scope, name, place) else None


def aliases(
    place: ResolvedSite | None, caller: ResolvedSite | None = None, by_module: bool = False, limit: int = 5, lives: Lives | None = None
) -> list[Alias]:
    """The chain from the written variable to the one whose memory it is; empty when it is no alias as far as the source shows.

    Args:
        lives: whether a variable of the function around a place is on the written memory, None where that is not known. What the
            source allows is refuted by it: an assignment in a branch that did not run is none.
    """
    if place is None or place.source is None:
        return []
    node = written_expression(place, by_module)
    if node is None:
        return []
    return aliases_of_name(place, dotted(peel(node)[0]), caller, limit, lives)


def aliases_of_name(
    place: ResolvedSite, name: str | None, caller: ResolvedSite | None = None, limit: int = 5, lives: Lives | None = None
) -> list[Alias]:
    """The same chain for a variable as it is at a place."""
    found: list[Alias] = []
    where: ResolvedSite | None = place
    while name is not None and where is not None and where.source is not None and len(found) < limit:
        link = _assigned(where, name, lives)
        if link is None and caller is not None and where is place:
            link = _passed(where, caller, name)
            if link is None:
                break
            where = caller
            if lives is not None and lives(link.base, caller) is False:
                break
        if link is None or any(link.base == known.name and where is not caller for known in found):
            break
        found.append(link)
        name = link.base
    return found


def _assigned(place: ResolvedSite, name: str, lives: Lives | None = None) -> Alias | None:
    """The assignment before the place that makes `name` a view of another variable; of two in branches the one that can have run."""
    source, scope = place.source, scope_node(place)
    if source is None or scope is None:
        return None
    before = [statement for statement in assignments_to(scope, name) if statement.lineno < place.line or _is_loop_around(statement, place)]
    while before:
        statement = before.pop()
        link = _link(place, source, scope, statement, name)
        rebound = link is not None and any(other.lineno > statement.lineno for other in assignments_to(scope, link.base))
        if link is None or lives is None or rebound or lives(link.base, place) is not False:
            return link
        if not _is_in_branch(source, statement, place):
            return None
    return None


def _is_in_branch(source: Source, statement: ast.stmt, place: ResolvedSite) -> bool:
    """Whether the statement stands under a condition that the place does not: another assignment may have come before it."""
    around = [] if place.statement is None else list(source.ancestors(place.statement))
    return any(isinstance(above, (ast.If, ast.Try, ast.Match)) and above not in around for above in source.ancestors(statement))


def _link(place: ResolvedSite, source: Source, scope: ast.AST, statement: ast.stmt, name: str) -> Alias | None:
    value, call = _value_for(statement, name)
    if value is None:
        return None
    base, calls = peel(value)
    base_name = dotted(base)
    if base_name is None or base_name == name or not (calls or call):
        return None
    if (call == "for" or calls == ["[]"]) and _is_list(scope, base_name, place):
        return None  # an item of a list, not a view of a tensor
    shown = _span(source, value, place.function, None)
    return Alias(name, base_name, call or next((item for item in calls if item != "[]"), calls[0]), shown, source.flat(value))


def _is_list(scope: ast.AST, name: str, place: ResolvedSite) -> bool:
    """Whether a variable was last filled with a list, tuple, dict or comprehension written out."""
    return isinstance(
        getattr(_last_before(scope, name, place), "value", None),
        (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.Dict, ast.DictComp),
    )


def _last_before(scope: ast.AST, name: str, place: ResolvedSite) -> ast.stmt | None:
    """The last assignment to a variable that stands above a place."""
    return next((statement for statement in reversed(assignments_to(scope, name)) if statement.lineno < place.line), None)


def is_loop_target(place: ResolvedSite, name: str | None) -> bool:
    """Whether a variable is what a loop around the place runs with: an assignment to it reaches nothing else."""
    loops = [loop for loop in place.enclosing_loops if isinstance(loop, (ast.For, ast.AsyncFor))]
    return name is not None and any(name in [dotted(target) for target in flatten(loop.target)] for loop in loops)


def is_view(place: ResolvedSite, name: str | None) -> bool:
    """Whether a variable was last assigned a view of something, named or not."""
    scope = scope_node(place)
    if scope is None or name is None:
        return False
    statement = _last_before(scope, name, place)
    value = None if statement is None else _value_for(statement, name)[0]
    return value is not None and any(call != "data" for call in peel(value)[1])


def _is_loop_around(statement: ast.stmt, place: ResolvedSite) -> bool:
    return isinstance(statement, (ast.For, ast.AsyncFor)) and statement in place.enclosing_loops


def _value_for(statement: ast.stmt, name: str) -> tuple[ast.expr | None, str]:
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return iterated_by(statement, name), "for"
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        value = statement.value
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if (
                isinstance(target, (ast.Tuple, ast.List))
                and isinstance(value, (ast.Tuple, ast.List))
                and len(target.elts) == len(value.elts)
            ):
                for element, item in zip(target.elts, value.elts, strict=True):
                    if dotted(element) == name:
                        return item, ""
            elif isinstance(target, (ast.Tuple, ast.List)) and value is not None:
                called = value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else ""
                return (value, called) if called in MULTI else ((value, "for") if dotted(value) else (None, ""))
        return value, ""
    return None, ""


def iterated_by(loop: ast.For | ast.AsyncFor, name: str) -> ast.expr | None:
    """What a loop variable runs over: `scores` in `for i, row in enumerate(scores)`."""
    iterated, target = loop.iter, loop.target
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.args:
        if iterated.func.id == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            iterated, target = iterated.args[0], target.elts[1]
        if (
            isinstance(iterated, ast.Call)
            and isinstance(iterated.func, ast.Name)
            and iterated.func.id == "zip"
            and isinstance(target, ast.Tuple)
        ):
            for element, argument in zip(target.elts, iterated.args, strict=False):
                if name in [dotted(single) for single in flatten(element)]:
                    return argument
            return None
    return iterated


def parameters_of(function: ast.AST | None) -> list[str]:
    """A function's parameter names in order (positional ones first)."""
    if not isinstance(function, FUNCTIONS):
        return []
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def argument_for(call: ast.Call, function: ast.AST | None, name: str) -> ast.expr | None:
    """What a call passes for a parameter of the function."""
    by_name = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if by_name is not None:
        return by_name
    names = parameters_of(function)
    if name not in names or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    position = names.index(name)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "apply":
        # a Function's forward gets its context first, unless it has a `setup_context`
        position -= len(names) == len(call.args) + 1 or names[0] == "ctx"
    elif names[0] in ("self", "cls"):
        position -= 1
    return call.args[position] if 0 <= position < len(call.args) else None


def _passed(place: ResolvedSite, caller: ResolvedSite, name: str) -> Alias | None:
    """The argument that the caller passed for the written parameter."""
    call = caller.call
    if call is None or caller.source is None:
        return None
    value = argument_for(call, place.enclosing_function, name)
    if value is None:
        return None
    base, calls = peel(value)
    base_name = dotted(base)
    if base_name is None:
        return None
    how = next((item for item in calls if item in ("detach", "data")), "argument")
    return Alias(name, base_name, how, _span(caller.source, value, caller.function, None), caller.source.flat(value))


def _span(source: Source, node: ast.expr, function: str, label: str | None, role: Role = "context") -> SourceSpan:
    place = range_of(node)
    assert place is not None  # expressions have one
    return source.span(place, label, role, function)
