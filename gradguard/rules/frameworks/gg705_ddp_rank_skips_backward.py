"""# GG705 ddp-rank-skips-backward

## What it is
One rank leaves out a backward call that the others make (`continue` for an empty batch, an early `break` or `return`).

## Why it is wrong
Backward of a DistributedDataParallel module averages gradients over all ranks. A rank that skips it is missing: the others
pair their gradients with its next batch's, and in the end wait for a rank that has finished.

## Example
    for x, y, mask in loader:
        if not mask.any():
            continue                        # the other ranks do not know
        loss = criterion(model(x)[mask], y[mask])
        loss.backward()

## Use instead
    for x, y, mask in loader:
        out = model(x)
        loss = criterion(out[mask], y[mask]) if mask.any() else 0.0 * out.sum()
        loss.backward()

## Fix safety
Unsafe: the step now counts a batch without a loss, which is what keeps the ranks together.

## When it speaks, what silences it
When the connection to another rank breaks or times out in a training step, and a condition in the loop can skip backward.
Where another rank is known to have failed on its own it is silent: that failure is the cause.
"""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places import skips
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve, segment, span_of
from gradguard.analysis.program.bindings import statement_names
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.core import ranks
from gradguard.core.diagnosis import Confidence, Diagnosis, Fix
from gradguard.fixes.edits import indent_of
from gradguard.fixes.statements import Layout, siblings
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import ddp as shared
from gradguard.rules.frameworks import standings

CODE, NAME = "GG705", "ddp-rank-skips-backward"
_BACKWARD = ("backward", "manual_backward")


def recognise(incident: Incident) -> Diagnosis | None:
    """The statement that skips backward, and its condition."""
    ddp = shared.replica(incident)
    if ddp is None:
        return None
    standing = standings.standing(incident)
    ends = ranks.ends(wait=1.0)
    if "raised" in ends.values() or (standing is not None and (standing.failed or standing.own.doing != standings.BACKWARD)):
        return None
    finished = sorted(index for index, outcome in ends.items() if outcome == "returned")
    found: list[skips.Skip] = []
    for view in incident.user_frames:
        place = resolve(view.site)
        if place is None:
            continue
        found = _skips(place)
        if place.enclosing_loops:  # what stands around the loop decides nothing within it
            break
        if found and any((other := resolve(each.site)) is not None and other.enclosing_loops for each in incident.user_frames):
            break
        found = []
    if not found and not finished:
        return None
    if len(found) != 1 and standing is not None and standing.behind:  # GG707 knows where the others are
        return None
    confidence: Confidence = "likely"
    backward = incident.place
    peer = f"worker {finished[0]} has finished" if finished else "another rank is gone"
    related = [backward.span("waits here for the other ranks", "backward")] if backward is not None else []
    avoid = ["a longer timeout of the process group: the missing backward call never comes"]
    explanation = (
        "Backward of a DistributedDataParallel module averages gradients over all ranks, call by call. A rank that leaves one out pairs "
        "its next batch with the others' last one, and at the end the others wait for a call that never comes."
    )
    if len(found) != 1:
        notes = [f"line {node.lineno}: `{_text(file, test)}` can skip backward too" for file, node, test in found]
        return Diagnosis(
            code=CODE,
            name=NAME,
            headline=f"this rank waits in backward, but {peer}: the ranks do not make the same number of backward calls",
            explanation=explanation,
            notes=notes,
            related=related,
            fixes=[
                Fix(
                    title="Give every rank the same number of batches (`DistributedSampler`, `drop_last=True`), or use DDP's `join()`",
                    safety="manual",
                )
            ],
            avoid=avoid,
            confidence=confidence,
        )
    file, node, test = found[0]
    word = {ast.Continue: "continue", ast.Break: "break", ast.Return: "return"}.get(type(node), "if")
    condition = _text(file, test)
    how = f"`{word}` skips backward on a rank where `{condition}` holds"
    if word == "if":
        how = f"backward runs only on a rank where `{condition}` holds"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"{how}, and the other ranks wait for it: {peer}",
        culprit=span_of(file, node, label="leaves out a backward call that the other ranks make", role="culprit"),
        explanation=explanation,
        notes=[f"`{condition}` depends on this rank's own batch; the others decide by theirs"],
        fixes=[
            Fix(
                title=f"Take part in every backward: in place of `{word}` use a loss of zero that depends on the model's output",
                detail="For instance `loss = 0.0 * output.sum()`: its gradients are zero, and the rank takes part in the averaging.",
                safety="unsafe",
                patch=None if backward is None else _loss_of_zero(incident, backward, file, node),
            ),
            Fix(title=f"Decide together: all-reduce `{condition}` over the ranks before the branch", safety="unsafe"),
        ],
        avoid=avoid,
        related=related,
        confidence=confidence,
    )


def _loss_of_zero(incident: Incident, backward: ResolvedSite, file: str, node: ast.stmt) -> str | None:
    """The diff that gives the loss a value of zero where `continue` stands, and the one that follows it an `else`."""
    source, call = backward.source, backward.call
    branch = None if source is None or source.filename != file else source.parents.get(node)
    if (
        source is None
        or not isinstance(branch, ast.If)
        or branch.orelse
        or branch.body[-1:] != [node]
        or not isinstance(node, ast.Continue)
    ):
        return None
    loss = dotted(call.func.value) if call is not None and isinstance(call.func, ast.Attribute) else None
    block = siblings(source, branch)
    computed = next(iter(block[block.index(branch) + 1 :]), None)
    if loss is None or not isinstance(computed, ast.Assign) or [dotted(target) for target in computed.targets] != [loss]:
        return None
    outputs = [
        name for name in statement_names(source, computed) for view in incident.user_frames[:1]
        if isinstance(value := view.locals.get(name), torch.Tensor) and value.requires_grad
    ]  # fmt: skip
    if not outputs:
        return None
    layout, indent = Layout(source), indent_of(source, branch.lineno)
    layout.drop(node)
    layout.put(node.lineno, [f"{indent_of(source, node.lineno)}{loss} = 0.0 * {outputs[0]}.sum()\n", f"{indent}else:\n"])
    layout.reindent(computed, indent_of(source, node.lineno))
    return layout.diff()


def _text(file: str, test: ast.expr) -> str:
    return segment(file, test) or ast.unparse(test)


def _skips(place: ResolvedSite) -> list[skips.Skip]:
    """What can leave out the backward call, where backward runs in a loop of the user's."""
    start = place.node or place.statement
    if start is None:
        return []
    for child, above in skips.inside_out(place.file, start):
        if isinstance(above, (ast.For, ast.While)) and child in above.body:
            return skips.before(place) if any(calls_inside(above, *_BACKWARD)) or not any(inside(above, ast.Continue)) else []
    return skips.before(place)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a rank leaves out a backward call that the others make",
    recognise=recognise,
    messages=ranks.LOST,
    priority=30,
)
