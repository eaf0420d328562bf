"""How the ranks of a job stand to each other when one of them waits, or has lost its connection: what the rules about that share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from gradguard.analysis.incident import Incident
from gradguard.analysis.places import skips
from gradguard.analysis.places.source import Loop, ResolvedSite, at_line
from gradguard.core import ranks
from gradguard.core.diagnosis import Role, SourceSpan
from gradguard.monitors import rank_positions
from gradguard.monitors.rank_exchange import Stall, ask_after_error
from gradguard.monitors.rank_positions import Past, Place, Position
from gradguard.probes.collective_ring import POINT_TO_POINT

BACKWARD = "backward"
_SHOWN = 6  # ranks whose lines are shown


def standing(incident: Incident) -> Standing | None:
    """How the ranks stand at an incident; None where it has nothing to do with them."""
    if incident.finding is None and incident.error is not None and ranks.is_lost_connection(incident.message):
        sites = [view.site for view in incident.user_frames]
        own = rank_positions.broken(incident.step, sites)
        incident.finding = ask_after_error(own)
    return Standing(incident.finding) if isinstance(incident.finding, Stall) else None


class Difference(NamedTuple):
    """The first collective of a group in which two ranks differ: that of the lower rank, and the other's."""

    mine: Past
    theirs: Past
    first: Position
    second: Position


@dataclass
class Standing:
    """See the module's docstring."""

    stall: Stall

    @property
    def own(self) -> Position:
        return self.stall.own

    def seen_by(self, position: Position) -> Standing:
        """The same from another rank's place."""
        return Standing(replace(self.stall, own=position))

    @property
    def positions(self) -> list[Position]:
        """By rank."""
        return [position for _, position in sorted(self.stall.positions.items())]

    @cached_property
    def group(self) -> str:
        """The group whose collective this rank waits in; where that is not known, the only one that all use."""
        own = self.own
        return own.group or (next(iter(own.numbers)) if len(own.numbers) == 1 else "")

    @cached_property
    def number(self) -> int:
        return self.own.number or self.own.numbers.get(self.group, 0)

    @cached_property
    def waiting(self) -> list[Position]:
        """The ranks that wait in the same collective."""
        own = self.own
        return [
            each
            for each in self.positions
            if each.rank == own.rank or (_waits(each) and self._begun(each) == self.number and each.doing == own.doing)
        ]

    @cached_property
    def behind(self) -> list[Position]:
        """The ranks that have not begun it, none of which waits in an earlier one; empty where the numbers contradict each other."""
        if self.own.doing in POINT_TO_POINT or not self.number or not self.group:
            return []
        found = [each for each in self.positions if self._begun(each) < self.number and each not in self.waiting]
        if any(_waits(each) and each.group == self.group and each.doing != BACKWARD and not each.broken for each in found):
            return []
        return found

    def _begun(self, position: Position) -> int:
        return position.numbers.get(self.group, 0)

    @cached_property
    def elsewhere(self) -> list[Position]:
        """The ranks that have not begun it, or wait in another collective in its place."""
        return self.behind or [each for each in self.positions if each not in self.waiting and self._begun(each) == self.number]

    @property
    def failed(self) -> list[Position]:
        """Ranks that have failed on their own, and not because the connection to another was lost."""
        return [each for each in self.positions if each.state == "failed" and not each.broken]

    @property
    def gone(self) -> list[Position]:
        """Ranks that do not answer; one that waited in the same collective as this one, when it last did, is no cause of anything."""
        own = self.own
        return [
            each
            for each in self.positions
            if each.state == "gone" and not (own.number and (each.group, each.number, each.doing) == (own.group, own.number, own.doing))
        ]

    def difference(self) -> Difference | None:
        """The first of the last collectives in which this rank and another have done different things: the lower rank's and the other's."""
        for other in self.positions:
            first, second = sorted((self.own, other), key=lambda position: position.rank)
            ours, theirs = self._made(first), self._made(second)
            for number in sorted(ours.keys() & theirs.keys()):
                a, b = ours[number], theirs[number]
                alike = None in (a.shape, b.shape) or (a.size == b.size and a.dtype == b.dtype)
                if a.kind != b.kind or not alike:
                    return Difference(a, b, first, second)
        return None

    def crossings(self) -> Iterator[Difference]:
        """Collectives of the same number at two lines, one of which only one of the two ranks has come to: its place comes first."""
        for other in self.positions:
            pair = [(self.own, self._made(self.own)), (other, self._made(other))]
            for number in sorted(pair[0][1].keys() & pair[1][1].keys()):
                for (first, ours), (second, theirs) in (pair, pair[::-1]):
                    a, b = ours[number], theirs[number]
                    if (
                        a.file
                        and all(each.place != a.place for each in theirs.values())
                        and any(each.place == b.place for each in ours.values())
                    ):
                        yield Difference(a, b, first, second)

    def _made(self, position: Position) -> dict[int, Past]:
        """A rank's last collectives in the group, by number; what DDP's reducer began is "backward"."""
        found = {each.number: each for each in position.past if each.group == self.group}
        begun = self._begun(position)
        if position.doing == BACKWARD and position.state == "waits" and begun and begun not in found and position.place is not None:
            found[begun] = Past(self.group, begun, BACKWARD, None, None, position.place.file, position.place.line)
        return found

    # -- words ----------------------------------------------------------------------------------------------------------

    def waits(self) -> str:
        """Who waits in what and where: the beginning of a headline."""
        held, place = self.waiting, self.own.place
        verb = "waits" if len(held) == 1 else "wait"
        where = f" at {short(place)}" if place is not None else ""
        step = f" of step {self.own.step}" if self.own.step > 1 else ""
        return f"{named(each.rank for each in held)} {verb} in {what(self.own.doing or 'a collective')}{step}{where}"

    def spans(self, but: Iterable[int] = ()) -> list[SourceSpan]:
        """Every rank's line, those at the same one together."""
        lines: dict[Place, list[Position]] = {}
        for position in self.positions:
            if position.place is not None and position.rank not in but:
                lines.setdefault(position.place, []).append(position)
        found = []
        for place, held in list(lines.items())[:_SHOWN]:
            found.append(span(place, f"{named(each.rank for each in held)} {_state(held[0])}"))
        return found


def _waits(position: Position) -> bool:
    return position.state == "waits" or (position.state == "failed" and position.broken)


def _state(position: Position) -> str:
    several = {
        "waits": f"in {what(position.doing)}" if position.doing else "here",
        "finished": "finished here",
        "failed": "failed here",
        "gone": "last seen here",
        "runs": f"in {position.doing}" if position.doing else "here",
    }
    return several[position.state]


def what(kind: str) -> str:
    """A collective as a headline has it."""
    return kind if kind in (BACKWARD, "a collective") else f"`{kind}`"


def short(place: Place) -> str:
    """File and line."""
    return f"{os.path.basename(place.file)}:{place.line}"


def named(found: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-2", "ranks 0, 2 and 5"."""
    numbers = sorted(found)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [text for run in runs for text in ([f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run))]
    return "ranks " + (texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}")


def span(place: Place, label: str | None, role: Role = "context") -> SourceSpan:
    """A line as a place to show; where its source is not at hand, the line alone."""
    found = at_line(place.file, place.line)
    if found is not None:
        return found.span(label, role)
    return SourceSpan(file=place.file, line=place.line, end_line=place.line, function=place.function, label=label, role=role)


# -- loops and conditions -----------------------------------------------------------------------------------------------


class LeftLoop(NamedTuple):
    """A loop that one rank is still in and another has left.

    Attributes:
        place: where the rank in it is.
        file, node: the loop.
        exits: how it can end.
    """

    place: ResolvedSite
    node: Loop
    exits: skips.Exits

    @property
    def exhausted(self) -> bool:
        """Whether it can only have ended because its items did."""
        return self.exits.items and not self.exits.found and not self.exits.others

    @property
    def broken_by(self) -> skips.Skip | None:
        """The one statement that can have left it where its items are as many on every rank."""
        exits = self.exits
        return exits.found[0] if len(exits.found) == 1 and not exits.others and (exits.counted or not exits.items) else None


def left_loop(waiting: Position, other: Position) -> LeftLoop | None:
    """The innermost loop around a waiting rank's line that another has left."""
    candidate: LeftLoop | None = None
    if other.error:  # what it raised has ended it
        return None
    for place in waiting.stack:
        site = at_line(place.file, place.line)
        loops = [] if site is None else site.enclosing_loops
        theirs = next((each for each in other.stack if (each.file, each.function) == (place.file, place.function)), None)
        if theirs is None:
            if candidate is None and loops and site is not None:
                candidate = LeftLoop(site, loops[0], skips.exits(site, loops[0]))
            continue
        for loop in loops:
            if theirs.line > (loop.end_lineno or 0) and site is not None:
                return candidate or LeftLoop(site, loop, skips.exits(site, loop))
        return candidate if theirs.line != place.line else None
    return candidate if other.state == "finished" else None
