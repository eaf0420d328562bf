"""Two ranks have come to the same place in the order of collectives with different calls, or with tensors that do not fit."""

from __future__ import annotations

from gradguard.analysis.places import skips
from gradguard.analysis.places.source import ResolvedSite, at_line
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.monitors.rank_positions import Past, Place
from gradguard.rules.frameworks.gg707_ranks_out_of_step import fewer
from gradguard.rules.frameworks.standings import Difference, Standing, left_loop, short, span, what

_PAIRED = (
    "Ranks pair their collectives by order alone: the n-th call of one rank in a process group meets the n-th of every other, whatever "
)
_PAIRED += "it is."


def found(standing: Standing) -> Diagnosis | None:
    """The first difference between this rank and another."""
    difference = standing.difference()
    if difference is None:
        return None
    stuck = difference.mine.number == difference.theirs.number == standing.number
    if stuck:  # one in a loop that the other has left
        for inside, outside in ((difference.first, difference.second), (difference.second, difference.first)):
            if left_loop(inside, outside) is not None:
                return fewer.found(standing.seen_by(inside))
    if difference.mine.kind == difference.theirs.kind:
        return _tensors(standing, difference)
    return _calls(standing, difference)


def _tensors(standing: Standing, difference: Difference) -> Diagnosis:
    mine, theirs, own, other = difference.mine, difference.theirs, difference.first.rank, difference.second.rank
    shapes = mine.shape != theirs.shape
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


def _calls(standing: Standing, difference: Difference) -> Diagnosis:
    mine, theirs, own, other = difference.mine, difference.theirs, difference.first.rank, difference.second.rank
    met = f"rank {own} is in {what(mine.kind)} at {short(_place(mine))} while rank {other} is in {what(theirs.kind)} at "
    met += short(_place(theirs))
    branch = _branch(mine, theirs)
    related = [_at(mine, f"rank {own} makes this call"), _at(theirs, f"rank {other} makes this one")]
    avoid = ["a longer timeout of the process group: the two calls never fit together"]
    if branch is not None:
        site, node, single = branch
        assert site.source is not None  # it has a tree
        condition = site.source.flat(node.test)
        rank, call = (own, mine) if single is mine else (other, theirs)
        rest = theirs if call is mine else mine
        if single is None:
            headline = f"the ranks take different branches of `if {condition}`, and make different collectives there: {met}"
            title = "Make the same collectives in the same order in both branches, or decide together on one branch"
        else:
            headline = f"{what(call.kind)} is made only where `{condition}` holds, and not every rank comes to it: {met}"
            title = f"Move the call out of `if {condition}`, so that every rank makes it"
        culprit = site.source.span_of(node.test, "does not come out alike on every rank", "culprit")
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


def _branch(mine: Past, theirs: Past) -> tuple[ResolvedSite, skips.Branch, Past | None] | None:
    """The `if` that one of the calls stands in and the other does not, or that has one in each branch; and the call within."""
    a, b = _site(mine), _site(theirs)
    for call, own, other in ((mine, a, b), (theirs, b, a)):
        for node in skips.branches_around(own):
            assert own is not None
            within = skips.block_of(own, node)
            rest = skips.block_of(other, node) if other is not None and other.file == own.file else None
            if within is not None and rest is not None and within != rest:
                return own, node, None
            if within == "body" and rest is None:
                return own, node, call
    return None


def _site(call: Past) -> ResolvedSite | None:
    return at_line(call.file, call.line)


def _place(call: Past) -> Place:
    return Place(call.file, call.line, "")


def _at(call: Past, label: str, role: str = "context") -> SourceSpan:
    return span(_place(call), label, role)  # type: ignore[arg-type]


def _one(mine: Past, theirs: Past, label: str) -> list[SourceSpan]:
    return [] if (mine.file, mine.line) == (theirs.file, theirs.line) else [_at(mine, label)]


def _rest(standing: Standing, *shown: Past) -> list[SourceSpan]:
    """The ranks' lines that are not shown yet."""
    lines = {(each.file, each.line) for each in shown}
    return [each for each in standing.spans() if (each.file, each.line) not in lines]
