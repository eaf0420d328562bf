"""Checksums of tensors' contents, to tell whether memory was written behind the version counter."""

from __future__ import annotations

import ctypes
import math
import zlib

import torch

from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.private_api import has_memory, has_own_dispatch

_SMALL = 65_536  # bytes; above it torch sums faster than zlib goes through them
_SAMPLE = 1 << 15  # bytes of a sample
_BLOCK = 1_024  # bytes of each piece of it


def fingerprint(tensor: torch.Tensor, sampled: bool = False) -> int | None:
    """A checksum of a tensor's contents that also depends on their order; None where it cannot be taken.

    Large tensors cost about two sums over them (`torch.hash_tensor` costs six and, an exclusive or, does not see a sort). The
    caller sees to it that no function mode is on.

    Args:
        tensor: its elements as they lie, on any device.
        sampled: of more than 64 KiB, only 32 to 63 pieces of 1 KiB are read, evenly spaced.
    """
    if not has_memory(tensor):
        return None
    try:
        plain = type(tensor) is torch.Tensor
        if plain and tensor.is_cpu and tensor.is_contiguous():
            size = tensor.numel() * tensor.element_size()
            if size <= _SMALL:
                return _of_memory(tensor, size)
            if sampled:
                return _of_pieces(tensor, size)
        if not plain and has_own_dispatch(tensor):
            return None
        with torch.no_grad():
            values = tensor.detach().contiguous()
            size = values.numel() * values.element_size()
            if values.is_cpu and size <= _SMALL:
                return _of_memory(values, size)
            if values.is_cpu and sampled:
                return _of_pieces(values, size)
            if values.is_complex():
                values = torch.view_as_real(values)
            if values.storage_offset() * values.element_size() % 8:
                values = values.clone()  # eight bytes are read at a time
            raw = values.reshape(-1).view(torch.uint8)
            if sampled and size > _SAMPLE:
                blocks = raw[: size // _BLOCK * _BLOCK].view(-1, _BLOCK)
                raw = blocks[:: blocks.shape[0] * _BLOCK // _SAMPLE].reshape(-1)
            return _of_words(raw, raw.numel())
    except internal_error():  # tensors without memory of their own
        return None


def _of_memory(tensor: torch.Tensor, size: int) -> int | None:
    if not size:
        return 0
    address = tensor.data_ptr()
    return zlib.crc32((ctypes.c_char * size).from_address(address)) if address else None


def _of_pieces(tensor: torch.Tensor, size: int) -> int | None:
    """Of a contiguous tensor on the CPU, larger than a sample: its pieces are read where they lie, with no copy and no op."""
    address = tensor.data_ptr()
    if not address:
        return None
    memory = memoryview((ctypes.c_char * size).from_address(address))
    mark = 0
    for start in range(0, size - _BLOCK + 1, size // _SAMPLE * _BLOCK):
        mark = zlib.crc32(memory[start : start + _BLOCK], mark)
    return mark


def _of_words(raw: torch.Tensor, size: int) -> int:
    """From the weighted sums of the rows and of the columns of the bytes taken as a square of words, and the bytes left over."""
    side = math.isqrt(size // 8)
    square, rest = raw[: 8 * side * side].view(torch.int64).view(side, side), raw[8 * side * side :].to(torch.int64)
    weights = torch.arange(1, max(side, rest.numel()) + 1, dtype=torch.int64, device=raw.device)
    rows, columns = square.sum(1), square.sum(0)
    marks = torch.stack([(rows * weights[:side]).sum(), (columns * weights[:side]).sum(), (rest * weights[: rest.numel()]).sum()])
    return hash(tuple(marks.tolist()))
