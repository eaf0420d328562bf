"""A rank makes fewer collectives than the others: it has left the loop that they are in, has finished, or leaves the call out."""

from __future__ import annotations

from gradguard.analysis.places import skips
from gradguard.analysis.places.source import at_line, span_of
from gradguard.core.diagnosis import Confidence, Diagnosis, Fix
from gradguard.monitors.rank_positions import Position
from gradguard.rules.frameworks.standings import BACKWARD, Standing, left_loop, named, short, span, what

_NEVER = "a longer timeout of the process group: the call that is missing never comes"
_JOIN = "Let the ranks that are done keep taking part: DDP's `join()`, as a context around the loop"
_WHY = "A collective is over when every rank of its group has made it. "


def found(standing: Standing) -> Diagnosis | None:
    """Ranks that can no longer come to the collective in which this one waits."""
    own = standing.own
    away = [(each, left_loop(own, each)) for each in standing.elsewhere]
    over = [(each, loop) for each, loop in away if loop is not None or each.state == "finished"]
    if not over or (own.place is None):
        return None
    ended = [each for each, _ in over if each.error]
    if ended:
        return _ended(standing, ended)
    other, loop = over[0]
    those = [each for each, _ in over]
    if loop is None or loop.place.source is None:
        return _finished(standing, those)
    skipping = skips.before(loop.place)
    if len(skipping) == 1 and own.doing != BACKWARD:
        return _left_out(standing, those, skipping[0])
    if skipping and own.doing == BACKWARD:
        return None  # GG705 tells of that
    if loop.broken_by is not None:
        return _broken_off(standing, those, loop.broken_by)
    few = [each.rank for each in those]
    subject, has, its = (named(few), "has", "its") if len(few) == 1 else (named(few), "have", "their")
    at = f" and {'is' if len(few) == 1 else 'are'} at {short(other.place)}" if other.place is not None and other.state != "finished" else ""
    why = f": {its} loader had fewer batches" if loop.exhausted else ""
    confidence: Confidence = "certain" if loop.exhausted and not skipping else "likely"
    return Diagnosis(
        code="",
        name="",
        headline=f"{standing.waits()}; {subject} {has} left the loop{at}{why}",
        culprit=loop.place.source.span(
            (loop.node.lineno, loop.node.col_offset, *_header_end(loop.node)), f"ended earlier on {named(few)}", "culprit"
        ),
        related=standing.spans(),
        explanation=_WHY + "A loop that ends earlier on one rank leaves the others with a call that this rank never makes.",
        notes=[
            *(f"`{skips.text(each)}` can leave the call out too" for each in skipping),
            *(f"`{skips.text(each)}` can end the loop earlier" for each in loop.exits.found if each not in skipping),
        ],
        fixes=[
            Fix(
                title="Give every rank the same number of batches: a `DistributedSampler`, and `drop_last=True` for the loader",
                safety="manual",
            ),
            *([Fix(title=_JOIN, safety="manual")] if own.doing == BACKWARD else []),
        ],
        avoid=[_NEVER],
        confidence=confidence,
    )


def _header_end(node: object) -> tuple[int, int]:
    last = getattr(node, "iter", None) or node.test  # type: ignore[attr-defined]
    return last.end_lineno, last.end_col_offset


def _left_out(standing: Standing, those: list[Position], skip: skips.Skip) -> Diagnosis:
    """One condition decides whether the call is made."""
    few, own = named(each.rank for each in those), standing.own
    return Diagnosis(
        code="",
        name="",
        headline=f"{standing.waits()}; {few} left out a call of it: {skip.how(what(own.doing))}",
        culprit=span_of(skip.file, skip.node, label="leaves out a collective that the other ranks make", role="culprit"),
        related=standing.spans(),
        explanation=_WHY
        + "One that a rank leaves out is not made up for: its next call is paired with the others' last one, and in the end "
        "they wait for a rank that has finished.",
        fixes=[
            Fix(title=f"Make the call on every rank, whatever `{skip.condition}` is", safety="manual"),
            Fix(title=f"Decide together: all-reduce `{skip.condition}` over the ranks before the branch", safety="manual"),
        ],
        avoid=[_NEVER],
        confidence="likely",
    )


def _broken_off(standing: Standing, those: list[Position], leave: skips.Skip) -> Diagnosis:
    """One condition decides how often the loop runs."""
    few = named(each.rank for each in those)
    return Diagnosis(
        code="",
        name="",
        headline=f"{standing.waits()}; {few} left the loop: `{leave.word}` ends it on a rank where `{leave.condition}` holds",
        culprit=span_of(leave.file, leave.node, label=f"ended the loop on {few}", role="culprit"),
        related=standing.spans(),
        explanation=_WHY + "A loop that ends earlier on one rank leaves the others with a call that this rank never makes.",
        fixes=[
            Fix(
                title=f"Decide together: all-reduce `{leave.condition}` over the ranks, and leave the loop where it holds on any",
                safety="manual",
            ),
        ],
        avoid=[_NEVER],
        confidence="likely",
    )


def _ended(standing: Standing, those: list[Position]) -> Diagnosis:
    """Ranks that have left the whole program."""
    first, few = those[0], named(each.rank for each in those)
    at = f" at {short(first.place)}" if first.place is not None else ""
    return Diagnosis(
        code="",
        name="",
        headline=f"{standing.waits()}; {few} ended the program{at}: {first.error}",
        culprit=None if first.place is None else span(first.place, f"ended the program on {few}", "culprit"),
        related=standing.spans(but=(first.rank,)),
        explanation=_WHY + f"{few[0].upper()}{few[1:]} will make no more.",
        fixes=[Fix(title="End the program on every rank or on none: all-reduce the condition first", safety="manual")],
        avoid=[_NEVER],
    )


def _finished(standing: Standing, those: list[Position]) -> Diagnosis | None:
    """Ranks that are through with the program, though there is a collective to come."""
    own, few = standing.own, [each.rank for each in those]
    assert own.place is not None
    verb = "has" if len(few) == 1 else "have"
    site = at_line(own.place.file, own.place.line)
    skipping = [] if site is None else skips.before(site)
    if len(skipping) == 1 and own.doing != BACKWARD:
        return _left_out(standing, those, skipping[0])
    if own.doing == BACKWARD and skipping:
        return None
    return Diagnosis(
        code="",
        name="",
        headline=f"{standing.waits()}, which {named(few)} never {'makes' if len(few) == 1 else 'make'}: {named(few)} {verb} finished",
        culprit=span(own.place, f"{named(few)} {verb} finished without this call", "culprit"),
        related=[each for each in standing.spans() if (each.file, each.line) != (own.place.file, own.place.line)],
        explanation=_WHY.rstrip(),
        fixes=[Fix(title="Make the same collectives on every rank, or none of the rest of the group", safety="manual")],
        avoid=[_NEVER],
        confidence="likely",
    )
