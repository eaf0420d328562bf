"""Why the backward pass of an op needs the value it saved, in one clause an op."""

from __future__ import annotations

_OUTPUT = {
    "sigmoid": "the derivative of sigmoid is computed from its own output, `s * (1 - s)`",
    "tanh": "the derivative of tanh is computed from its own output, `1 - t**2`",
    "softmax": "the derivative of softmax is computed from its own output",
    "log_softmax": "the derivative of log_softmax is computed from its own output",
    "exp": "the derivative of exp is its own output",
    "sqrt": "the derivative of sqrt is computed from its own output, `1 / (2 * sqrt(x))`",
    "rsqrt": "the derivative of rsqrt is computed from its own output",
    "relu": "the derivative of ReLU is read off its own output (where it is positive)",
    "reciprocal": "the derivative of `1 / x` is computed from its own output",
    "elu": "the derivative of elu is computed from its own output",
}
_INPUT = {
    "mul": "the gradient of a product is the gradient coming in times the *other* factor",
    "div": "the gradient of a quotient needs numerator and denominator",
    "matmul": "the gradient of a matrix product is computed with the other matrix",
    "linear": "a linear layer's gradients are computed from its input and its weight",
    "conv2d": "a convolution's gradients are computed from its input and its weight",
    "pow": "the derivative of a power is computed from its base",
    "square": "the derivative of a square is computed from what was squared",
    "log": "the derivative of log is one over its input",
    "sin": "the derivative of sin is the cosine of its input",
    "cos": "the derivative of cos is minus the sine of its input",
    "abs": "the derivative of abs is the sign of its input",
    "dot": "the gradient of a dot product is the other vector",
    "norm": "the derivative of a norm is computed from its input",
    "layer_norm": "layer normalisation's gradient is computed from its input",
    "batch_norm": "batch normalisation's gradient is computed from its input",
    "embedding": "an embedding's gradient needs the indices",
    "softplus": "the derivative of softplus is computed from its input",
    "gelu": "the derivative of gelu is computed from its input",
    "silu": "the derivative of silu is computed from its input",
    "leaky_relu": "the derivative of leaky_relu depends on the sign of its input",
    "clamp": "the derivative of clamp depends on which inputs lay inside the bounds",
    "gather": "the gradient of gather needs the indices",
    "index_select": "the gradient of an index needs the indices",
    "gru": "a GRU's gradients are computed from its inputs, states and weights",
    "gru_cell": "a GRU cell's gradients are computed from its input, its state and its weights",
    "lstm": "an LSTM's gradients are computed from its inputs, states and weights",
    "lstm_cell": "an LSTM cell's gradients are computed from its input, its state and its weights",
}
_SAME = {
    "mm": "matmul",
    "bmm": "matmul",
    "addmm": "linear",
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "mv": "matmul",
    "einsum": "matmul",
    "baddbmm": "matmul",
    "conv1d": "conv2d",
    "conv3d": "conv2d",
    "convolution": "conv2d",
    "conv_transpose2d": "conv2d",
    "native_layer_norm": "layer_norm",
    "native_batch_norm": "batch_norm",
    "threshold": "relu",
    "relu_": "relu",
    "__pow__": "pow",
    "__rpow__": "pow",
    "true_divide": "div",
    "__truediv__": "div",
    "__rtruediv__": "div",
    "multiply": "mul",
    "__mul__": "mul",
    "__rmul__": "mul",
    "linalg_vector_norm": "norm",
    "normalize": "norm",
    "mse_loss": "square",
    "hardtanh": "clamp",
    "clamp_min": "clamp",
    "clip": "clamp",
    "__getitem__": "index_select",
    "rnn_tanh": "tanh",
}


def why_needed(op: str, node_op: str, slot: str) -> str:
    """A clause that says why the saved value is needed.

    Args:
        op: the op as the user called it.
        node_op: the op of the graph node.
        slot: the name of the saved value in the node (`result`, `self`, `mat2` ...).
    """
    for name in (op, node_op):
        name = _SAME.get(name, name)
        if slot in ("result", "output", "result0") and name in _OUTPUT:
            return _OUTPUT[name]
        if slot not in ("result", "output", "result0") and name in _INPUT:
            return _INPUT[name]
    if slot in ("result", "output", "result0"):
        return f"the derivative of `{op}` is computed from its own output"
    return f"the gradient of `{op}` is computed from values of its forward pass"


def same_op(name: str) -> str:
    """One name for the ops that are the same to a reader: `bmm`, `mm` and `@` are `matmul`."""
    return _SAME.get(name, name)


def times(number: int) -> str:
    """`once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
