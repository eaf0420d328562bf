"""An account of memory: what holds how many bytes, every storage counted once, and sums by line, module and operation."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Generic, Literal, NamedTuple, TypeVar

import torch

from gradguard.core.callsite import CallSite

Kind = Literal["parameters", "buffers", "gradients", "optimizer state", "saved", "older graphs"]
KINDS: tuple[Kind, ...] = ("parameters", "buffers", "gradients", "optimizer state", "saved", "older graphs")
FOR_BACKWARD: tuple[Kind, ...] = ("saved", "older graphs")
"""What autograd alone holds: it goes with its graph."""

Key = TypeVar("Key", bound=Hashable)


class Line(NamedTuple):
    """A line of the user's that made what is held."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Saved:
    """Who saved a storage for backward: the oldest graph node that did.

    Attributes:
        seq: the node's sequence number; -1 where it has none.
        op: the operation in the user's words, such as `linear`.
        site: the user's call that made the node; None where it was not seen.
        module: dotted path of the innermost module that was being called, or that owns the operation's parameter; None if unknown.
        nodes: how many nodes saved this storage.
        modules: those of all these nodes, each once.
        made: the number of the node that had made the value; `seq` of what the operation itself made, -1 of what has no node.
        alone: whether nothing but this operation takes the value, as far as the graph tells.
        step: in which it was saved, where the saved-tensor probe was on.
    """

    seq: int
    op: str
    site: CallSite | None
    module: str | None
    nodes: int = 1
    modules: tuple[str | None, ...] = ()
    made: int = -1
    alone: bool = False
    step: int | None = None

    def and_older(self, older: Saved) -> Saved:
        """What is known of a storage that another node had saved before."""
        return replace(
            older,
            module=older.module or self.module,
            nodes=self.nodes + older.nodes,
            modules=tuple(dict.fromkeys((*self.modules, *older.modules))),
            alone=False,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """One storage.

    Attributes:
        kind: what holds it; of several the first in the order of `KINDS`.
        storage: its key.
        nbytes: its whole size, of which a view may use a part.
        dtype, shape, device: of the tensor by which it was found.
        name: of a parameter, its gradient, its optimizer state or a buffer: the dotted path, where it is known.
        saved: by whom it was saved for backward; of a parameter too.
    """

    kind: Kind
    storage: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    name: str | None = None
    saved: Saved | None = None


@dataclass(frozen=True)
class Group(Generic[Key]):
    """The storages that have something in common.

    Attributes:
        key: what they have in common; None for those of which it is not known.
        rows: the largest first.
    """

    key: Key | None
    rows: tuple[Held, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


@dataclass(frozen=True)
class Account:
    """What is held, the largest first.

    Attributes:
        rows: one a storage.
        hidden: saved values of unknown size, which a hook of the program's holds (checkpointing has let them go).
    """

    rows: tuple[Held, ...] = ()
    hidden: int = 0

    def total(self, *kinds: Kind) -> int:
        """The bytes of these kinds; of all of them where none is named."""
        return sum(row.nbytes for row in self.rows if not kinds or row.kind in kinds)

    def of(self, *kinds: Kind) -> tuple[Held, ...]:
        """The rows of these kinds."""
        return tuple(row for row in self.rows if row.kind in kinds)

    def saved(self, everything: bool = False) -> tuple[Held, ...]:
        """What is saved for backward.

        Args:
            everything: also parameters, and whatever else would be held without a graph.
        """
        return tuple(row for row in self.rows if row.saved is not None and (everything or row.kind in FOR_BACKWARD))

    def by_line(self, everything: bool = False) -> list[Group[Line]]:
        """What is saved for backward by the line that saved it, the largest first."""
        line = cache(_line)
        return _grouped(self.saved(everything), lambda row: None if row.saved is None or row.saved.site is None else line(row.saved.site))

    def by_module(self, everything: bool = False) -> list[Group[str]]:
        """What is saved for backward by the module that was being called, the largest first."""
        return _grouped(self.saved(everything), lambda row: None if row.saved is None else row.saved.module)

    def by_op(self, everything: bool = False) -> list[Group[str]]:
        """What is saved for backward by operation, the largest first."""
        return _grouped(self.saved(everything), lambda row: None if row.saved is None else row.saved.op)


def _line(site: CallSite) -> Line:
    code = site.code
    return Line(code.co_filename, site.line, getattr(code, "co_qualname", code.co_name))


def _grouped(rows: Iterable[Held], key: Callable[[Held], Key | None]) -> list[Group[Key]]:
    found: dict[Key | None, list[Held]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    groups = [Group(each, tuple(sorted(members, key=lambda row: -row.nbytes))) for each, members in found.items()]
    return sorted(groups, key=lambda group: -group.nbytes)


def size(nbytes: float) -> str:
    """Bytes in the unit that suits them: `512 MiB`, `4.0 KiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if nbytes >= 100 or unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
