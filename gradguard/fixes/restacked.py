"""Numbers taken out of tensors and put into a new one, `torch.tensor([x.item() for x in terms])`: two cuts, repaired together.

`torch.stack` of the tensors themselves keeps the graph of each. Python's `max` and `min` give back one of their operands, which may be the
number; the clamp of a tensor stays one.
"""

from __future__ import annotations

import ast
import copy
from typing import NamedTuple

from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted, full_name
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.syntax import Source
from gradguard.fixes.at_places import spelt
from gradguard.fixes.edits import replaced

_TENSORS = frozenset({"torch.tensor", "torch.as_tensor", "torch.asarray", "torch.Tensor", "torch.FloatTensor"})
_LISTS = (ast.List, ast.ListComp, ast.Tuple)
_ARITHMETIC = (ast.BinOp, ast.UnaryOp)
_BOUNDS = {"max": "min", "min": "max"}  # of a value, by the function that keeps to them


class Restacked(NamedTuple):
    """The repair of both cuts.

    Attributes:
        patch: None where the change is none that can be written without a doubt.
        stacked: whether `torch.stack` takes the place of the call that copies; else the value alone does.
    """

    patch: str | None
    stacked: bool


def restacked(place: ResolvedSite) -> Restacked | None:
    """The repair of an expression that takes a number out of a tensor, where the number goes into a new tensor; None where it does not."""
    source, node = place.source, place.node
    if source is None or not isinstance(node, ast.Call) or _taken(node) is None:
        return None
    element: ast.AST = node
    while isinstance(above := source.parents.get(element), _ARITHMETIC) or _bound(above) is not None:
        assert above is not None
        element = above
    held = source.parents.get(element)
    if isinstance(held, ast.Call) and element in held.args and _copies(source, held):
        text = _Kept(source, set()).text(element)
        return Restacked(None if text is None or not _is_plain(held) else replaced(source, [(held, text)]), False)
    whole = _container(source, element)
    call = None if whole is None else _copied_in(source, place, whole)
    if whole is None or call is None:
        return None
    return Restacked(_stack(source, whole if isinstance(whole, _LISTS) else element, call, set()), True)


def stacked(source: Source, call: ast.Call) -> str | None:
    """The diff for a call that copies a list of tensors, in which Python's `max` or `min` may choose a number."""
    whole = call.args[0] if call.args else None
    if not isinstance(whole, ast.ListComp) or not any(_bound(node) is not None for node in ast.walk(whole.elt)):
        return None
    names = {node.id for each in whole.generators for node in inside(each.target, ast.Name)}
    return _stack(source, whole, call, names)


def _stack(source: Source, part: ast.AST, call: ast.Call, names: set[str]) -> str | None:
    """The diff that keeps the graphs in a list, or in what is appended to it, and stacks them where they were copied."""
    if not _is_plain(call):
        return None
    kept = _Kept(source, names)
    if isinstance(part, (ast.List, ast.Tuple)) and not all(kept.carries(each) for each in part.elts):
        return None  # `torch.stack` takes no numbers
    text, library = kept.text(part), (dotted(call.func) or "").rpartition(".")[0]
    name = f"{library}.stack" if library else spelt(source, "torch.stack")
    if text is None or name is None:
        return None
    if call.args[0] is part:
        return replaced(source, [(call, f"{name}({text})")])
    return replaced(source, [(part, text), (call, f"{name}({source.segment(call.args[0])})")])


def _container(source: Source, element: ast.AST) -> ast.AST | None:
    """The list that an expression is an item of, or the name of the list that it is appended to."""
    held = source.parents.get(element)
    if isinstance(held, _LISTS) and (not isinstance(held, ast.ListComp) or held.elt is element):
        return held
    appends = isinstance(held, ast.Call) and isinstance(held.func, ast.Attribute) and held.func.attr == "append"
    return held.func.value if appends and isinstance(held, ast.Call) and isinstance(held.func, ast.Attribute) else None


def _copied_in(source: Source, place: ResolvedSite, whole: ast.AST) -> ast.Call | None:
    """The one call that copies a list into a tensor, where nothing else reads the list."""
    above = source.parents.get(whole)
    if isinstance(above, ast.Call) and whole in above.args and _copies(source, above):
        return above
    if isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(whole, _LISTS):
        whole = above.targets[0]
    if not isinstance(whole, ast.Name):
        return None
    scope = place.enclosing_function or source.tree
    reads = [each for each in inside(scope or whole, ast.Name) if each.id == whole.id and each is not whole]
    reads = [each for each in reads if isinstance(each.ctx, ast.Load)]
    call = source.parents.get(reads[0]) if len(reads) == 1 else None
    return call if isinstance(call, ast.Call) and call.args[:1] == reads and _copies(source, call) else None


def _copies(source: Source, call: ast.Call) -> bool:
    return full_name(source, dotted(call.func) or "") in _TENSORS


def _is_plain(call: ast.Call) -> bool:
    """Whether the copy has no argument but what the tensors have themselves: the device, and the default dtype."""
    moot = all(
        word.arg in ("requires_grad", "device") or (word.arg == "dtype" and (dotted(word.value) or "").endswith((".float", ".float32")))
        for word in call.keywords
    )
    return len(call.args) == 1 and moot


def _taken(node: ast.AST) -> ast.expr | None:
    """The tensor in `x.item()` or `float(x)`."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
        return node.func.value
    return node.args[0] if isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1 else None


def _bound(node: ast.AST | None) -> str | None:
    """What a call of Python's `max` or `min` of two values is to a tensor's `clamp`."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2 and not node.keywords
    return _BOUNDS.get(node.func.id) if named and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


class _Kept(ast.NodeTransformer):
    """Rewrites expressions so that tensors stay what they are; `names` are variables that are known for tensors."""

    def __init__(self, source: Source, names: set[str]) -> None:
        self._source = source
        self._names = names
        self._fails = False

    def text(self, node: ast.AST) -> str | None:
        """The expression as it should be; None where it holds a call that is no tensor's."""
        self._fails = False
        made = self.visit(copy.deepcopy(node))
        return None if self._fails else ast.unparse(made)

    def carries(self, node: ast.AST) -> bool:
        """Whether the value of an expression is computed from a tensor's."""
        return any(_taken(each) is not None or (isinstance(each, ast.Name) and each.id in self._names) for each in ast.walk(node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        taken, bound = _taken(node), _bound(node)
        if taken is not None:
            return taken
        if bound is None:
            self._fails = self._fails or any(map(self.carries, node.args))  # `math.log(x.item())`
            return node
        first, second = node.args
        sides = self.carries(first), self.carries(second)
        if not any(sides):
            return node
        if all(sides):
            name = spelt(self._source, "torch.maximum" if bound == "min" else "torch.minimum")
            self._fails = self._fails or name is None
            return ast.Call(ast.Name(name or "", ast.Load()), [self.visit(first), self.visit(second)], [])
        tensor, limit = (first, second) if sides[0] else (second, first)
        return ast.Call(ast.Attribute(self.visit(tensor), "clamp", ast.Load()), [], [ast.keyword(bound, limit)])
