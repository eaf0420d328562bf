"""Calls of backward() and autograd.grad() under a guard: each becomes a fact of the journal, and an incident where it fails."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from gradguard.analysis.graph.walk import nodes_from, root_nodes
from gradguard.core.callsite import user_stack
from gradguard.core.foreign_exceptions import is_internal
from gradguard.core.safe_read import elements, is_quiet
from gradguard.instrumentation.facts import BackwardFact, Cut
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.probes.backward_nodes import NodeWatch
from gradguard.probes.operators import OpProbe
from gradguard.runtime import step_events
from gradguard.torch_compat.private_api import grad_fn_of, is_a, node_sequence, others_watch, quiet, sequence_number

if TYPE_CHECKING:
    from gradguard.runtime.incident_routing import Incidents

_BACKWARDS_PER_STEP = 64
_HANDED_ON = OpProbe.__torch_function__.__code__


def coasted_failed(session: Incidents, error: BaseException, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A backward call that was only written down (`gradguard.instrumentation.event_buffer`) has raised."""
    __tracebackhide__ = True
    session.catch_up()
    session.depth = 0
    with session.lookout:
        _backward_failed(session, error, "backward", frame, args, kwargs, args[:1], _outermost(session))


def coasted_returned(session: Incidents, frame: FrameType, args: tuple[Any, ...]) -> None:
    """A backward call in whose course something out of the ordinary came: in a hook, or in a Function's backward."""
    session.depth = 0
    session._backwards += 1
    with session.shield:
        step_events.tell(session, "after_backward", frame, _outermost(session), args[:1])


def _outermost(session: Incidents) -> BackwardFact | None:
    """The newest backward call that was not made by another."""
    return next((fact for fact in reversed(session.journal.backwards) if not fact.nested), None)


def _backward_failed(
    session: Incidents,
    error: BaseException,
    kind: str,
    frame: FrameType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    roots: tuple[Any, ...],
    call: BackwardFact | None,
) -> None:
    __tracebackhide__ = True
    if isinstance(error, Exception) and is_internal(
        error
    ):  # an exception of the training's, all the same: neither a diagnosis nor come from outside
        inputs = tensors_of(args, kwargs, 1 if kind == "grad" else 5, ("inputs",))
        session._failed(error, kind, frame, roots, inputs, call)


def run_backward(
    session: Incidents, kind: str, original: Callable[..., Any], frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a backward call of the user's, at which the rules look before and after; `Session.run_backward`.

    Raises:
        GradGuardError: what it raised, diagnosed.
    """
    __tracebackhide__ = True
    # autograd.grad is a torch function: this is the call that is under way, by way of the op probe
    if frame.f_back is not None and frame.f_back.f_code is _HANDED_ON:
        return original(*args, **kwargs)
    session._calm = False
    depth = session.depth
    call: BackwardFact | None = None
    roots: tuple[Any, ...] = ()
    again = False
    outermost = kind == "backward" and not session.depth
    with session.shield:
        if session.tracing and not session._on and not depth:  # an optimizer's step() raised: its post hook never came
            session.trace(True)
    with session.lookout:
        roots = tensors_of(args, kwargs, 0, ("tensors", "outputs"))
        call = backward_fact(session, kind, frame, args, kwargs, roots)
        again = session.depth > 0 and _is_same_call(call, session.under_way)
        if not again:
            session.under_way = session.under_way if session.depth else call
            session.journal.backward_count = call.index
            session.journal.later(call)
            if outermost:
                with session.shield:
                    step_events.before_backward(session, frame)
            session.moment("before_backward", kind, frame, roots=roots, call=call)
    if again:  # what it raises is told by the call that handed it on
        return original(*args, **kwargs)
    watch: NodeWatch | None = None
    try:
        if session.tracing and call is not None and session.run.settings.trace.node_hooks:
            with session.lookout, quiet():
                watch = NodeWatch(nodes_from(root_nodes(roots)), session.journal, call.index)
        session.depth = depth + 1
        result = original(*args, **kwargs)
    except BaseException as error:
        session.depth = depth
        if watch is not None:
            with session.lookout:
                watch.remove()
        with session.lookout:
            _backward_failed(session, error, kind, frame, args, kwargs, roots, call)
        raise
    session.depth = depth
    if watch is not None:
        with session.lookout:
            watch.remove()
    with session.lookout:
        if session.tracing and call is not None:
            if kind == "grad" and not call.create_graph:
                _gradients(session, call, result)
            if not call.nested:
                step_events.differentiated(session, call, roots)
    if outermost:
        with session.shield:
            if call is not None:
                step_events.after_backward(session, frame, call, roots)
        with session.shield:
            session._backwards += 1
            if session._backwards > _BACKWARDS_PER_STEP:  # a loop without optimizers still has steps
                session.begin_step()
    with session.lookout:
        session.moment("after_backward", kind, frame, roots=roots, call=call)
    return result


def _is_same_call(call: BackwardFact, other: BackwardFact | None) -> bool:
    """Whether torch has only handed a call on: under a torch-function mode `autograd.grad` is called once more by itself."""
    return other is not None and (call.kind, call.root_seqs, call.stack) == (other.kind, other.root_seqs, other.stack)


def _gradients(session: Incidents, call: BackwardFact, result: Any) -> None:
    """Gradients taken without create_graph have no graph of their own: what is made of them remembers that."""
    cut = Cut("detach", session.journal.tick(), call.site, "autograd.grad", call.seq, call.root_seqs)
    for gradient in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(gradient, torch.Tensor) and not gradient.requires_grad:
            session.journal.remember_cut(gradient, cut)


def backward_fact(
    session: Incidents, kind: str, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any], roots: tuple[Any, ...]
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
            nodes = [grad_fn_of(root) for root in roots]
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
        tuple([TensorRef(root) for root in roots if issubclass(type(root), torch.Tensor)]),
    )


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, names: tuple[str, ...]) -> tuple[Any, ...]:
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
