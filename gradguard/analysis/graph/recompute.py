"""Computes a graph node's output again from the values of its operands, for the ops where that is simple.

What a node keeps beside tensors (dimensions, exponents, sizes) is read from its `_saved_*` attributes; operands that
autograd did not need and so did not keep make the value unknown, which is no failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import has_memory, has_own_dispatch


class Values(Protocol):
    """The values of a graph, as far as they are known (`gradguard.analysis.graph.node_values.GraphValues`)."""

    inputs: dict[Any, list[Any]]

    def input(self, node: Any, index: int) -> torch.Tensor | None: ...


class Unknown(Exception):
    """The value cannot be told from what the graph kept."""


class Operands:
    """What a formula reads of one node."""

    def __init__(self, values: Values, node: Any, output: int) -> None:
        self.values = values
        self.node = node
        self.output = output

    def __getitem__(self, position: int) -> torch.Tensor:
        """The operand at this position among the differentiable ones.

        Raises:
            Unknown: it is not known.
        """
        value = self.values.input(self.node, position)
        if value is None:
            raise Unknown
        return value

    def count(self) -> int:
        return len(self.values.inputs[self.node])

    def saved(self, name: str) -> torch.Tensor:
        """A saved tensor by its slot.

        Raises:
            Unknown: there is none.
        """
        value = getattr(self.node, f"_saved_{name}", None)
        if not isinstance(value, torch.Tensor) or not has_memory(value) or has_own_dispatch(value):
            raise Unknown
        return value.detach()

    def attr(self, name: str) -> Any:
        """A saved number, list or flag; dimensions counted from the end come as unsigned numbers and are put right."""
        return signed(getattr(self.node, f"_saved_{name}"))

    def either(self, position: int, slot: str) -> torch.Tensor:
        """An operand that is part of the graph, or the saved constant in its place."""
        try:
            return self[position]
        except Unknown:
            return self.saved(slot)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self._metadata().shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype = self._metadata().dtype
        if not isinstance(dtype, torch.dtype):
            raise Unknown
        return dtype

    def _metadata(self) -> Any:
        metadata = getattr(self.node, "_input_metadata", None)
        if not metadata:
            raise Unknown
        return metadata[self.output]


def signed(value: Any) -> Any:
    """A number, or several, as they were given: nodes keep negative ones without their sign."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**63:
        return value - 2**64
    if isinstance(value, (tuple, list)):
        return tuple(signed(item) for item in value)
    return value


Formula = Callable[[Operands], torch.Tensor]


def recompute(values: Values, node: Any, output: int) -> torch.Tensor | None:
    """The node's output again, of the dtype it had; None where no formula is known.

    Raises:
        Unknown: an operand is not known.
    """
    formula = FORMULAS.get(node_kind(node))
    if formula is None:
        return None
    operands = Operands(values, node, output)
    result = formula(operands)
    try:
        dtype = operands.dtype
    except internal_error():
        return result
    if result.dtype != dtype and result.is_floating_point() and dtype.is_floating_point:
        result = result.to(dtype)
    return result


def node_kind(node: Any) -> str:
    """A node's type without the number that tells overloads apart: `AddBackward0` is `Add`; custom Functions keep their name."""
    name = str(node.name()) if callable(getattr(node, "name", None)) else type(node).__name__
    name = name.rsplit("::", 1)[-1]
    return name.rstrip("0123456789").removesuffix("Backward") if getattr(node, "_forward_cls", None) is None else name


def _add(a: Operands) -> torch.Tensor:
    if a.count() < 2:
        raise Unknown
    return torch.add(a[0], a[1], alpha=a.attr("alpha"))


def _sub(a: Operands) -> torch.Tensor:
    if a.count() < 2:
        raise Unknown
    return torch.sub(a[0], a[1], alpha=a.attr("alpha"))


def _sum(a: Operands) -> torch.Tensor:
    dim = getattr(a.node, "_saved_dim", None)
    return a[0].sum() if dim is None or dim == () else a[0].sum(signed(dim), keepdim=bool(getattr(a.node, "_saved_keepdim", False)))


def _mean(a: Operands) -> torch.Tensor:
    dim = getattr(a.node, "_saved_dim", None)
    return a[0].mean() if dim is None or dim == () else a[0].mean(signed(dim), keepdim=bool(getattr(a.node, "_saved_keepdim", False)))


def _clamp(a: Operands) -> torch.Tensor:
    low, high = getattr(a.node, "_saved_min", None), getattr(a.node, "_saved_max", None)
    return torch.clamp(a[0], min=low, max=high)


def _cat(a: Operands) -> torch.Tensor:
    return torch.cat([a[i] for i in range(a.count())], dim=a.attr("dim"))


def _index(a: Operands) -> torch.Tensor:
    return a[0][tuple(slice(None) if index is None else index for index in a.attr("indices"))]


def _slice(a: Operands) -> torch.Tensor:
    dim, start, end, step = a.attr("dim"), a.attr("start"), a.attr("end"), a.attr("step")
    index = [slice(None)] * a[0].dim()
    index[dim] = slice(start, end, step)
    return a[0][tuple(index)]


def _linear(a: Operands) -> torch.Tensor:
    return torch.addmm(a[0], a.either(1, "mat1"), a.either(2, "mat2"), beta=a.attr("beta"), alpha=a.attr("alpha"))


def _layer_norm(a: Operands) -> torch.Tensor:
    shape = a.attr("normalized_shape")
    value = (a[0] - a.saved("result1")) * a.saved("result2")
    if a.output:
        raise Unknown
    for position, with_it in ((1, torch.mul), (2, torch.add)):
        operand = a.values.input(a.node, position)
        if operand is not None:
            value = with_it(value, operand.reshape(shape))
    return value


def _where(a: Operands) -> torch.Tensor:
    return torch.where(a.saved("condition"), a[0], a[1])


def _nll(a: Operands) -> torch.Tensor:
    reduction = {0: "none", 1: "mean", 2: "sum"}[a.attr("reduction")]
    return F.nll_loss(a[0], a.saved("target"), ignore_index=a.attr("ignore_index"), reduction=reduction)


def _reduced(a: Operands, value: torch.Tensor) -> torch.Tensor:
    reduction = a.attr("reduction")
    return value if reduction == 0 else value.mean() if reduction == 1 else value.sum()


def _bce_logits(a: Operands) -> torch.Tensor:
    return _reduced(a, F.binary_cross_entropy_with_logits(a[0], a.either(1, "target"), reduction="none"))


def _split(a: Operands) -> torch.Tensor:
    sizes = getattr(a.node, "_saved_split_sizes", None)
    return torch.split(a[0], a.attr("split_size") if sizes is None else list(signed(sizes)), a.attr("dim"))[a.output]


FORMULAS: dict[str, Formula] = {
    "Add": _add,
    "Sub": _sub,
    "Mul": lambda a: a.either(0, "self") * a.either(1, "other"),
    "Div": lambda a: a.either(0, "self") / a.either(1, "other"),
    "Neg": lambda a: -a[0],
    "Abs": lambda a: a[0].abs(),
    "Log": lambda a: a[0].log(),
    "Log2": lambda a: a[0].log2(),
    "Log10": lambda a: a[0].log10(),
    "Log1P": lambda a: a[0].log1p(),
    "Exp": lambda a: a[0].exp(),
    "Exp2": lambda a: a[0].exp2(),
    "Expm1": lambda a: a[0].expm1(),
    "Sqrt": lambda a: a[0].sqrt(),
    "Rsqrt": lambda a: a[0].rsqrt(),
    "Reciprocal": lambda a: a[0].reciprocal(),
    "Pow": lambda a: a.either(0, "self") ** (a.either(1, "exponent") if a.count() > 1 else a.attr("exponent")),
    "Sin": lambda a: a[0].sin(),
    "Cos": lambda a: a[0].cos(),
    "Tan": lambda a: a[0].tan(),
    "Asin": lambda a: a[0].asin(),
    "Acos": lambda a: a[0].acos(),
    "Atan": lambda a: a[0].atan(),
    "Atan2": lambda a: torch.atan2(a.either(0, "self"), a.either(1, "other")),
    "Acosh": lambda a: a[0].acosh(),
    "Atanh": lambda a: a[0].atanh(),
    "Cosh": lambda a: a[0].cosh(),
    "Sinh": lambda a: a[0].sinh(),
    "Erf": lambda a: a[0].erf(),
    "Erfinv": lambda a: a[0].erfinv(),
    "Logit": lambda a: torch.logit(a[0], getattr(a.node, "_saved_eps", None)),
    "Lgamma": lambda a: a[0].lgamma(),
    "Digamma": lambda a: a[0].digamma(),
    "Xlogy": lambda a: torch.xlogy(a.either(0, "self"), a.either(1, "other")),
    "Sigmoid": lambda a: a[0].sigmoid(),
    "Tanh": lambda a: a[0].tanh(),
    "Relu": lambda a: a[0].relu(),
    "Softplus": lambda a: F.softplus(a[0], a.attr("beta"), a.attr("threshold")),
    "LogSigmoid": lambda a: F.logsigmoid(a[0]),
    "Silu": lambda a: F.silu(a[0]),
    "Gelu": lambda a: F.gelu(a[0]),
    "LeakyRelu": lambda a: F.leaky_relu(a[0], a.attr("negative_slope")),
    "Softmax": lambda a: a[0].softmax(a.attr("dim")),
    "LogSoftmax": lambda a: a[0].log_softmax(a.attr("dim")),
    "Sum": _sum,
    "Mean": _mean,
    "Clamp": _clamp,
    "ClampMin": _clamp,
    "ClampMax": _clamp,
    "Minimum": lambda a: torch.minimum(a.either(0, "self"), a.either(1, "other")),
    "Maximum": lambda a: torch.maximum(a.either(0, "self"), a.either(1, "other")),
    "Cumsum": lambda a: a[0].cumsum(a.attr("dim")),
    "Cumprod": lambda a: a[0].cumprod(a.attr("dim")),
    "Std": (
        lambda a: a[0].std(
            getattr(a.node, "_saved_dim", None), correction=getattr(a.node, "_saved_correction", None), keepdim=a.attr("keepdim")
        )
    ),
    "Var": (
        lambda a: a[0].var(
            getattr(a.node, "_saved_dim", None), correction=getattr(a.node, "_saved_correction", None), keepdim=a.attr("keepdim")
        )
    ),
    "Logsumexp": lambda a: a[0].logsumexp(a.attr("dim"), a.attr("keepdim")),
    "LinalgVectorNorm": lambda a: torch.linalg.vector_norm(a[0], a.attr("ord"), getattr(a.node, "_saved_dim", None), a.attr("keepdim")),
    "LinalgSlogdet": lambda a: torch.linalg.slogdet(a[0])[a.output],
    "LinalgDet": lambda a: torch.linalg.det(a[0]),
    "Mm": lambda a: a.either(0, "self") @ a.either(1, "mat2"),
    "Bmm": lambda a: torch.bmm(a.either(0, "self"), a.either(1, "mat2")),
    "Mv": lambda a: a.either(0, "self") @ a.either(1, "vec"),
    "Dot": lambda a: torch.dot(a.either(0, "self"), a.either(1, "tensor")),
    "Addmm": _linear,
    "NativeLayerNorm": _layer_norm,
    "MseLoss": lambda a: _reduced(a, (a.either(0, "self") - a.either(1, "target")) ** 2),
    "L1Loss": lambda a: _reduced(a, (a.either(0, "self") - a.either(1, "target")).abs()),
    "NllLoss": _nll,
    "BinaryCrossEntropyWithLogits": _bce_logits,
    "T": lambda a: a[0].t(),
    "Transpose": lambda a: a[0].transpose(a.attr("dim0"), a.attr("dim1")),
    "Permute": lambda a: a[0].permute(a.attr("dims")),
    "View": lambda a: a[0].reshape(a.shape),
    "UnsafeView": lambda a: a[0].reshape(a.shape),
    "ReshapeAlias": lambda a: a[0].reshape(a.shape),
    "Expand": lambda a: a[0].expand(a.shape),
    "Squeeze": lambda a: a[0].reshape(a.shape),
    "Unsqueeze": lambda a: a[0].reshape(a.shape),
    "Clone": lambda a: a[0],
    "Contiguous": lambda a: a[0],
    "Alias": lambda a: a[0],
    "ToCopy": lambda a: a[0].to(a.dtype),
    "Select": lambda a: a[0].select(a.attr("dim"), a.attr("index")),
    "Slice": _slice,
    "Index": _index,
    "IndexSelect": lambda a: a[0].index_select(a.attr("dim"), a.saved("index")),
    "Gather": lambda a: a[0].gather(a.attr("dim"), a.saved("index")),
    "Embedding": lambda a: F.embedding(a.saved("indices"), a[0]),
    "NativeDropout": lambda a: a[0] * a.saved("result1") / (1 - a.attr("p")),
    "Cat": _cat,
    "Stack": lambda a: torch.stack([a[i] for i in range(a.count())], dim=a.attr("dim")),
    "Where": _where,
    "Split": _split,
    "SplitWithSizes": _split,
    "Unbind": lambda a: torch.unbind(a[0], a.attr("dim"))[a.output],
    "Tril": lambda a: a[0].tril(a.attr("diagonal")),
    "Triu": lambda a: a[0].triu(a.attr("diagonal")),
    "Max": lambda a: a[0].max() if a.node.__class__.__name__ == "MaxBackward1" else a[0].max(a.attr("dim"), a.attr("keepdim"))[0],
    "Min": lambda a: a[0].min() if a.node.__class__.__name__ == "MinBackward1" else a[0].min(a.attr("dim"), a.attr("keepdim"))[0],
    "Amax": lambda a: a[0].amax(a.attr("dim"), a.attr("keepdim")),
    "Amin": lambda a: a[0].amin(a.attr("dim"), a.attr("keepdim")),
}
