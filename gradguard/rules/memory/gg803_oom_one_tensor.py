"""# GG803 oom-one-tensor

## What it is
Memory ran out over a single tensor that is larger than everything else together: a table of all pairs by broadcasting, attention weights
of each position against each other, or whatever else the line makes.

## Why it is wrong
Such a tensor grows with the square of what goes into it. A smaller batch or more memory moves the limit a little; another way to compute
the same, or the right shape, removes it.

## Example
    loss = (critic(states) - returns).pow(2).mean()    # [n, 1] - [n] is [n, n]
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(d), dim=-1)
    out = weights @ v

## Use instead
    loss = (critic(states).squeeze(-1) - returns).pow(2).mean()
    out = F.scaled_dot_product_attention(q, k, v)

## Fix safety
Unsafe: a loss over pairs becomes one over samples, which is the purpose; attention without the weights gives the same values up to
rounding.

## When it speaks, what silences it
Where an exception that says that memory could not be had leaves the guard, and what was asked for at once is at least as much as all
tensors hold.
"""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.memory.allocations import Allocation, allocation
from gradguard.analysis.memory.results import Result, result_of
from gradguard.analysis.program.expressions import calls_inside
from gradguard.core.account import size
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.fixes.at_places import applied_to
from gradguard.fixes.edits import replaced, with_argument
from gradguard.rules.base import Rule
from gradguard.rules.memory.wording import breakdown, ran_out, shape

CODE, NAME = "GG803", "oom-one-tensor"
_LEAST = 16 << 20
_PIECES = Fix(title="Check that this size is meant; if it is, compute it in pieces: a slice at a time, reduced before the next is made")


def recognise(incident: Incident) -> Diagnosis | None:
    """The tensor and its line."""
    failed = allocation(incident)
    if failed is None or failed.stepping is not None or not failed.is_torchs or failed.is_outside:
        return None
    if failed.asked < max(failed.held, failed.device.allocated or 0, _LEAST) or incident.place is None:
        return None
    found = result_of(incident, failed)
    if found is None:
        return _told(
            incident,
            failed,
            f"one tensor of {size(failed.asked)} is asked for",
            f"asks for {size(failed.asked)} at once",
            "",
            [],
            [_PIECES],
        )
    if found.column_and_row is not None:
        return _table(incident, failed, found)
    if found.is_square:
        return _pairs(incident, failed, found)
    names = " and ".join(f"`{each.text}` {shape(each.shape)}" for each in found.operands if each.text is not None)
    made = f"makes {shape(found.shape)}, {size(failed.asked)}" + (f", of {names}" if names else "")
    return _told(
        incident, failed, f"this makes one tensor of {shape(found.shape)}, {size(failed.asked)}", made, "", _tensors(found), [_PIECES]
    )


def _told(
    incident: Incident, failed: Allocation, headline: str, label: str, why: str, tensors: list[TensorFacts], fixes: list[Fix]
) -> Diagnosis:
    assert incident.place is not None
    more = f"All tensors together hold {size(failed.held)}; this one alone would take {size(failed.asked)}."
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{ran_out(failed).partition(' (')[0]}: {headline}",
        culprit=incident.place.span(label, "culprit"),
        tensors=tensors,
        explanation=f"{more} {why}".rstrip(),
        notes=breakdown(failed),
        fixes=fixes,
    )


def _tensors(found: Result) -> list[TensorFacts]:
    return [TensorFacts(name=each.text, shape=list(each.shape)) for each in found.operands if each.text is not None]


def _table(incident: Incident, failed: Allocation, found: Result) -> Diagnosis:
    """[n, 1] against [n]."""
    assert found.column_and_row is not None
    column, row = (found.operands[i] for i in found.column_and_row)
    left = f"`{column.text}` is {shape(column.shape)}" if column.text else f"one side is {shape(column.shape)}"
    right = f"`{row.text}` is {shape(row.shape)}" if row.text else f"the other {shape(row.shape)}"
    patch, source = None, found.place.source
    if column.node is not None and source is not None:
        flat = applied_to(source, column.node, "{}.squeeze(-1)")
        patch = None if flat is None else replaced(source, [(column.node, flat)])
    fix = Fix(
        title=f"Give both one shape: `{column.text}.squeeze(-1)`" if column.text else "Give both one shape: `.squeeze(-1)` on the column",
        safety="unsafe",
        reason="the result is another one: of each with its own",
        patch=patch,
    )
    return _told(
        incident,
        failed,
        f"{left} and {right}, which broadcasts to {shape(found.shape)}, {size(failed.asked)}",
        f"broadcasts to {shape(found.shape)}: each of one against each of the other",
        "Broadcasting stretches a column and a row to a table of all pairs.",
        _tensors(found),
        [fix],
    )


def _pairs(incident: Incident, failed: Allocation, found: Result) -> Diagnosis:
    """Each position against each other."""
    n = found.shape[-1]
    why = f"It has an element for each pair of {n} positions: twice as many positions take four times the memory."
    fixes: list[Fix] = []
    if found.kind == "weights":
        patch = None
        call, source = found.place.call, found.place.source
        if call is not None and source is not None and not any(word.arg in ("need_weights", None) for word in call.keywords):
            patch = with_argument(source, call, "need_weights=False") if found.first_alone else None
        fixes.append(
            Fix(
                title="Call it with `need_weights=False`: attention is then computed in blocks, without this tensor",
                safety="unsafe",
                reason="the second result is None; the first is the same up to rounding",
                patch=patch,
            )
        )
    elif _is_attention(found):
        operands = [each.text for each in found.operands if each.text is not None]
        told = f" of `{operands[0]}` and the keys and values" if operands else ""
        fixes.append(
            Fix(
                title="Compute the attention with `F.scaled_dot_product_attention(query, key, value)`, which never makes this tensor",
                safety="unsafe",
                reason="the same values up to rounding",
                detail=f"It works in blocks{told}, with memory that grows with the length itself; its scale is 1 / sqrt(width) by default.",
            )
        )
    else:
        fixes.append(Fix(title="Compute it in pieces: a slice of the rows at a time, reduced before the next one is made"))
    word = "attention weights of" if fixes[0].title.startswith(("Call", "Compute the")) else "one tensor of"
    return _told(
        incident,
        failed,
        f"{word} {shape(found.shape)}, {size(failed.asked)}: each of {n} positions against each other",
        f"makes {shape(found.shape)}, {size(failed.asked)}",
        why,
        _tensors(found),
        fixes,
    )


def _is_attention(found: Result) -> bool:
    """Whether a softmax is taken in the function."""
    function = found.place.enclosing_function
    tree = function if function is not None else None if found.place.source is None else found.place.source.tree
    return any(calls_inside(tree, "softmax", "Softmax", "softmax_"))


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="memory ran out over one tensor that is larger than everything else together",
    recognise=recognise,
    priority=7,
)
