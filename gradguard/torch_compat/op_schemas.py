"""What torch's own schemas say of its functions, by their last names: which give views, which write in place.

Read at the first question, which takes some 50 ms.
"""

from __future__ import annotations

from functools import cache

import torch

_ACCESS = {"T", "mT", "H", "mH", "real", "imag", "data"}  # attributes of a tensor
# written in Python, or bound without a schema
_UNLISTED = {
    *("float", "half", "double", "bfloat16", "numpy", "cpu", "requires_grad_", "as_tensor", "from_numpy", "asarray"),
    *("broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d"),
}


@cache
def view_names() -> frozenset[str]:
    """The functions, methods and attributes that can give the memory of what they are given, and not a copy."""
    found = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        for given in schema.returns
        if given.alias_info is not None and not given.alias_info.is_write and "Tensor" in str(given.type)
    }
    return frozenset((found - set(dir(dict))) | _ACCESS | _UNLISTED)


@cache
def factory_names() -> frozenset[str]:
    """The functions that make a tensor out of none: of a size, a range, by chance."""
    return frozenset(
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and {"dtype", "device"} <= {each.name for each in schema.arguments}
        if not any("Tensor" in str(each.type) for each in schema.arguments) and not schema.name.startswith("aten::sparse_")
    )


def is_in_place(name: str) -> bool:
    """Whether a method of this name writes into the tensor that it is called on."""
    return name.endswith("_") and not name.startswith("__") and (hasattr(torch.Tensor, name) or name.startswith("_foreach_"))
