"""Which op wrote last over a value that was saved as an input: a write that autograd records becomes the tensor's own `grad_fn`.

Known without any trace, from the live graph alone. Outputs are saved detached, and writes under no_grad leave no node.
"""

from __future__ import annotations

import ast

from torch import nn

from gradguard.analysis.graph.walk import Mismatch, op_name
from gradguard.analysis.live.alive_tensors import node_of
from gradguard.analysis.program.syntax import OPERATOR_OPS
from gradguard.rules.inplace.wording import same_op
from gradguard.torch_compat.private_api import node_sequence

_INTO_PARTS = frozenset({"index_put", "masked_fill", "copy", "fill", "index_fill", "scatter"})
# calls whose node has the call's own name
_PLAIN = frozenset(
    {"add", "sub", "mul", "div", "pow", "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "clamp", "masked_fill"}
)


def last_writer(mismatch: Mismatch) -> str | None:
    """The op of the newest write that autograd has recorded since the value was saved: `relu`; None where it was a write through a view,
    or none was recorded."""
    tensor = mismatch.tensor
    # a view whose base was written gets a new node of its view's kind, which wrote nothing
    node = None if tensor is None or tensor._is_view() else node_of(tensor)
    if node is None or node is mismatch.node or node_sequence(node) <= mismatch.seq:
        return None
    op = op_name(node)
    return None if op == "copy_slices" else same_op(op)


def fits(mismatch: Mismatch, node: ast.AST | None, module: nn.Module | None) -> bool:
    """Whether what works in place can have made the write; told only where there was one write and its op is known."""
    writer = last_writer(mismatch) if mismatch.found == mismatch.expected + 1 else None
    if writer is None:
        return True
    if module is not None:
        kind = type(module).__name__.lower()
        return kind not in _PLAIN or kind == writer
    return not _cannot_be(node, writer)


def _cannot_be(node: ast.AST | None, writer: str) -> bool:
    """Whether a statement or call that writes in place does so by another op than this, as its text tells for certain."""
    if isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Subscript):
            return writer not in _INTO_PARTS
        op = OPERATOR_OPS.get(type(node.op))
        return op is not None and op != writer
    if isinstance(node, ast.Assign):
        return writer not in _INTO_PARTS
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        op = node.func.attr.rstrip("_")
        return op in _PLAIN and same_op(op) != writer
    return False
