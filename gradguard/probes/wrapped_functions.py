"""Functions of torch's that a program or a library has wrapped: `F.relu = wrapper(F.relu)`, `torch.Tensor.backward = scaled`.

A function of torch's hands itself to the function modes by its public name. Under that name stands the wrapper, which has been called
already (or, where an operator comes by, would not be called at all): to call it would run it once too often. What is wanted is the
function that asked. Those written in Python stand on the stack; methods written in C are still to be had of the tensor's base class.
"""

from __future__ import annotations

import gc
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from gradguard.torch_compat.private_api import call_alone

_HERE = __name__.partition(".")[0]
_known: dict[int, tuple[CodeType, FunctionType | None]] = {}  # of torch's only, by id: Dynamo makes code that has no hash


def asked_by(func: Any, frame: FrameType | None) -> Any:
    """The function of torch's that handed a wrapper of itself to a function mode; the function given where there is no such.

    Args:
        func: what the mode is to call.
        frame: of what has called the mode.
    """
    if str(getattr(type(func), "__module__", "")).partition(".")[0] == "torch":  # an operator as an object, a scripted function
        return func
    handed = False
    while frame is not None and (
        (hands := id(frame.f_code) in _HANDING) or str(frame.f_globals.get("__name__")).partition(".")[0] == _HERE
    ):
        handed = handed or hands
        frame = frame.f_back
    if not handed:  # a call of C's
        return next((_in_c(name) or func for name, value in vars(torch.Tensor).items() if value is func), func)
    if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] != "torch":
        return func
    code = frame.f_code
    if type(func) is FunctionType and func.__code__ is code:
        return func
    known = _known.get(id(code))
    if known is None or known[0] is not code:
        known = _known[id(code)] = (code, _function_of(code))
    return func if known[1] is None else known[1]


def _in_c(name: str) -> Any:
    return vars(torch._C.TensorBase).get(name)


def _function_of(code: CodeType) -> FunctionType | None:
    """The function that runs this code; None where several do."""
    found = [item for item in gc.get_referrers(code) if type(item) is FunctionType and item.__code__ is code]
    return found[0] if len(found) == 1 else None


_HANDING = {id(torch.overrides.handle_torch_function.__code__), id(call_alone.__code__)}
