"""How what a step has saved depends on its batch, and how large a batch would fit."""

from __future__ import annotations

from dataclasses import dataclass

from gradguard.core.account import Account
from gradguard.instrumentation.journal import Journal

_MOSTLY = 0.8


@dataclass(frozen=True)
class Batch:
    """The batch of a step that ran out of memory.

    Attributes:
        size: the leading dimension that most of what is saved shares.
        each: the bytes saved for one sample.
        complete: whether the whole forward had run: what is saved then is all that there is.
        done: the share of the forward that had run, by the operator calls of the last step that was traced to its end.
    """

    size: int
    each: float
    complete: bool
    done: float = 1.0

    def fits(self, asked: int) -> int:
        """The size that would fit: by the straight line through nothing and what this one needed at least."""
        had = self.each * self.size
        needed = (had + asked) / max(self.done, 0.05)
        return max(1, min(self.size - 1, _round(int(self.size * had / needed))))


def batch_of(account: Account, journal: Journal) -> Batch | None:
    """The batch, where one leading dimension has most of what is saved."""
    rows = [row for row in account.of("saved") if row.shape]
    whole = sum(row.nbytes for row in rows)
    by_size: dict[int, int] = {}
    for row in rows:
        by_size[row.shape[0]] = by_size.get(row.shape[0], 0) + row.nbytes
    if not by_size:
        return None
    size = max(by_size, key=lambda each: by_size[each])
    if by_size[size] < _MOSTLY * whole or size < 2:
        return None
    complete = bool(journal.backwards) and journal.backwards[-1].step == journal.step
    return Batch(size, by_size[size] / size, complete, 1.0 if complete else _done(journal))


def _done(journal: Journal) -> float:
    """The share of a step's operator calls that has run, by the last whole one."""
    marks = [step.seq for step in journal.steps]
    if not marks:
        return 1.0
    begun = marks[-1]
    now = sum(op[0] >= begun for op in journal.ops)
    before = marks[-2] if len(marks) > 1 else 0
    then = sum(before <= op[0] < begun for op in journal.ops)
    return min(1.0, now / then) if now and then else 1.0


def _round(size: int) -> int:
    """Down to a number that people choose: a power of two, or one and a half of one."""
    power = 1
    while 2 * power <= size:
        power *= 2
    return power + power // 2 if power > 1 and power + power // 2 <= size else power
