"""Two ranks have come to the same place in the order of collectives with different calls, or with tensors that do not fit."""

from __future__ import annotations

from typing import NamedTuple

from gradguard.analysis.places import skips
from gradguard.analysis.places.source import at_line
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.monitors.rank_positions import Past, Place
from gradguard.rules.frameworks.gg707_ranks_out_of_step import fewer
from gradguard.rules.frameworks.standings import Difference, Standing, left_loop, short, span, what

_DEPTH = 4
_PAIRED = (
    "Ranks pair their collectives by order alone: the n-th call of one rank in a process group meets the n-th of every other, whatever "
)
_PAIRED += "it is."


def found(standing: Standing) -> Diagnosis | None:
    """The first difference between this rank and another."""
    difference = standing.difference()
    extra = _extra(standing, difference)
    if extra is not None:
        return extra
    if difference is None:
        return None
    mine, theirs = difference.mine, difference.theirs
    if mine.kind == theirs.kind and mine.place == theirs.place:
        return _tensors(standing, difference)
    stuck = mine.number == theirs.number == standing.number
    if stuck:  # one in a loop that the other has left
        for inside, outside in ((difference.first, difference.second), (difference.second, difference.first)):
            if left_loop(inside, outside) is not None:
                return fewer.found(standing.seen_by(inside))
    return _calls(standing, difference, _branch(mine, theirs))


def _extra(standing: Standing, difference: Difference | None) -> Diagnosis | None:
    """A call under a condition that was paired with another of the same kind, and has shifted all that came after it."""
    for crossing in standing.crossings():
        if difference is not None and crossing.mine.number > difference.mine.number:
            break
        branch = _branch(crossing.mine, crossing.theirs)
        if branch is not None and branch.call is not None:
            return _calls(standing, crossing, branch)
    return None


def _tensors(standing: Standing, difference: Difference) -> Diagnosis:
    mine, theirs, own, other = difference.mine, difference.theirs, difference.first.rank, difference.second.rank
    shapes = mine.size != theirs.size
    a, b = (list(mine.shape or ()), list(theirs.shape or ())) if shapes else (mine.dtype, theirs.dtype)
    of = "of shape" if shapes else "of dtype"
    headline = f"`{mine.kind}` gets a tensor {of} {b} on rank {other} and {a} on rank {own}"
    alike = "shape" if shapes else "dtype"
    title = f"Give every rank a tensor of the same {alike}"
    if shapes:
        title += ": pad to a common size, or gather the sizes first"
    else:
        title += ": cast it before the call"
    return Diagnosis(
        code="",
        name="",
        headline=headline,
        culprit=_at(theirs, f"{of} {b} on rank {other}", "culprit"),
        related=[*_one(mine, theirs, f"{of} {a} on rank {own}"), *_rest(standing, mine, theirs)],
        explanation=f"`{mine.kind}` takes it for granted that every rank brings a tensor of the same shape and dtype. It is not checked: "
        "the ranks exchange as many bytes as each believes there are, and wait for the rest, fail, or read what is not theirs.",
        fixes=[Fix(title=title, safety="manual")],
        avoid=["a longer timeout of the process group: the bytes that are missing never come"],
    )


def _calls(standing: Standing, difference: Difference, branch: _Branch | None) -> Diagnosis:
    mine, theirs, own, other = difference.mine, difference.theirs, difference.first.rank, difference.second.rank
    met = f"rank {own} is in {what(mine.kind)} at {short(_place(mine))} while rank {other} is in {what(theirs.kind)} at "
    met += short(_place(theirs))
    related = [_at(mine, f"rank {own} makes this call"), _at(theirs, f"rank {other} makes this one")]
    avoid = ["a longer timeout of the process group: the two calls never fit together"]
    if branch is not None:
        single = branch.call
        condition = branch.source.flat(branch.node.test)
        rank, call = (own, mine) if single is mine else (other, theirs)
        rest = theirs if call is mine else mine
        if single is None:
            headline = f"the ranks take different branches of `if {condition}`, and make different collectives there: {met}"
            title = "Make the same collectives in the same order in both branches, or decide together on one branch"
        else:
            headline = f"{what(call.kind)} is made only where `{condition}` holds, and not every rank comes to it: {met}"
            title = f"Move the call out of `if {condition}`, so that every rank makes it"
        culprit = branch.source.span_of(branch.node.test, "does not come out alike on every rank", "culprit")
        return Diagnosis(
            code="",
            name="",
            headline=headline,
            culprit=culprit,
            related=[*related, *_rest(standing, mine, theirs)],
            explanation=_PAIRED,
            notes=[f"rank {rank} made {what(call.kind)} as number {call.number} of the group, and met {what(rest.kind)}"],
            fixes=[
                Fix(title=title, safety="manual"),
                Fix(title="Where only some ranks are to take part, make a process group of these with `dist.new_group`", safety="manual"),
            ],
            avoid=avoid,
            confidence="certain" if single is None else "likely",
        )
    return Diagnosis(
        code="",
        name="",
        headline=f"the ranks make their collectives in a different order: {met}",
        culprit=_at(theirs, f"rank {other} makes this call", "culprit"),
        related=[related[0], *_rest(standing, mine, theirs)],
        explanation=_PAIRED,
        fixes=[
            Fix(
                title="Make the same collectives in the same order on every rank",
                detail="An order that comes from a set, a folder's listing or what arrives first differs between ranks; sort it.",
                safety="manual",
            )
        ],
        avoid=avoid,
        confidence="likely",
    )


class _Branch(NamedTuple):
    """An `if` that one of two calls stands in and the other does not, or that has one in each branch; and the call within."""

    source: Source
    node: skips.Branch
    call: Past | None


def _branch(mine: Past, theirs: Past) -> _Branch | None:
    a, b = _levels(mine), _levels(theirs)
    for call, own, other in ((mine, a, b), (theirs, b, a)):
        for source, at in own:
            for node in skips.branches_around(source, at):
                within = skips.block_of(source, at, node)
                rest = next((block for file, there in other if file is source and (block := skips.block_of(source, there, node))), None)
                if within is not None and rest is not None and within != rest:
                    return _Branch(source, node, None)
                if within == "body" and rest is None:
                    return _Branch(source, node, call)
    return None


def _levels(call: Past) -> list[tuple[Source, skips.Node]]:
    """The call, the only call in its file of the function that it stands in, and so on outwards."""
    site = at_line(call.file, call.line)
    node = None if site is None else site.node or site.statement
    if site is None or site.source is None or node is None:
        return []
    found = [(site.source, node)]
    program = program_of(site.source)
    while program is not None and len(found) < _DEPTH:
        function = program.function(found[-1][1])
        callers = [] if function is None else program.callers(function)
        if len(callers) != 1:
            break
        found.append((site.source, callers[0]))
    return found


def _place(call: Past) -> Place:
    return call.place


def _at(call: Past, label: str, role: str = "context") -> SourceSpan:
    return span(_place(call), label, role)  # type: ignore[arg-type]


def _one(mine: Past, theirs: Past, label: str) -> list[SourceSpan]:
    return [] if (mine.file, mine.line) == (theirs.file, theirs.line) else [_at(mine, label)]


def _rest(standing: Standing, *shown: Past) -> list[SourceSpan]:
    """The ranks' lines that are not shown yet."""
    lines = {(each.file, each.line) for each in shown}
    return [each for each in standing.spans() if (each.file, each.line) not in lines]
