"""Expressions over plain tensors and numbers, computed again from the values they read.

Nothing of the program's runs: only operations of torch on plain tensors and of Python on numbers are carried out, all of them in
`_METHODS`, `_FUNCTIONS` and the tables of operators below, none of which draws, writes or takes long. Where a value is not known its
shape may be: it stands as a tensor on the meta device, and what is computed from it gives a shape again. Everything else is UNKNOWN.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from gradguard.analysis.program.bindings import dotted
from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import quiet

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "<unknown>", "__bool__": lambda self: False})()
MOST_ELEMENTS = 2_000_000  # of a value that is computed with; of larger ones only the shape is

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_METHODS = frozenset(
    {
        *("abs", "add", "all", "amax", "amin", "any", "argmax", "argmin", "bool", "clamp", "clamp_max", "clamp_min", "clone"),
        *("contiguous", "cos", "cumsum", "detach", "diff", "dim", "div", "double", "eq", "exp", "expm1", "flatten", "float"),
        *("ge", "gt", "half", "index_select", "int", "isfinite", "isinf", "isnan", "item", "le", "log", "log1p", "log2", "log10"),
        *("log_softmax", "logical_and", "logical_not", "logical_or", "long", "lt", "masked_fill", "masked_select", "matmul"),
        *("max", "mean", "median", "min", "mm", "mul", "mv", "ndimension", "ne", "neg", "nelement", "new_zeros", "new_ones"),
        *("nonzero", "norm", "numel", "permute", "pow", "prod", "reciprocal", "relu", "reshape", "rsqrt", "select", "sigmoid"),
        *("sign", "sin", "size", "softmax", "sqrt", "square", "squeeze", "std", "sub", "sum", "t", "tanh", "tolist", "transpose"),
        *("true_divide", "type_as", "unbind", "unsqueeze", "var", "view", "view_as", "where"),
    }
)
_FUNCTIONS = frozenset(
    {
        *_METHODS,
        *("zeros_like", "ones_like", "empty_like", "full_like", "is_tensor", "linalg.vector_norm", "linalg.norm", "cat", "stack"),
    }
)
_ATTRIBUTES = frozenset({"shape", "T", "mT", "dtype", "device", "ndim", "requires_grad", "data"})
_BUILTINS: dict[str, Callable[..., Any]] = {
    "len": len,
    "int": int,
    "float": float,
    "bool": bool,
    "abs": abs,
    "min": min,
    "max": max,
    "tuple": tuple,
    "list": list,
}
_NUMBERS = (int, float, bool, complex)
_PLAIN = (*_NUMBERS, str, torch.dtype, torch.device, type(None), type(...))


class Evaluator:
    """Computes expressions from what their names are known to be.

    Args:
        values: the variables; attributes that are known by their dotted names, too.
        outer: what names mean that are no variables (a module's globals).
    """

    def __init__(self, values: Mapping[str, Any], outer: Mapping[str, Any] | None = None) -> None:
        self.values = values
        self.outer = outer or {}

    def of(self, node: ast.expr) -> Any:
        """The value of an expression; a meta tensor where only its shape is known; UNKNOWN."""
        try:
            with quiet(), torch.no_grad():
                return self._value(node)
        except internal_error():  # what cannot be computed: a shape that does not fit, a truth value of a meta tensor
            return UNKNOWN

    def _value(self, node: ast.expr) -> Any:
        found = self._computed(node)
        if isinstance(found, torch.Tensor):
            return known(found)
        return found

    def _operands(self, *nodes: ast.expr) -> list[Any]:
        found = [self._value(node) for node in nodes]
        if any(value is UNKNOWN for value in found):
            raise LookupError
        return _on_one_device(found)

    def _computed(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return _admitted(self.values[node.id] if node.id in self.values else self.outer.get(node.id, UNKNOWN))
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            return _admitted(self.values[name]) if name is not None and name in self.values else self._attribute(node)
        if isinstance(node, (ast.Tuple, ast.List)):
            items = [self._value(element) for element in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        if isinstance(node, ast.UnaryOp):
            (value,) = self._operands(node.operand)
            return _UNARY[type(node.op)](value)
        if isinstance(node, ast.BinOp):
            left, right = self._operands(node.left, node.right)
            if isinstance(node.op, ast.Pow):
                return left**right if isinstance(left, torch.Tensor) and isinstance(right, _NUMBERS) else UNKNOWN
            return _BINARY[type(node.op)](*_bounded([left, right], type(node.op)))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self._operands(node.left, node.comparators[0])
            return _COMPARE[type(node.ops[0])](*_bounded([left, right]))
        if isinstance(node, ast.BoolOp):
            stops = isinstance(node.op, ast.Or)
            value = UNKNOWN
            for part in node.values:
                (value,) = self._operands(part)
                if bool(value) is stops:
                    break
            return value
        if isinstance(node, ast.IfExp):
            (test,) = self._operands(node.test)
            return self._value(node.body if test else node.orelse)
        if isinstance(node, ast.Subscript):
            owner = self._value(node.value)
            if isinstance(owner, (torch.Tensor, tuple, list)):
                return owner[self._index(node.slice)]
            return UNKNOWN
        return self._call(node) if isinstance(node, ast.Call) else UNKNOWN

    def _index(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Slice):
            parts = [None if part is None else self._operands(part)[0] for part in (node.lower, node.upper, node.step)]
            return slice(*parts)
        if isinstance(node, ast.Tuple):
            return tuple(self._index(element) for element in node.elts)
        return self._operands(node)[0]

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = self._value(node.value)
        if isinstance(owner, torch.Tensor):
            return getattr(owner, node.attr) if node.attr in _ATTRIBUTES else UNKNOWN
        if _is_result(owner):
            return getattr(owner, node.attr) if node.attr in ("values", "indices") else UNKNOWN
        if owner is torch:
            found = vars(torch).get(node.attr, UNKNOWN)
            return found if isinstance(found, torch.dtype) else UNKNOWN
        return UNKNOWN

    def _call(self, node: ast.Call) -> Any:
        if any(isinstance(argument, ast.Starred) for argument in node.args) or any(word.arg is None for word in node.keywords):
            return UNKNOWN
        if isinstance(node.func, ast.Name):
            function = _BUILTINS.get(node.func.id) if node.func.id not in self.values and node.func.id not in self.outer else None
            return UNKNOWN if function is None else function(*self._operands(*node.args))
        if not isinstance(node.func, ast.Attribute):
            return UNKNOWN
        named = self._torch_function(node.func)
        receiver: list[Any] = []
        if named is None:
            owner = self._value(node.func.value)
            if not isinstance(owner, torch.Tensor) or node.func.attr not in _METHODS:
                return UNKNOWN
            receiver, named = [owner], getattr(torch.Tensor, node.func.attr, None)
        if named is None:
            return UNKNOWN
        given = self._operands(*node.args, *(word.value for word in node.keywords))
        both = _bounded(_on_one_device([*receiver, *given]), ast.MatMult if node.func.attr in ("matmul", "mm") else None)
        split = len(both) - len(node.keywords)
        words = {word.arg: value for word, value in zip(node.keywords, both[split:], strict=True) if word.arg is not None}
        return named(*both[:split], **words)

    def _torch_function(self, func: ast.Attribute) -> Any:
        """`torch.zeros_like`, `F.relu`, `torch.linalg.norm`: the function, where the name is that of torch's own module."""
        parts, owner = [func.attr], func.value
        while isinstance(owner, ast.Attribute):
            parts.insert(0, owner.attr)
            owner = owner.value
        if not isinstance(owner, ast.Name) or owner.id in self.values:
            return None
        found: Any = self.outer.get(owner.id)
        if not any(found is module for module in (torch, F, torch.linalg)):
            return None
        if ".".join(parts) not in _FUNCTIONS and not (found is torch.linalg and f"linalg.{parts[-1]}" in _FUNCTIONS):
            return None
        for part in parts:
            found = vars(found).get(part) if isinstance(found, ModuleType) else None
        return found


def known(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the evaluator takes it: itself where it is plain and not too large, else only its shape."""
    return tensor if tensor.device.type == "meta" or tensor.numel() <= MOST_ELEMENTS else shape_only(tensor)


def shape_only(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def of_shape(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is known of a tensor of which only the shape is."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def _admitted(value: Any) -> Any:
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return UNKNOWN
        return value.detach()
    if kind in _PLAIN or kind is torch.Size or value is torch or _is_result(value):
        return value
    if kind in (tuple, list):
        return kind(_admitted(item) for item in value[:64]) if len(value) <= 64 else UNKNOWN
    return UNKNOWN


def _is_result(value: Any) -> bool:
    """Whether it is what `x.max(0)` returns."""
    return bool(type.__getattribute__(type(value), "__module__") == "torch.return_types")


def _on_one_device(values: list[Any]) -> list[Any]:
    if any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in values):
        return [shape_only(value) if isinstance(value, torch.Tensor) and value.dim() else value for value in values]
    return values


def _bounded(values: list[Any], op: type | None = None) -> list[Any]:
    """The operands, as shapes alone where the result would be large."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) < 2:
        return values
    if op is ast.MatMult:
        large = tensors[0].numel() * (tensors[1].shape[-1] if tensors[1].dim() else 1) > 16 * MOST_ELEMENTS
    else:
        try:
            large = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)).numel() > MOST_ELEMENTS  # type: ignore[no-untyped-call]
        except internal_error(RuntimeError):
            large = False
    return [shape_only(value) if isinstance(value, torch.Tensor) else value for value in values] if large else values
