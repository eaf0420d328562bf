"""Calls of backward() and autograd.grad(): what the journal keeps of one."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from gradguard.core.callsite import user_stack
from gradguard.core.safe_read import elements, is_quiet
from gradguard.instrumentation.facts import BackwardFact
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.torch_compat.private_api import grad_fn_of, is_a, node_sequence, others_watch, quiet, sequence_number


def backward_fact(
    journal: Journal,
    kind: str,
    frame: FrameType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    roots: tuple[Any, ...],
    step: int,
    traced: bool,
    nested: bool,
) -> BackwardFact:
    """The journal's entry of a backward call, with its place, its roots and whether it keeps the graph."""
    stack = user_stack(frame)
    at = 2 if kind == "backward" else 3
    retain = args[at] if len(args) > at else kwargs.get("retain_graph")
    create = args[at + 1] if len(args) > at + 1 else kwargs.get("create_graph", False)
    if len(roots) == 1 and type(roots[0]) is torch.Tensor and not traced and not others_watch():
        node = roots[0].grad_fn  # nobody hears the question
        seqs: tuple[int, ...] = (-1 if node is None else node_sequence(node),)
    else:
        with quiet():
            nodes = [grad_fn_of(root) for root in roots]
            seqs = tuple([-1 if node is None else node_sequence(node) for node in nodes])
    return BackwardFact(
        journal.backward_count + 1,
        journal.tick(),
        step,
        stack[0] if stack else None,
        "backward" if kind == "backward" else "grad",
        seqs,
        sequence_number(),
        bool(create if retain is None else retain),
        bool(create),
        traced,
        nested,
        stack,
        tuple([TensorRef(root) for root in roots if issubclass(type(root), torch.Tensor)]),
    )


def is_same_call(call: BackwardFact, other: BackwardFact | None) -> bool:
    """Whether torch has only handed a call on: under a torch-function mode `autograd.grad` is called once more by itself."""
    return other is not None and (call.kind, call.root_seqs, call.stack) == (other.kind, other.root_seqs, other.stack)


def roots_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a call differentiates."""
    return _tensors(args, kwargs, 0, ("tensors", "outputs"))


def inputs_of(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a call differentiates by, where it is told."""
    return _tensors(args, kwargs, 1 if kind == "grad" else 5, ("inputs",))


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The tensors of one argument, given by position or by one of its names."""
    value = args[position] if len(args) > position else next((kwargs[name] for name in names if name in kwargs), None)
    if value is None:
        return ()
    if _has_graph(value):
        return (value,)
    # an iterator is PyTorch's to read: read here, it would be empty there, and no gradient would be computed
    items = elements(value) if is_quiet(value) and isinstance(value, (list, tuple, dict)) else ()
    return tuple([item if _has_graph(item) else None for item in items])


def _has_graph(value: Any) -> bool:
    """Whether a root or an input is one to look at, and no tensor-like, which has whatever attributes it has."""
    return is_a(value, torch.Tensor) or is_a(value, GradientEdge)
