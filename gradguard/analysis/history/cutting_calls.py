"""Which calls and attributes, by their names in the source, end a gradient's path."""

from __future__ import annotations

import ast
import sys
from typing import Any

import torch

_INTEGERS = {"int", "long", "bool", "int8", "int16", "int32", "int64", "uint8", "short"}
_METHODS = {
    "detach": "detach", "detach_": "detach", "item": "escape", "numpy": "escape", "tolist": "escape", "__array__": "escape",
    "argmax": "nondiff", "argmin": "nondiff", "argsort": "nondiff", "long": "cast", "int": "cast", "bool": "cast", "byte": "cast",
    "short": "cast", "char": "cast",
    "eq": "nondiff", "ne": "nondiff", "gt": "nondiff", "ge": "nondiff", "lt": "nondiff", "le": "nondiff",
    "multinomial": "nondiff", "nonzero": "nondiff",
    "bincount": "nondiff", "histc": "nondiff", "isclose": "nondiff", "logical_not": "nondiff", "logical_and": "nondiff",
    "logical_or": "nondiff",
    "size": "none", "dim": "none", "numel": "none", "new_zeros": "none", "new_ones": "none", "new_empty": "none",
    "new_full": "none", "new_tensor": "rewrap",
    "max": "indices", "min": "indices", "topk": "indices", "sort": "indices", "mode": "indices", "median": "indices", "kthvalue": "indices",
}  # fmt: skip
_TORCH = {
    "tensor": "rewrap", "Variable": "rewrap", "as_tensor": "rewrap", "Tensor": "rewrap", "FloatTensor": "rewrap",
    "from_numpy": "rewrap", "Parameter": "rewrap", "sparse_coo_tensor": "rewrap", "sparse_csr_tensor": "rewrap",
    "scalar_tensor": "rewrap", "zeros_like": "none", "ones_like": "none", "rand_like": "none", "randn_like": "none",
    "empty_like": "none", "full_like": "none",
    "randn": "none", "rand": "none", "zeros": "none", "ones": "none", "arange": "none", "randint": "none", "randperm": "none",
    "empty": "none", "full": "none",
    "eye": "none", "linspace": "none", "one_hot": "nondiff", "bucketize": "nondiff", "searchsorted": "nondiff",
}  # fmt: skip
_METADATA = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "is_cuda",
    "requires_grad",
    "grad_fn",
    "is_leaf",
    "layout",
    "names",
    "_version",
    "training",
}


def is_metadata(name: str) -> bool:
    """Attributes of a tensor that are not values."""
    return name in _METADATA


def cut_by(node: ast.Call, full: str, receiver: Any) -> str | None:
    """How a library call ends the path: a `CutKind`, "indices" (only the second result), "none" (its result never had one), or None."""
    name = full.rpartition(".")[2]
    method = isinstance(node.func, ast.Attribute)
    if full.startswith("numpy."):
        return "escape" if name in ("asarray", "array") else None
    if not method and full in ("float", "int", "complex"):
        return "escape"
    if not method and full in ("len", "range", "isinstance", "print", "str", "repr", "id", "type", "hasattr", "bool"):
        return "none"
    if full.startswith("torch."):
        if (name in _TORCH and not full.startswith("torch.nn.functional.")) or name == "one_hot":
            return _TORCH[name]
        if full == "torch.autograd.grad":
            return None if _keyword(node, "create_graph", True) else "detach"
        if name in ("deepcopy", "clone"):
            return None
        if name in _METHODS and _METHODS[name] != "none":
            return _METHODS[name]
        return None
    if not method:
        return _TORCH[name] if name in ("Variable", "from_numpy") else None
    if name in ("sample", "sample_n") and _samples(receiver):
        return "sample"
    if name in ("type", "to", "type_as", "astype"):
        return "cast" if any(_is_integer(argument) for argument in (*node.args, *(keyword.value for keyword in node.keywords))) else None
    if name in _METHODS and not issubclass(type(receiver), _data_types()):
        return _METHODS[name]
    return None


def _samples(receiver: Any) -> bool:
    return not isinstance(receiver, torch.nn.Module)


def _keyword(node: ast.Call, name: str, value: object) -> bool:
    return any(
        keyword.arg == name and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is not value)
        for keyword in node.keywords
    )


def _is_integer(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _INTEGERS or node.attr in ("LongTensor", "IntTensor", "BoolTensor", "ByteTensor")
    if isinstance(node, ast.Name):
        return node.id in ("int", "bool")
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "int" in node.value.lower()


def _data_types() -> tuple[type, ...]:
    """Types whose methods have the names of a tensor's, and are none; NumPy's array only where the program has imported NumPy."""
    array = vars(sys.modules["numpy"]).get("ndarray") if "numpy" in sys.modules else None
    return (dict, list, tuple, str, *([array] if isinstance(array, type) else []))
