"""What a call of backward() or autograd.grad() was given, as a fact of the journal."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gradguard.callsite import user_stack
from gradguard.journal import BackwardFact
from gradguard.torch_internals import node_sequence, others_watch, quiet, sequence_number

if TYPE_CHECKING:
    from gradguard.session import Session


def backward_fact(
    session: Session, kind: str, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any], roots: tuple[Any, ...]
) -> BackwardFact:
    """The journal's entry of a backward call, with its place, its roots and whether it keeps the graph."""
    journal = session.journal
    stack = user_stack(frame)
    at = 2 if kind == "backward" else 3
    retain = args[at] if len(args) > at else kwargs.get("retain_graph")
    create = args[at + 1] if len(args) > at + 1 else kwargs.get("create_graph", False)
    if len(roots) == 1 and type(roots[0]) is torch.Tensor and not session.tracing and not others_watch():
        node = roots[0].grad_fn  # nobody hears the question
        seqs: tuple[int, ...] = (-1 if node is None else node_sequence(node),)
    else:
        with quiet():
            nodes = [getattr(root, "grad_fn", None) for root in roots]
            seqs = tuple([-1 if node is None else node_sequence(node) for node in nodes])
    return BackwardFact(
        journal.backward_count + 1,
        journal.tick(),
        session.step,
        stack[0] if stack else None,
        "backward" if kind == "backward" else "grad",
        seqs,
        sequence_number(),
        bool(create if retain is None else retain),
        bool(create),
        session.tracing,
        session.depth > 0,
        stack,
    )


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The tensors of one argument, given by position or by one of its names."""
    value = args[position] if len(args) > position else next((kwargs[name] for name in names if name in kwargs), None)
    if value is None:
        return ()
    if isinstance(value, torch.Tensor) or hasattr(value, "node"):
        return (value,)
    if isinstance(value, dict):
        return tuple(value.values())
    # an iterator is PyTorch's to read: read here, it would be empty there, and no gradient would be computed
    return tuple(value) if isinstance(value, (list, tuple)) else ()
