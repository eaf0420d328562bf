"""Level forensic: a hook on every node of the graph that computes, for the time of one backward call, to see which made the first
non-finite gradient.

What the rules infer from saved values elsewhere is seen here as it happens, also in ops and custom Functions that save nothing.
Leaves are left alone: AccumulateGrad may take a gradient over instead of copying it, and must not be watched at that. So are nodes
whose saved values come out of a hook of the program's: PyTorch keeps the gradients that a node gets only where it has hooks by then,
and a hook that the program's hook registers would see others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradguard.core.callsite import is_torch_or_own
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import function_code
from gradguard.instrumentation.facts import BrokenFact
from gradguard.instrumentation.journal import Journal
from gradguard.probes.finite_results import all_finite
from gradguard.torch_compat.private_api import ACCUMULATE_SEQ, node_sequence, own_part, quiet, saved_slots, unpacking_hook

# Their backwards move or add what they are given: finite gradients in, finite gradients out.
_HARMLESS = frozenset(
    f"{name}Backward{n}"
    for name in (
        *("Add", "Sub", "Neg", "Relu", "T", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Transpose", "Permute", "Alias", "Clone"),
        *("Unsqueeze", "Squeeze", "Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Stack", "Cat", "Expand", "AsStrided", "ToCopy"),
    )
    for n in range(3)
)


class NodeWatch:
    """The hooks of one backward call.

    Args:
        nodes: those of the call's graph.
        journal: gets the first node whose gradients in are finite and whose gradients out are not.
        call: the backward call's index.
    """

    def __init__(self, nodes: list[Any], journal: Journal, call: int) -> None:
        self._handles: list[Any] = []
        try:
            for node in nodes:
                name = str(node.name())
                if name not in _HARMLESS and node_sequence(node) < ACCUMULATE_SEQ and not _runs_hooks(node):
                    try:
                        self._handles.append(node.register_hook(_hook(node_sequence(node), name, journal, call)))
                    except internal_error():  # a kind of node that takes no hooks
                        continue
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Takes the hooks off: a retained graph must not keep them."""
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()


def _runs_hooks(node: Any) -> bool:
    """Whether the program's own code is run to get at what the node has saved; checkpointing's is torch's."""
    for _, slot in saved_slots(node):
        hook = unpacking_hook(slot)
        code = function_code(hook)
        if hook is not None and (code is None or not is_torch_or_own(code.co_filename)):
            return True
    return False


def _hook(seq: int, name: str, journal: Journal, call: int) -> Callable[[Any, Any], None]:
    def look(made: Any, given: Any) -> None:
        known = journal.broken
        if known is not None and known.call == call:
            return
        try:
            with quiet():
                for gradient in made:
                    if not _finite(gradient):
                        break
                else:
                    return
                if not all(_finite(gradient) for gradient in given):
                    return
                worst = next(gradient for gradient in made if not _finite(gradient)).detach()
                worst = own_part(worst)
                journal.broken = BrokenFact(call, seq, name, int((~torch.isfinite(worst)).sum()), worst.numel())
        except internal_error():  # gradients of odd kinds do not answer
            return

    return look


def _finite(gradient: Any) -> bool:
    if not isinstance(gradient, torch.Tensor) or not gradient.is_floating_point() or gradient.layout != torch.strided or gradient.is_nested:
        return True
    return all_finite(own_part(gradient).detach())
