"""Dtypes: as PyTorch's error texts name them, and as expressions make them."""

from __future__ import annotations

import ast
import re
import sys
from typing import Any

import torch

from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.expressions import argument, inside, last_part
from gradguard.analysis.program.provenance import Judge, Maker, Trace, trace
from gradguard.analysis.program.scopes import Scope
from gradguard.core.safe_read import UNKNOWN, elements
from gradguard.torch_compat.op_schemas import factory_names

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
CONVERTERS: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.int64: "long",
    torch.int32: "int",
    torch.bool: "bool",
}
_NAMES: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "c10::half": torch.float16,
    "bfloat16": torch.bfloat16,
    "c10::bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int64": torch.int64,
    "int": torch.int32,
    "int32": torch.int32,
    "short": torch.int16,
    "int16": torch.int16,
    "char": torch.int8,
    "int8": torch.int8,
    "byte": torch.uint8,
    "uint8": torch.uint8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "complexfloat": torch.complex64,
    "complexdouble": torch.complex128,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
    "long int": torch.int64,
}
_WORD = re.compile(
    r"(?<![\w'`-])(?:torch\.)?(?:cuda\.)?(c10::BFloat16|c10::Half|unsigned char|long int|bfloat16|float64|float32|float16"
    r"|int64|int32|int16|int8|uint8|complex64|complex128"
    r"|complexfloat|complexdouble|double|float|half|long|int|short|char|byte|bool)(?:tensor)?(?!\w|ing| point|\()",
    re.IGNORECASE,
)

_LONGS = {
    "randint",
    "randperm",
    "tril_indices",
    "triu_indices",
    "argmax",
    "argmin",
    "argsort",
    "bincount",
    "one_hot",
    "multinomial",
    "nonzero",
    "searchsorted",
    "bucketize",
    "count_nonzero",
    "LongTensor",
}
_BOOLS = {
    "isnan",
    "isfinite",
    "isinf",
    "logical_and",
    "logical_or",
    "logical_not",
    "eq",
    "ne",
    "gt",
    "lt",
    "ge",
    "le",
    "any",
    "all",
    "isin",
    "BoolTensor",
}
_ARRAYS = {"from_numpy", "tensor", "as_tensor", "asarray", "Tensor"}
_METHODS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "bool": torch.bool,
    "byte": torch.uint8,
    "char": torch.int8,
}
_NEVER_INTEGER = {
    "sigmoid",
    "tanh",
    "softmax",
    "log_softmax",
    "exp",
    "log",
    "sqrt",
    "mean",
    "std",
    "var",
    "norm",
    "sin",
    "cos",
    "dropout",
    "relu",
    "gelu",
    "randn_like",
    "rand_like",
}


def dtype_named(word: str) -> torch.dtype | None:
    """The dtype of a word such as `Double`, `torch.float64`, `unsigned char`."""
    return _NAMES.get(word.lower().removeprefix("torch."))


def dtypes_in(message: str) -> list[torch.dtype]:
    """The dtypes that a text names, in order, each once."""
    found = [dtype_named(match[1]) for match in _WORD.finditer(message)]
    return list(dict.fromkeys(d for d in found if d is not None))


def dtype_of(value: Any) -> torch.dtype | None:
    """The dtype of a tensor or an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not issubclass(type(value), (numpy.ndarray, numpy.generic)):
        return None
    kind = numpy.ndarray if issubclass(type(value), numpy.ndarray) else numpy.generic
    return _NAMES.get(kind.dtype.__get__(value).name)


def dtype_maker(wrong: frozenset[torch.dtype]) -> Maker:
    """Tells whether an expression by itself makes a tensor of one of these dtypes."""

    def maker(expr: ast.expr, scope: Scope) -> bool | None:
        made = made_dtype(expr, scope)
        if made is None:
            return None
        if made == "array":  # whatever the array has, kept
            return True
        if made == "float":  # some floating-point dtype
            return None if wrong & FLOATS else False
        return made in wrong

    return maker


def dtype_judge(wrong: frozenset[torch.dtype]) -> Judge:
    """Tells whether a live value has one of these dtypes."""
    return lambda value: None if (found := dtype_of(value)) is None else found in wrong


def dtype_trace(scope: Scope, expr: ast.expr, wrong: frozenset[torch.dtype]) -> Trace:
    """The way back to where a value came by one of these dtypes."""
    return trace(scope, expr, dtype_judge(wrong), dtype_maker(wrong))


def made_dtype(expr: ast.expr, scope: Scope) -> torch.dtype | str | None:
    """The dtype an expression evidently gives its result.

    "array": that of an array it takes over; "float": some floating-point one; None: it depends on the operands.
    """
    if isinstance(expr, ast.Compare):
        return torch.bool
    if not isinstance(expr, ast.Call):
        return None
    name, explicit = last_part(expr), argument(expr, "dtype")
    if explicit is not None:
        return written_dtype(explicit, scope)
    library = dotted(expr.func)
    first = (library or "").partition(".")[0]
    full = scope.source.imports.get(first, first)
    if full.partition(".")[0] == "numpy":
        return None  # an array: what turns it into a tensor is the place to look at
    method = isinstance(expr.func, ast.Attribute) and full.partition(".")[0] != "torch"
    if method and name in _METHODS and not expr.args:
        return _METHODS[name]
    if name in ("to", "type", "astype", "type_as") and expr.args:
        return written_dtype(expr.args[0], scope)
    if name in _ARRAYS and not method:
        return _of_data(name, expr, scope)
    if name == "full" and len(expr.args) > 1 and not method:
        return _of_number(scope.evaluate(expr.args[1]))
    if name == "arange" and not method:
        values = [scope.evaluate(a) for a in expr.args]
        return torch.get_default_dtype() if any(isinstance(v, float) for v in values) else torch.int64
    if (name == "FloatTensor" or (name in factory_names() and name not in _LONGS)) and not method:
        return torch.get_default_dtype()
    if name in ("DoubleTensor", "HalfTensor", "IntTensor", "ByteTensor"):
        return dtype_named(name.removesuffix("Tensor"))
    if name in _LONGS:
        return torch.int64
    if name in _BOOLS:
        return torch.bool
    return "float" if name in _NEVER_INTEGER else None


def _of_data(name: str, expr: ast.Call, scope: Scope) -> torch.dtype | str | None:
    if not expr.args:
        return None
    if name == "Tensor":
        return torch.float32
    data = expr.args[0]
    value = scope.evaluate(data)
    known = dtype_of(value)
    if known is None and isinstance(data, ast.Subscript):
        known = dtype_of(scope.evaluate(data.value))  # rows of an array
    if known is not None:
        return known
    if value is not UNKNOWN and name != "from_numpy":
        return _of_number(_leaf(value)) or "array"
    constants = [node.value for node in inside(data, ast.Constant) if isinstance(node.value, (int, float, bool))]
    if constants and not any(inside(data, ast.Name, ast.Call)):
        return torch.get_default_dtype() if any(isinstance(c, float) for c in constants) else _of_number(constants[0])
    return "array"


def _leaf(value: Any) -> Any:
    for _ in range(8):
        held = elements(value, 10_000) if isinstance(value, (list, tuple)) else []
        if not held:
            return value
        if any(isinstance(item, float) for item in held):
            return 0.5
        value = held[0]
    return value


def _of_number(value: Any) -> torch.dtype | None:
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    if isinstance(value, float):
        return torch.get_default_dtype()
    return dtype_of(value)


def written_dtype(node: ast.expr, scope: Scope) -> torch.dtype | None:
    """`torch.float64`, `np.float64`, `"torch.DoubleTensor"`, `y.dtype`; None for a device or something unknown."""
    value = scope.evaluate(node)
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str):
        return dtype_named(value.rpartition(".")[2].removesuffix("Tensor"))
    if isinstance(value, torch.Tensor):
        return value.dtype
    name = dotted(node)
    if name is not None and name.endswith(".dtype"):
        return dtype_of(scope.evaluate(node.value)) if isinstance(node, ast.Attribute) else None
    return None if name is None else dtype_named(name.rpartition(".")[2].rstrip("_"))
