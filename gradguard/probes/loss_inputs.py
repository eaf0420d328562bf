"""What kind of numbers a loss function was given: probabilities, their logarithms or raw scores.

The values decide, and the graph says that they are no coincidence: rows that add up to 1 and were put through a softmax. Only a sample of
the rows is read, in the first traced calls of a line.
"""

from __future__ import annotations

from types import CodeType
from typing import Any, Literal, NamedTuple

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.facts import Domain, DomainFact
from gradguard.instrumentation.journal import Journal
from gradguard.probes.call_arguments import call_name
from gradguard.torch_compat.private_api import node_sequence, quiet

_Tensor = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ROWS = 64
_MOST_ELEMENTS = 4_000_000
_LOOKS = 3  # at each line; after that, one call in so many
_STRIDE = 64
_MOST_LINES = 256
_MOST_NODES = 48
# What a loss expects of its input, and the positions of its other arguments in `torch.nn.functional`.
LOSSES: dict[str, Domain] = {
    "cross_entropy": "logits",
    "log_softmax": "logits",
    "binary_cross_entropy_with_logits": "logits",
    "nll_loss": "log-probabilities",
    "kl_div": "log-probabilities",
    "poisson_nll_loss": "log-rates",
}
_REDUCTION = {"binary_cross_entropy_with_logits": 5}
_SHAPE = frozenset({
    "View", "Reshape", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T", "Expand", "Squeeze", "Unsqueeze", "Clone", "Alias",
    "Contiguous", "ToCopy", "AsStrided", "Select", "Slice", "Index", "IndexSelect", "Gather", "Split", "SplitWithSizes", "Unbind", "Stack",
    "Cat",
})  # fmt: skip
_CLAMP = frozenset({"Clamp", "ClampMin", "ClampMax", "Minimum", "Maximum", "Where", "MaskedFill"})
_ELEMENTWISE = frozenset({
    "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Mean", "Sum", "Pow", "Sqrt", "Abs", "Reciprocal", "Scatter", "IndexPut", "NativeDropout",
})  # fmt: skip
_NORMALISERS = frozenset({"Softmax", "Sigmoid", "Exp", "Div", "Hardsigmoid", "Reciprocal"})
_SQUASHERS = frozenset({"Softmax", "Sigmoid", "Hardsigmoid"})
_LAYERS = frozenset({"Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Linear", "MkldnnLinear", "Convolution", "Mv", "Addmv"})


class LossInputs:
    """Notes losses that get another kind of input than they expect.

    Args:
        journal: where the facts go.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._calls: dict[tuple[int, int], int] = {}

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nodes: tuple[int, int], code: CodeType, lasti: int) -> None:
        """A loss function was called.

        Args:
            nodes: the sequence numbers of the graph nodes that it made, the second exclusive.
            code, lasti: the user's line.
        """
        site = id(code), lasti
        calls = self._calls.get(site, 0)
        if calls >= _LOOKS and calls % _STRIDE:
            self._calls[site] = calls + 1
            return
        if len(self._calls) >= _MOST_LINES:
            self._calls.clear()
        self._calls[site] = calls + 1
        given: Any = args[0] if args else kwargs.get("input")
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if not isinstance(given, torch.Tensor) or type(given) not in _PLAIN or _unreadable(given):
            return
        try:
            with quiet(), torch.no_grad():
                self._judge(call_name(func), func, given, target, args, kwargs, nodes)
        except internal_error():  # tensors within vmap and other transforms have no values to read
            return

    def _judge(
        self, name: str, func: Any, given: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nodes: tuple[int, int]
    ) -> None:
        expects = LOSSES[name]
        python = getattr(func, "__module__", None) == "torch.nn.functional"
        log_target = bool(kwargs.get("log_target", args[5] if python and name == "kl_div" and len(args) > 5 else False))
        if name == "poisson_nll_loss":
            log_input = kwargs.get("log_input", args[2] if len(args) > 2 else True)
            found = _rates(given, bool(log_input))
            if found is not None:
                self._note(name, nodes, "input", found[0], "log-rates" if log_input else "rates", found[1])
            return
        if name == "log_softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            found = _instead_of_logits(given, dim) if type(dim) is int else None
            found = found if found is not None and found[2] else None  # as the last layer of a model it may still be meant
        elif name == "binary_cross_entropy_with_logits":
            found = _instead_of_logits(given, None)
        elif name == "cross_entropy":
            found = _instead_of_logits(given, 1 if given.dim() > 1 else 0)
        else:
            found = _instead_of_logs(given, (1 if given.dim() > 1 else 0,) if name == "nll_loss" else None)
        if found is not None:
            self._note(name, nodes, "input", found[0], expects, found[1])
            return
        if not python or type(target) not in _PLAIN or not target.is_floating_point() or _unreadable(target):
            return
        reduction = kwargs.get("reduction", args[_REDUCTION[name]] if name in _REDUCTION and len(args) > _REDUCTION[name] else "mean")
        kind: Domain | None = None
        if name == "kl_div":
            kind = _target_of_kl(target, log_target)
        elif name == "cross_entropy" and target.shape == given.shape:
            values = _values(target, (1 if target.dim() > 1 else 0,))
            kind = "log-probabilities" if values is not None and values.low < 0 and values.logs_add_up else None
        elif (
            name == "binary_cross_entropy_with_logits"
            and reduction != "none"
            and (args[2] if len(args) > 2 else kwargs.get("weight")) is None
        ):
            values = _values(target, ())
            kind = "numbers outside [0, 1]" if values is not None and (values.low <= -0.5 or values.high >= 1.5) else None
        if kind is not None:
            wanted: Domain = "log-probabilities" if log_target else "probabilities"
            self._note(name, nodes, "target", kind, wanted, Way((), None, False))

    def _note(
        self, name: str, nodes: tuple[int, int], argument: Literal["input", "target"], found: Domain, wanted: Domain, way: Way
    ) -> None:
        self.journal.domains.append(
            DomainFact(nodes[0], nodes[1], self.journal.step, name, argument, found, wanted, way.nodes, way.maker, way.plain)
        )


class Way(NamedTuple):
    """How a value was made: the graph nodes (by number) back to the one that gave it its kind, and whether all others only reshape it."""

    nodes: tuple[int, ...]
    maker: int | None
    plain: bool


_Found = tuple[Domain, Way, bool]


class _Values(NamedTuple):
    low: float
    high: float
    adds_up: bool  # to 1, along one dimension
    logs_add_up: bool  # their exponentials do


def _unreadable(tensor: torch.Tensor) -> bool:
    if tensor.is_cpu:
        return tensor.layout != torch.strided or not tensor.numel()
    return tensor.layout != torch.strided or not tensor.is_cuda or torch.cuda.is_current_stream_capturing() or not tensor.numel()


def _values(tensor: torch.Tensor, dims: tuple[int, ...] | None) -> _Values | None:
    """Of a sample of the rows.

    Args:
        dims: along which they may add up; None for any but the first of several.
    """
    sample = tensor.detach()
    if dims is None:
        dims = tuple(range(1, sample.dim())) if sample.dim() > 1 else (0,)
    if sample.dim() > 1 and 0 not in dims:
        sample = sample[:_ROWS]
        if sample.numel() > _MOST_ELEMENTS:
            sample = sample[:1]
    if sample.numel() > _MOST_ELEMENTS:
        return None
    wide = sample.dtype not in (torch.float16, torch.bfloat16)
    close = 1e-3 if wide else 2e-2
    sample = sample if wide else sample.float()
    parts = [sample.amin(), sample.amax()]
    for dim in dims:
        if sample.shape[dim] > 1:
            parts += [(sample.sum(dim) - 1).abs().amax(), sample.logsumexp(dim).abs().amax()]
    numbers = torch.stack(parts).tolist()
    low, high, *rest = numbers
    if low != low or high != high:
        return None
    return _Values(low, high, any(off <= close for off in rest[::2]), any(off <= close for off in rest[1::2]))


def _are_probabilities(values: _Values) -> bool:
    return values.low >= -1e-6 and 1e-4 < values.high <= 1 + 1e-3


def _instead_of_logits(given: Any, dim: int | None) -> _Found | None:
    """Probabilities where a loss puts a softmax or sigmoid on top.

    Returns:
        Their kind, how they were made, and whether they add up along the dimension.
    """
    node = given.grad_fn
    if node is None:
        return None
    direct = _back(node, _SHAPE | _CLAMP, _SQUASHERS)
    wide = direct or (None if dim is None else _back(node, _SHAPE | _CLAMP | _ELEMENTWISE, _NORMALISERS))
    if wide is None:
        return None
    values = _values(given, () if dim is None else (dim,))
    if values is None or not _are_probabilities(values):
        return None
    if values.adds_up or direct is not None:
        return "probabilities", wide, values.adds_up
    return None


def _instead_of_logs(given: Any, dims: tuple[int, ...] | None) -> _Found | None:
    """Probabilities, or raw scores, where logarithms of probabilities are expected."""
    node = given.grad_fn
    values = _values(given, dims)
    if values is None or values.logs_add_up or values.high <= 1e-4:
        return None
    if _are_probabilities(values):
        if node is None:
            return ("probabilities", Way((), None, False), True) if values.adds_up and not given.requires_grad else None
        way = _back(node, _SHAPE | _CLAMP | _ELEMENTWISE, _NORMALISERS)
        if way is not None and (values.adds_up or _back(node, _SHAPE | _CLAMP, _SQUASHERS) is not None):
            return "probabilities", way, values.adds_up
    if node is None:
        return None
    way = _back(node, _SHAPE, _LAYERS)
    return None if way is None else ("logits", way, False)


def _target_of_kl(target: Any, log_target: bool) -> Domain | None:
    values = _values(target, None)
    if values is None:
        return None
    if log_target:
        return "probabilities" if _are_probabilities(values) and values.adds_up else None
    if values.low < -1e-4:
        return "log-probabilities" if values.logs_add_up and values.high <= 1e-4 else "numbers below 0"
    return None


def _rates(given: Any, log_input: bool) -> _Found | None:
    node = given.grad_fn
    if node is None:
        return None
    if log_input:
        way = _back(node, _SHAPE, frozenset({"Exp"}))
        return None if way is None else ("rates", way, False)
    way = _back(node, _SHAPE, _LAYERS)
    values = None if way is None else _values(given, ())
    return None if way is None or values is None or values.low >= 0 else ("numbers below 0", way, False)


def _back(node: Any, through: frozenset[str], makers: frozenset[str]) -> Way | None:
    """The nearest node of one of these kinds that the value comes from through nodes of the others.

    Among normalisers, a custom Function counts as one, and a division by a constant does not.
    """
    order = [node]
    seen = {node}
    plain = True
    for each in order:  # grows while it is read
        kind = _kind(each)
        made = kind in makers or (makers is _NORMALISERS and hasattr(type(each), "_forward_cls"))
        if made and (kind != "Div" or sum(source is not None for source, _ in each.next_functions) > 1):
            return Way(tuple(node_sequence(one) for one in order), node_sequence(each), plain and each is order[-1])
        if kind not in through or len(order) > _MOST_NODES:
            continue
        plain = plain and kind in _SHAPE
        for source, _ in each.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                order.append(source)
    return None


def _kind(node: Any) -> str:
    return str(node.name()).rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")
