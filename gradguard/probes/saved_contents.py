"""Notes the contents of saved tensors, to be compared when backward needs them.

At `contents: numpy` only of memory that numpy can write; at `all` (level forensic) of everything that the nodes of a call have
saved, whoever may write it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gradguard.instrumentation.facts import Prints
from gradguard.instrumentation.fingerprints import fingerprint
from gradguard.instrumentation.journal import Journal
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.torch_compat.private_api import (
    grad_fn_of,
    jit_tracing,
    node_sequence,
    numpy_reachable,
    quiet,
    saved_data,
    saved_slots,
    storage_key,
    version_of,
)

_Parameter = torch.nn.Parameter
_MOST_NODES = 20_000  # a Python object that a node is given lives as long: freeing a chain of 50,000 overflows the stack


class Contents:
    """Writes content fingerprints to a journal. The caller sees to it that no mode hears the questions."""

    PART = "record of contents"

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.whose = "numpy"  # contents are compared: "none", "numpy" (what numpy can write) or "all"
        # A parameter is alive between its uses, so its memory cannot have become another tensor's: its contents are noted once
        # for all the calls of a forward pass.
        self._steady: dict[int, tuple[weakref.ref[torch.Tensor], int, Prints]] = {}
        self._era = -1
        self._looked = 0  # nodes since the last backward call

    def note(self, tensor: torch.Tensor, before: int, after: int, sampled: bool = False) -> Prints | None:
        """Notes what the memory holds now, for the nodes with sequence numbers from `before` up to `after`."""
        if tensor.is_nested:  # which has no shape to ask for
            return None
        storage, version = storage_key(tensor), version_of(tensor)
        mark = None if storage is None or version is None else fingerprint(tensor, sampled)
        if storage is None or version is None or mark is None:
            return None
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        item = Prints(storage, before, after, offset, shape, stride, tensor.dtype, version, mark, self.journal.tick(), sampled)
        self.journal.prints.append(item)
        return item

    def note_quietly(self, tensor: torch.Tensor, before: int, after: int) -> None:
        """`note`, where a mode may be listening."""
        with quiet():
            self.note(tensor, before, after)

    def note_saved(self, args: tuple[Any, ...], result: Any, before: int, after: int) -> None:
        """Notes everything that the nodes of this call have saved."""
        if jit_tracing():  # what is asked of a tensor there goes into the traced program
            return
        if self._era != self.journal.backward_count:
            self._era = self.journal.backward_count
            self._steady.clear()
            self._looked = 0
        if self._looked > _MOST_NODES:
            return
        parameters: dict[int | None, torch.Tensor] = {storage_key(arg): arg for arg in args if isinstance(arg, _Parameter)}
        stack = [grad_fn_of(out) for out in (result if type(result) in (tuple, list) else (result,)) if isinstance(out, torch.Tensor)]
        seen: set[Any] = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen or not before <= node_sequence(node) < after:
                continue
            seen.add(node)
            self._looked += 1
            for _, slot in saved_slots(node):
                saved = saved_data(slot)
                if saved is not None and saved.layout == torch.strided and not saved.is_nested:
                    self._saved(saved, parameters, before, after)
            if after - before > 1:
                stack.extend(source for source, _ in node.next_functions)

    def _saved(self, saved: torch.Tensor, parameters: dict[int | None, torch.Tensor], before: int, after: int) -> None:
        key = storage_key(saved)
        parameter = parameters.get(key)
        by_numpy = numpy_reachable(saved)  # there every element counts, as at the levels below
        if key is None or parameter is None or by_numpy:
            self.note(saved, before, after, sampled=not by_numpy)
            return
        steady = self._steady.get(key)
        if steady is not None and steady[0]() is parameter and steady[1] == version_of(saved) and steady[2].shape == tuple(saved.shape):
            steady[2].seq_to = after
            return
        item = self.note(saved, before, after, sampled=True)
        if item is not None:
            self._steady[key] = (TensorRef(parameter), item.version, item)
