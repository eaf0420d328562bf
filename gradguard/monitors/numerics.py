"""What the numerics rules look at in every step, and what that costs.

Before each backward: is the loss finite (`item()` of a scalar on the CPU, 1 µs). After it: is the gradient of one small
parameter at the model's far end finite (3 µs): a NaN born anywhere on the way to it arrives there. Where no op of the graph can
make one out of finite values, one backward in 16, later in 128, is enough for that. All parameters are looked at in the first
steps, then in one backward of 16, later of 64 (in traced steps: of 8): by number, so that what is found does not depend on how fast
the machine is.
Where the graph has ops whose derivative can be infinite (`risks`), what they saved is held until the backward has run: their
places in the graph are found once and then followed, a few hops each.

On a GPU nothing of this synchronises in an untraced step: the loss's flag travels behind the computation and is read a step
later (`deferred`).
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.graph.unbounded_derivatives import RISKS, Held, hold
from gradguard.analysis.graph.walk import is_accumulate
from gradguard.analysis.run_facts.footprint import Footprints
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.moments import Moment
from gradguard.core.notes import Notes
from gradguard.instrumentation.event_buffer import ODD, Ahead, Place
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.deferred_checks import Deferred
from gradguard.monitors.sentinels import beside, ends
from gradguard.torch_compat.private_api import own_part

_WALKS = 2  # of a backward call's graph, before its paths are trusted
_MOST_SITES = 16
_MOST_NODES = 4_096
_MOST_HOPS = 96
_MOST_HELD = 32
_HISTORY = 64
_FULL_TRACED = 8  # of so many backward calls of a line one looks at all gradients, which takes up to a tenth of an untraced step
# Where the graph has no op whose derivative can be infinite, gradients overflow only slowly: after the first backward calls of a
# line they are looked at in every 16th, then in fewer: if they do overflow, the step makes the next loss NaN, which is looked at always.
_EVERY_STEP, _STRIDE = 64, 16
_LATER, _LATER_STRIDE = 256, 64
_LONG, _LONG_STRIDE = 1_024, 128
_vector_norm = torch.linalg.vector_norm
_NOTHING, _SHRUNK = 1e-9, 1e-6  # a gradient norm below both, absolutely and against the largest so far, is as good as zero
DEAD_STEPS = 30  # gradients of exactly zero in so many backward calls in a row


@dataclass
class Plan:
    """What is known of the backward calls at one line.

    Attributes:
        paths: ways from the root to risky nodes (positions in `next_functions`), with the type expected there and its kind.
        sentinel, near: a small parameter at the far end, and the one nearest the loss.
        others: parameters that a risky op would spoil without reaching the far end: those its result is multiplied with.
        leaves: every leaf of the graph.
        losses, norms: recent values, newest last; the norm is the sentinel's gradient's.
        zeros: backward calls in a row that gave the sentinel a gradient of exactly zero.
    """

    site: CallSite | None = None
    paths: list[tuple[tuple[int, ...], type, str]] = field(default_factory=list)
    sentinel: weakref.ref[torch.Tensor] | None = None
    near: weakref.ref[torch.Tensor] | None = None
    others: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    walks: int = 0
    calls: int = 0
    zeros: int = 0
    largest: float = 0.0  # norm so far
    dead_norm: float = 0.0  # the last norm that counted as none
    asked: int = 0
    dead_told: bool = False


class Numbers:
    """The memory of the numerics rules of one guard. Holds tensors and nodes only while a backward call runs."""

    def __init__(self) -> None:
        self.footprints = Footprints()
        self.plans: dict[Place, Plan] = {}
        self.call = -1
        self.plan = Plan()
        self.loss_bad = False
        self.grads_bad = False
        self.held: list[Held] = []
        self.pending: Diagnosis | None = None  # a non-finite gradient that no optimizer has used yet
        self.told: Diagnosis | None = None  # said already, and the run has not recovered since
        self.deferred = Deferred()
        self.tried = 0  # non-finite losses in a row within a line search
        self.scaler: weakref.ref[Any] | None = None
        self.unscaled_bad = 0  # non-finite losses in a row under a GradScaler
        self._was_traced = False

    def ahead(self) -> dict[Place, int] | None:
        """Backward calls, by their line, whose loss alone has to be looked at: where the graph is known and has no risky ops."""
        if self.tried or self.unscaled_bad or self.told is not None or self.pending is not None:
            return None
        return {
            place: next(count for count in range(_LONG_STRIDE + 1) if _due(plan.calls + count + 1))
            for place, plan in self.plans.items()
            if plan.walks >= _WALKS and not plan.paths and not plan.zeros
        }

    def went_by(self, place: Place, index: int, values: list[float]) -> None:
        """Backward calls at one place of which only the loss was looked at, and found finite and of no odd size; the last one's number."""
        plan = self.plans[place]
        plan.losses.extend(values)
        plan.calls += len(values)
        self.plan = plan
        self.call = index
        self.loss_bad = self.grads_bad = self._was_traced = False

    # -- before backward ----------------------------------------------------------------------------------------------

    def before_backward(self, facts: dict[str, Any], traced: bool) -> None:
        """Looks at the loss; notes where risky ops are."""
        call = facts["call"]
        if call is None or call.index == self.call:
            return
        self.call = call.index
        if self.held:
            self.held = []
        self.loss_bad = self.grads_bad = False
        if call.nested:
            return
        plan = self._plan(call.site)
        plan.calls += 1
        roots = facts["roots"]
        for root in roots[:4]:
            value = self.read(root, traced)
            if value is None:
                continue
            if math.isfinite(value):
                plan.losses.append(value)
            else:
                self.loss_bad = True
        if not self.loss_bad:
            self.unscaled_bad = self.tried = 0
        if not self.loss_bad and self.told is not None and plan.losses and self.pending is None:
            self.told = None  # it has recovered: a new one is news again
        if self.loss_bad or call.kind != "backward" or len(roots) != 1:
            return
        node = getattr(roots[0], "grad_fn", None)
        if node is None:
            return
        if plan.walks < _WALKS or (traced and not self._was_traced):
            self._walk(plan, node, traced)
        elif plan.paths:
            self._follow(plan, node, traced)
        self._was_traced = traced

    def _plan(self, site: CallSite | None) -> Plan:
        """The plan of a line. Keyed by the code object's identity, since hashing one costs more than the look at the loss."""
        key = (0, 0) if site is None else (id(site[0]), site[1])
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= _MOST_SITES:
                self.plans.pop(next(iter(self.plans)))
            plan = self.plans[key] = Plan(site)  # which keeps the code object, and with it its identity
        self.plan = plan
        return plan

    def read(self, root: Any, traced: bool) -> float | None:
        """A scalar root's value; None where it is no scalar or reading it would cost a synchronisation."""
        try:
            if root.numel() != 1:
                return None
            if not root.is_cpu and not traced:
                return self.deferred.look(root)
            value = own_part(root).item()
            return value if type(value) is float else None
        except internal_error():  # fake, functorch and meta tensors have no value
            return None

    def _walk(self, plan: Plan, root: Any, traced: bool) -> None:
        plan.walks += 1
        self._was_traced = traced
        order: list[Any] = [root]
        way: dict[Any, tuple[Any, int]] = {root: (None, 0)}
        depth: dict[Any, int] = {root: 0}
        for node in order:  # grows while it is read: breadth first, so that paths are short
            if len(order) > _MOST_NODES:
                break
            for position, (source, _) in enumerate(node.next_functions):
                if source is not None and source not in way:
                    way[source] = (node, position)
                    depth[source] = depth[node] + 1
                    order.append(source)
        plan.paths = []
        leaves: list[torch.Tensor] = []
        depths: list[int] = []
        risky: list[Any] = []
        hops = 0
        for node in order:
            if is_accumulate(node):
                variable = getattr(node, "variable", None)
                if variable is not None:
                    leaves.append(variable)
                    depths.append(depth[node])
            else:
                kind = node_kind(node)
                if kind not in RISKS or (kind == "LogSoftmax" and node_kind(way[node][0]).startswith("NllLoss")):
                    continue  # what cross entropy cannot digest shows in the loss
                held = hold(node, kind)
                if held is None:
                    continue
                risky.append(node)
                if len(self.held) < _MOST_HELD:
                    self.held.append(held)
                path: list[int] = []
                at = node
                while way[at][0] is not None:
                    at, position = way[at]
                    path.append(position)
                if hops + len(path) <= _MOST_HOPS and len(plan.paths) < _MOST_HELD:
                    hops += len(path)
                    plan.paths.append((tuple(reversed(path)), type(node), kind))
        plan.leaves = [TensorRef(leaf) for leaf in leaves]
        far, near = ends(leaves, depths)
        plan.sentinel = None if far is None else TensorRef(far)
        plan.near = None if near is None else TensorRef(near)
        plan.others = [TensorRef(leaf) for leaf in beside(order, risky)]
        if traced and len(order) <= _MOST_NODES:
            self.footprints.add(order)

    def _follow(self, plan: Plan, root: Any, traced: bool) -> None:
        for path, expected, kind in plan.paths:
            node = root
            for position in path:
                edges = node.next_functions
                node = edges[position][0] if position < len(edges) else None
                if node is None:
                    break
            if type(node) is not expected:
                # the graph has another shape now: its paths are found again, but not for ever
                if plan.walks < 8 + plan.calls // 200:
                    self.held = []
                    self._walk(plan, root, traced)
                return
            held = hold(node, kind)
            if held is not None:
                self.held.append(held)

    # -- after backward -----------------------------------------------------------------------------------------------

    def after_backward(self, facts: dict[str, Any], traced: bool) -> bool:
        """Whether this backward call left a non-finite gradient. What is held must be let go by `release`."""
        call = facts["call"]
        if call is None or call.index != self.call or self.loss_bad or call.kind != "backward":
            return False
        plan = self.plan
        if not (traced or plan.paths or plan.zeros or _due(plan.calls)):
            return False
        leaf = plan.sentinel() if plan.sentinel is not None else None
        if leaf is not None:
            norm = self.norm(leaf, traced)
            if norm is not None:
                if norm <= _NOTHING and (norm <= plan.largest * _SHRUNK or norm <= self._near_norm(plan, traced) * _SHRUNK):
                    plan.zeros += 1
                    plan.dead_norm = norm
                else:
                    if norm > plan.largest:
                        plan.largest = norm
                    plan.zeros = 0
                    if norm == norm:
                        plan.norms.append(norm)
                if not math.isfinite(norm) and not self._is_finite(leaf):
                    self.grads_bad = True
        if plan.others and not self.grads_bad:
            self.grads_bad = any(self._bad(ref(), traced) for ref in plan.others)
        if not self.grads_bad and (plan.calls <= _WALKS or not plan.calls % (_FULL_TRACED if traced else _stride(plan.calls))):
            self.grads_bad = any(self._bad(ref(), traced) for ref in plan.leaves)
        return self.grads_bad

    def _near_norm(self, plan: Plan, traced: bool) -> float:
        leaf = plan.near() if plan.near is not None else None
        return (self.norm(leaf, traced) if leaf is not None else None) or 0.0

    def release(self) -> None:
        """Lets go of everything of the graph."""
        self.held = []

    @staticmethod
    def norm(leaf: torch.Tensor, traced: bool) -> float | None:
        """The norm of a leaf's gradient; None where there is none or reading it would cost a synchronisation."""
        try:
            grad = leaf.grad
            if grad is None or not (grad.is_cpu or traced):
                return None
            if grad.requires_grad or grad.is_sparse:
                grad = grad.detach()
                if grad.is_sparse:
                    grad = grad.coalesce().values()
            value: float = _vector_norm(own_part(grad)).item()
            return value
        except internal_error():
            return None

    @classmethod
    def _bad(cls, leaf: torch.Tensor | None, traced: bool) -> bool:
        if leaf is None:
            return False
        norm = cls.norm(leaf, traced)
        return norm is not None and not math.isfinite(norm) and not cls._is_finite(leaf)

    @staticmethod
    def _is_finite(leaf: torch.Tensor) -> bool:
        """The exact answer: a norm overflows before its elements do."""
        grad = leaf.grad
        if grad is None:
            return True
        grad = own_part(grad)
        if grad.layout != torch.strided:
            grad = grad.coalesce().values()
        return bool(torch.isfinite(grad).all())


def _due(calls: int) -> bool:
    """Whether gradients are looked at in the backward call of this number."""
    return calls < _EVERY_STEP or not calls % (_stride(calls) if calls < _LONG else _LONG_STRIDE)


def _stride(calls: int) -> int:
    return _STRIDE if calls < _LATER else _LATER_STRIDE


def odd(notes: Notes, moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    """Whether a loss, or what the last gradients were, is anything but ordinary: asked once for all rules that look at the loss."""
    state = notes[Numbers]
    state.before_backward(facts, traced)
    losses = state.plan.losses
    return state.loss_bad or state.plan.zeros > 0 or (bool(losses) and not -ODD < losses[-1] < ODD)


def _ahead(notes: Notes) -> dict[Place, int]:
    """Of all numerics rules together."""
    found = notes.get(Numbers)
    return (None if found is None else found.ahead()) or {}


def _went_by(notes: Notes, place: Place, index: int, values: list[float]) -> None:
    notes[Numbers].went_by(place, index, values)


AHEAD = Ahead(_ahead, _went_by)
