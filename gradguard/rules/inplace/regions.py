"""Do two strided tensors over one memory share an element? Columns of a matrix interleave, so that their ranges do not tell."""

from __future__ import annotations

import torch

from gradguard.instrumentation.facts import Region

_MOST = 1 << 24  # elements between the first and the last that are looked at one by one


def meet(one: Region, other: Region) -> bool | None:
    """Whether they have an element in common; None where that would take too long to find out."""
    if 0 in one.shape or 0 in other.shape:
        return False
    if one.dtype.itemsize != other.dtype.itemsize:
        one, other = _in_bytes(one), _in_bytes(other)
    if max(one.offset, other.offset) > min(_last(one), _last(other)):
        return False
    if (_is_dense(one) and _ends_in(other, one)) or (_is_dense(other) and _ends_in(one, other)):
        return True
    size = max(_last(one), _last(other)) - min(one.offset, other.offset) + 1
    if size > _MOST:
        return None
    start = min(one.offset, other.offset)
    marked = torch.zeros(size, dtype=torch.bool)
    shape = [1 if not step else length for length, step in zip(one.shape, one.stride, strict=True)]  # an expanded one is no place to write
    marked.as_strided(shape, one.stride, one.offset - start).fill_(True)
    return bool(marked.as_strided(other.shape, other.stride, other.offset - start).any())


def _ends_in(region: Region, dense: Region) -> bool:
    return any(dense.offset <= end <= _last(dense) for end in (region.offset, _last(region)))


def _last(region: Region) -> int:
    return region.offset + sum((length - 1) * step for length, step in zip(region.shape, region.stride, strict=True))


def _is_dense(region: Region) -> bool:
    """Whether it has every element between its first and its last."""
    span = 1
    for length, step in sorted(zip(region.shape, region.stride, strict=True), key=lambda pair: pair[1]):
        if length == 1:
            continue
        if step > span:
            return False
        span += (length - 1) * step
    return True


def _in_bytes(region: Region) -> Region:
    size = region.dtype.itemsize
    return Region(region.offset * size, (*region.shape, size), (*(step * size for step in region.stride), 1), torch.uint8)
