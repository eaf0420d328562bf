"""How the ranks of a job tell each other where they are: through the store that the process group has anyway.

A rank that has waited too long, or whose connection broke, asks; the others' watching threads answer, if the rank is alive. Nothing
blocks: a key is looked for before it is read. In training that moves, nothing is sent at all.

Keys, below a prefix of the job's attempt: `on/RANK` (this rank answers; the file with its last collectives), `ask/ROUND`,
`at/ROUND/RANK` (a position), `end/RANK` (the last position of a rank that has finished or failed), `said/KEY` (a cause that one of them
tells). Workers of one launch leave their ends in
the folder that they share as well, which outlives the rank that keeps the store.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradguard.core import ranks
from gradguard.core.foreign_exceptions import internal_error
from gradguard.monitors import rank_positions
from gradguard.monitors.findings import Finding
from gradguard.monitors.rank_positions import Position
from gradguard.probes.collective_ring import ring

ANSWERS = 2.0  # seconds in which a rank answers: its watching thread wakes once a second
_POLL = 0.2
_MANY = 16  # ranks from which on the store is asked less often


@dataclass(frozen=True, eq=False)
class Stall(Finding):
    """A rank waits in a collective, or its connection broke, and this is where the ranks are.

    Attributes:
        own: this rank's position.
        positions: by rank, this one's included; of those that do not answer the last one known, as "gone".
        error: whether the connection broke.
    """

    own: Position
    positions: dict[int, Position]
    error: bool


class Exchange:
    """One rank's end of it.

    Args:
        store: of the job; calls of several threads on it do not mix.
        rank: this rank.
        world: how many there are.

    Attributes:
        round: the next one that may be asked for.
        step: the training step of this rank's last position.
        pinned: where this rank is while it looks at an error, and how many collectives it had begun then.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._prefix = f"gradguard/ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._lock = threading.RLock()
        self._claims: dict[str, bool] = {}
        self.round = 1
        self.step = 0
        self.pinned: tuple[Position, int] | None = None

    def begin(self) -> None:
        """From now on this rank answers, and its last collectives outlive it."""
        try:
            path = ring.outlive()
        except internal_error(OSError):  # no room for it
            path = ""
        self._store.set(f"{self._prefix}/on/{self._rank}", path)

    def asked(self) -> bool:
        """Whether another rank wants to know where this one is."""
        return bool(self._store.check([f"{self._prefix}/ask/{self.round}"]))

    def answer(self, position: Position) -> None:
        """Tells the others where this rank is."""
        with self._lock:
            self.step = position.step
            self._store.set(f"{self._prefix}/at/{self.round}/{self._rank}", position.packed())
            self.round += 1

    def gather(self, own: Position, once: bool = False) -> dict[int, Position]:
        """Asks all ranks where they are, and waits for a while. Only who does not answer twice is taken for gone.

        Args:
            own: this rank's.
            once: whether to leave out those that do not answer, rather than to ask again.

        Returns:
            Positions by rank. A rank that is not known to answer is not among them.
        """
        found = self._gathered(own, ANSWERS)
        silent = [rank for rank, each in found.items() if each.state == "gone"]
        if once:
            return {rank: each for rank, each in found.items() if rank not in silent}
        return self._gathered(own, ANSWERS) if silent else found

    def _gathered(self, own: Position, seconds: float) -> dict[int, Position]:
        with self._lock:
            if self.asked():
                self.answer(own)
            asked = self.round
            self._store.set(f"{self._prefix}/ask/{asked}", "1")
            self.answer(own)
        others = [rank for rank in range(self._world) if rank != self._rank]
        keys = [f"{self._prefix}/at/{asked}/{rank}" for rank in others]
        until = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < until and not self._all_known(asked, others):
            time.sleep(_POLL if len(others) < _MANY else 5 * _POLL)
            while self.asked():  # by another, at the same time
                self.answer(own)
        found = {self._rank: own}
        for rank in others:
            position = self._of(rank, asked)
            if position is not None:
                found[rank] = position
        return found

    def _all_known(self, asked: int, others: list[int]) -> bool:
        """Whether each of a few ranks has answered or left word of its end."""
        return len(others) < _MANY and all(
            self._store.check([f"{self._prefix}/at/{asked}/{rank}"]) or self.end_of(rank) is not None for rank in others
        )

    def _of(self, rank: int, asked: int) -> Position | None:
        text = self._read(f"at/{asked}/{rank}")
        if text is not None:
            return Position.unpacked(text)
        end = self.end_of(rank)
        if end is not None:
            return end
        on = self._read(f"on/{rank}")
        left = None if on is None else rank_positions.left_by(rank, on.decode())
        if left is not None:
            return left
        for earlier in range(asked - 1, max(0, asked - 4), -1):
            text = self._read(f"at/{earlier}/{rank}")
            if text is not None:
                return replace(Position.unpacked(text), state="gone")
        return None if on is None else Position(rank, "gone")

    def _read(self, key: str) -> bytes | None:
        key = f"{self._prefix}/{key}"
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def claim(self, key: str) -> bool:
        """Whether this rank is the first of all to say something, or was so before."""
        with self._lock:
            if key not in self._claims:
                self._claims[key] = self._store.add(f"{self._prefix}/said/{key}", 1) == 1
            return self._claims[key]

    # -- ends -----------------------------------------------------------------------------------------------------------

    def end(self, position: Position) -> None:
        """This rank has finished or failed."""
        text = position.packed()
        folder = os.environ.get(ranks.SHARED)
        if folder is not None:
            try:
                Path(folder, f"position-{self._rank}").write_text(text)
            except internal_error(OSError):
                pass
        self._store.set(f"{self._prefix}/end/{self._rank}", text)

    def end_of(self, rank: int) -> Position | None:
        folder = os.environ.get(ranks.SHARED)
        if folder is not None:
            try:
                return Position.unpacked(Path(folder, f"position-{rank}").read_text())
            except internal_error(OSError, ValueError):
                pass
        try:
            text = self._read(f"end/{rank}")
        except internal_error():  # the rank that keeps the store has ended
            return None
        return None if text is None else Position.unpacked(text)


def job_store() -> Any:
    """A client of the job's store for one thread's use; the training may be waiting in the one that torch has."""
    store: Any = dist.distributed_c10d._get_default_store()
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    return store.clone() if type(base).__name__ == "TCPStore" else store


class Here:
    """This process's exchange, while it watches the others."""

    exchange: Exchange | None = None
    over = False  # whether it has left word of what it raised, which nothing later replaces


def ask_after_error(own: Position) -> Stall | None:
    """Where the ranks are after this one's connection broke; None where that cannot be known."""
    exchange = Here.exchange
    if exchange is None:
        return None
    exchange.pinned = (own, ring.begun)
    try:
        return Stall(None, own, exchange.gather(own), error=True)
    except internal_error():  # the rank that keeps the store has ended
        known = {rank: end for rank in range(dist.get_world_size()) if (end := exchange.end_of(rank)) is not None}
        return Stall(None, own, known | {own.rank: own}, error=True)
