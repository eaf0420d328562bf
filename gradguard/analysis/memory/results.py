"""What the call that could not allocate would have made: its operands' shapes, and that of its result."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from math import prod

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.live.tensor_expressions import Evaluator, shape_only
from gradguard.analysis.memory.allocations import Allocation
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.expressions import given
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import attributes

_PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum"})
_ATTENTION = "multi_head_attention_forward"


@dataclass(frozen=True)
class Operand:
    """One tensor of the call: its shape, and what the program calls it, where the call stands in the program."""

    shape: tuple[int, ...]
    text: str | None = None
    node: ast.expr | None = None


@dataclass(frozen=True)
class Result:
    """What would have been made.

    Attributes:
        kind: "broadcast" of operands that are all smaller; "product" of matrices; "weights" of an attention module.
        shape: of the result.
        operands: those it is made of.
        place: the program's line.
    """

    kind: str
    shape: tuple[int, ...]
    operands: tuple[Operand, ...]
    place: ResolvedSite

    @property
    def column_and_row(self) -> tuple[int, int] | None:
        """The indices of the operands that are an [n, 1] and an [n], which are a table of all pairs together."""
        if self.kind != "broadcast" or len(self.operands) != 2:
            return None
        for column, row in ((0, 1), (1, 0)):
            tall, flat = self.operands[column].shape, self.operands[row].shape
            if len(tall) >= 2 and tall[-1] == 1 and flat and len(tall) == len(flat) + 1 and tall[:-1] == flat and tall[-2] > 1:
                return column, row
        return None

    @property
    def first_alone(self) -> bool:
        """Whether of two results that the call returns the second goes nowhere: to `_`, or only the first is taken."""
        source, statement, call = self.place.source, self.place.statement, self.place.call
        if source is None or call is None:
            return False
        around = source.parents.get(call)
        if isinstance(around, ast.Subscript) and isinstance(around.slice, ast.Constant):
            return around.slice.value == 0
        targets = self.place.targets
        return isinstance(statement, ast.Assign) and statement.value is call and len(targets) == 2 and targets[1].startswith("_")

    @property
    def is_square(self) -> bool:
        """Whether each position of a sequence meets every other."""
        return self.kind != "broadcast" and len(self.shape) >= 2 and self.shape[-1] == self.shape[-2] > 1


def result_of(incident: Incident, failed: Allocation) -> Result | None:
    """What the failed call would have made; None where it does not come out at what was asked for."""
    place = incident.place
    if place is None or not failed.asked:
        return None
    view = incident.user_frames[0]
    found = _traced(failed, place, view) if failed.call is not None else None
    return found or _of_attention(incident, failed, place) or _written(failed, place, view)


def _traced(failed: Allocation, place: ResolvedSite, view: FrameView) -> Result | None:
    call = failed.call
    assert call is not None
    made = _made(call.name, call.shapes, call.equation)
    if made is None:
        return None
    kind, shape = made
    if prod(shape) * call.itemsize != failed.asked:
        return None
    nodes = _operands(place, view, call.shapes)
    return Result(kind, shape, tuple(Operand(each, *nodes.get(i, (None, None))) for i, each in enumerate(call.shapes)), place)


def _made(name: str, shapes: tuple[tuple[int, ...], ...], equation: str | None) -> tuple[str, tuple[int, ...]] | None:
    """The kind and the shape of what a call makes."""
    on_meta = [torch.empty(each, device="meta") for each in shapes]
    try:
        if name in _PRODUCTS:
            function = getattr(torch, name.strip("_").removeprefix("r"))
            found = function(equation, *on_meta) if equation is not None else function(*on_meta)
            return "product", tuple(found.shape)
        shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except internal_error():
        return None
    return ("broadcast", shape) if all(prod(each) < prod(shape) for each in shapes) and len(shapes) > 1 else None


def _of_attention(incident: Incident, failed: Allocation, place: ResolvedSite) -> Result | None:
    """The weights of an attention module of torch's, by the variables of its function."""
    view = next((view for view in incident.all_frames if view.code_name == _ATTENTION and not view.is_user), None)
    if view is None:
        return None
    known = view.locals
    sizes = [known.get(name) for name in ("bsz", "num_heads", "tgt_len", "src_len")]
    query = known.get("query")
    if not all(type(each) is int for each in sizes) or not isinstance(query, torch.Tensor):
        return None
    batch, heads, target, source = (int(each) for each in sizes if each is not None)
    if batch * heads * target * source * query.element_size() != failed.asked:
        return None
    return Result("weights", (batch, heads, target, source), (Operand(tuple(query.shape)),), place)


def _written(failed: Allocation, place: ResolvedSite, view: FrameView) -> Result | None:
    """By the expression, where the shapes of all that it reads are known."""
    evaluator = Shapes(view)
    node = place.node
    if not isinstance(node, (ast.BinOp, ast.Call)):
        return None
    made = evaluator.of(node)
    parts = _parts(node)
    known = [(part, value) for part in parts for value in (evaluator.of(part),) if isinstance(value, torch.Tensor)]
    if not isinstance(made, torch.Tensor) or not known or made.numel() * made.element_size() != failed.asked:
        return None
    shapes = tuple(tuple(value.shape) for _, value in known)
    if any(prod(shape) >= made.numel() for shape in shapes):
        return None
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
    kind = "product" if is_product or (place.callee or "").rpartition(".")[2] in _PRODUCTS else "broadcast"
    if kind == "broadcast" and _made("", shapes, None) != (kind, tuple(made.shape)):
        return None
    operands = tuple(Operand(shape, _text(place, part), part) for shape, (part, _) in zip(shapes, known, strict=True))
    return Result(kind, tuple(made.shape), operands, place)


class Shapes(Evaluator):
    """The shapes of expressions in a frame; no values."""

    def __init__(self, view: FrameView) -> None:
        values = {name: _shape(value) for name, value in view.locals.items()}
        owner = view.locals.get("self")
        values |= {f"self.{name}": _shape(value) for name, value in attributes(owner).items() if isinstance(value, torch.Tensor)}
        super().__init__(values, {name: _shape(value) for name, value in view.globals.items()})


def _shape(value: object) -> object:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]
    return shape_only(value) if plain and isinstance(value, torch.Tensor) else value


def _parts(node: ast.expr) -> list[ast.expr]:
    """The operands, as written."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    assert isinstance(node, ast.Call)
    return [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *given(node)]


def _operands(place: ResolvedSite, view: FrameView, shapes: tuple[tuple[int, ...], ...]) -> dict[int, tuple[str | None, ast.expr]]:
    """The expressions of a call's tensors, by their number, as far as the line is that call and none has another shape."""
    node = place.node
    if not isinstance(node, (ast.BinOp, ast.Call)):
        return {}
    evaluator = Shapes(view)
    values = [(part, evaluator.of(part)) for part in _parts(node)]
    possible = [(part, value) for part, value in values if not isinstance(value, (str, int, float)) and not _is_module(part, view)]
    if len(possible) != len(shapes):
        return {}
    if any(isinstance(value, torch.Tensor) and tuple(value.shape) != shape for (_, value), shape in zip(possible, shapes, strict=True)):
        return {}
    return {i: (_text(place, part), part) for i, (part, _) in enumerate(possible)}


def _is_module(part: ast.expr, view: FrameView) -> bool:
    """`torch` and `F`, whose functions are called."""
    name = part.id if isinstance(part, ast.Name) else None
    value = view.locals.get(name, view.globals.get(name)) if name is not None else None
    return type(value).__name__ == "module"


def _text(place: ResolvedSite, part: ast.expr) -> str | None:
    return None if place.source is None else place.source.flat(part)
