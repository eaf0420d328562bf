"""What each torch function can do that the op probe must look at, decided once a function."""

from __future__ import annotations

from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from gradguard.probes.broadcasts import COLUMNS, PAIRING
from gradguard.probes.loss_inputs import LOSSES
from gradguard.torch_compat.collectives import GATHERING

SKIP = 0  # a query: nothing to record
PLAIN = 1
WRITE = 2  # may change its first argument
MODE = 4  # switches grad mode
ESCAPE = 8  # turns a tensor into a Python number or an array
DETACH = 16
DATA = 32  # `.data`
REWRAP = 64  # builds a tensor from Python numbers or arrays
ADDEND = 128  # its operands are summands of its result
TOGGLE = 256  # sets requires_grad of a leaf
GRAD = 512  # `.grad` is read
SET_DATA = 2048  # `.data` is given another tensor's memory
GATHER = 4096  # copies values between ranks
FACTOR = 8192  # multiplies two tensors
LOSS = 16384  # a loss function that takes what it must not: another kind of numbers, other shapes
COLUMN = 32768  # may make a column of a row
STRANGE = 65536  # not a function of torch's: it may capture anything, and is not kept
FLAG = 1024  # works in place if its `inplace` argument says so

_ESCAPES = {"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__", "__complex__", "__bool__"}
# functions that make tensors of numbers and arrays, and which argument has these
REWRAPS = {
    "tensor": 0, "as_tensor": 0, "asarray": 0, "from_numpy": 0, "new_tensor": 1, "scalar_tensor": 0,
    "sparse_coo_tensor": 1, "sparse_csr_tensor": 2, "sparse_csc_tensor": 2, "sparse_bsr_tensor": 2, "sparse_bsc_tensor": 2,
    "sparse_compressed_tensor": 2,
}  # fmt: skip
# made in the likeness of another tensor, whose values do not go into it
FRESH = frozenset({
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full",
    "new_empty",
})  # fmt: skip
# given another tensor for its shape, dtype or device only: their result is made of the first one
ALIKE = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})
_ADDENDS = {
    "add",
    "add_",
    "sub",
    "sub_",
    "__add__",
    "__radd__",
    "__iadd__",
    "__sub__",
    "__rsub__",
    "__isub__",
    "rsub",
    "subtract",
    "stack",
    "cat",
    "hstack",
    "vstack",
    "concat",
    "concatenate",
    "addcmul",
}
_FACTORS = {"mul", "multiply", "__mul__", "__rmul__"}
# a network's last calls; what shifts, scales and reshapes their results; the smaller of two such results
MAPS = frozenset({"linear", "bilinear", "addmm", "addmv", "mm", "mv", "matmul", "bmm", "baddbmm", "__matmul__", "__rmatmul__"})
AFFINE = frozenset({
    *_ADDENDS, *_FACTORS, "div", "divide", "true_divide", "__truediv__", "__div__", "neg", "negative", "__neg__", "mean", "sum",
    "squeeze", "unsqueeze", "view", "reshape", "flatten", "unflatten", "select", "unbind", "split", "chunk", "__getitem__",
    "permute", "transpose", "t", "T", "mT", "expand", "clone", "contiguous", "detach", "to", "float", "double", "half",
})  # fmt: skip
LESSER = frozenset({"min", "minimum", "amin", "fmin"})
_QUERIES = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "element_size",
    "data_ptr",
    "untyped_storage",
    "storage",
    "get_device",
    "is_signed",
    "is_inference",
    "__len__",
    "__hash__",
    "__repr__",
    "__str__",
    "__format__",
    "__dir__",
    "__contains__",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "backward",
    "grad",
    "is_tensor",
    "is_same_size",
    "result_type",
    "_is_view",
    "is_nonzero",
    "allclose",
    "equal",
    "is_set_to",
    "has_names",
    "__deepcopy__",
    "__reduce_ex__",
    "__setstate__",
    "requires_grad_",
    "is_pinned",
    "is_shared",
    "share_memory_",
    "get_default_dtype",
    "can_cast",
    "promote_types",
    "broadcast_shapes",
    "__set__",
    "__delete__",
    "_has_compatible_shallow_copy_type",
    "is_conj",
    "is_neg",
    "_is_zerotensor",
    "names",
    "is_autocast_enabled",
}
_OPERATORS = {"truediv": "div", "rtruediv": "reciprocal", "rpow": "pow"}
_elementwise: dict[Any, bool] = {}
_PROPERTY_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}


def classify(func: Any) -> int:
    """The flags of one function, from its name and nature; conservative where it is unknown (compared by version)."""
    name = getattr(func, "__name__", "") or ""
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute == "data":
            return DATA
        if attribute == "grad":
            return GRAD
        return PLAIN if attribute in _PROPERTY_VIEWS else SKIP
    if name == "requires_grad_" or (name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "requires_grad"):
        return TOGGLE
    if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
        return SET_DATA
    if name == "_set_grad_enabled":
        return MODE
    if name in _QUERIES or name.startswith("_record_function_"):  # the profiler's marks
        return SKIP
    flags = PLAIN
    if name in _ESCAPES:
        flags |= ESCAPE
    if name in ("detach", "detach_"):
        flags |= DETACH
    if name in REWRAPS:
        flags |= REWRAP
    if name in _ADDENDS:
        flags |= ADDEND
    if name in _FACTORS:
        flags |= FACTOR
    if name in COLUMNS:
        flags |= COLUMN
    if name in LOSSES or name in PAIRING:
        flags |= LOSS
    if isinstance(func, FunctionType) and func.__module__ == "torch.nn.functional":  # no other of these write their first argument
        code = func.__code__
        if "inplace" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            flags |= FLAG
        return flags
    if isinstance(func, FunctionType) or writes_by_name(name):
        flags |= WRITE
    if name in GATHERING and str(getattr(func, "__module__", "")).startswith("torch.distributed"):
        flags |= GATHER
    return flags


def is_elementwise(func: Any) -> bool:
    """Whether a function works element by element, in place or not, of one tensor each or of lists, as PyTorch's schemas say."""
    known = _elementwise.get(func)
    if known is None:
        name = str(getattr(func, "__name__", "")).removeprefix("_foreach_").strip("_")
        for each in (name, name[1:]):  # `__rmul__`, `__iadd__`
            packet = getattr(torch.ops.aten, _OPERATORS.get(each, each), None) if each else None
            if packet is not None:
                break
        known = packet is not None and any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads())
        if _of_torch(func):
            _elementwise[func] = known
    return known


def asked_in_place(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether the call of a function with an `inplace` argument may have it set."""
    if kwargs and kwargs.get("inplace"):
        return True
    for arg in args:  # noqa: SIM110  (no generator: it is asked of every `F.relu`)
        if arg is True:
            return True
    return False


def writes_by_name(name: str) -> bool:
    """In-place by PyTorch's naming: `add_`, `_foreach_mul_`, `__iadd__`, `__setitem__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__index__", "__invert__", "__int__", "__init__", "__init_subclass__")
        )
    return name.endswith("_")


class Kinds(dict[Any, int]):
    """Function -> flags. Bounded, and keeps only functions of torch's: others may capture anything."""

    def __missing__(self, func: Any) -> int:
        if not _of_torch(func):
            return classify(func) | STRANGE
        if len(self) > 10_000:
            self.clear()
        flags = self[func] = classify(func)
        return flags


def _of_torch(func: Any) -> bool:
    kind = type(func)
    if kind is FunctionType:  # by where it was defined: a wrapper says of itself what it wraps
        return str(func.__globals__.get("__name__")).partition(".")[0] == "torch"
    if kind is BuiltinFunctionType:  # a method of an object is one as well, and holds the object
        return func.__self__ is None or type(func.__self__) in (ModuleType, type)
    if kind is MethodWrapperType:  # `Tensor.grad.__get__`
        return type(func.__self__) is GetSetDescriptorType
    return kind in (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType)
