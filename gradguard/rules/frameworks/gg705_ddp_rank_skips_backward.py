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
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve, segment, span_of
from gradguard.analysis.program.bindings import statement_names
from gradguard.analysis.program.expressions import calls_inside, inside, last_part
from gradguard.core import ranks
from gradguard.core.diagnosis import Confidence, Diagnosis, Fix
from gradguard.fixes.edits import indent_of
from gradguard.fixes.statements import Layout, siblings
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import ddp as shared

CODE, NAME = "GG705", "ddp-rank-skips-backward"
_BACKWARD = ("backward", "manual_backward")


def recognise(incident: Incident) -> Diagnosis | None:
    """The statement that skips backward, and its condition."""
    ddp = shared.replica(incident)
    if ddp is None:
        return None
    ends = ranks.ends(wait=1.0)
    if "raised" in ends.values():
        return None
    finished = sorted(index for index, outcome in ends.items() if outcome == "returned")
    skips: list[tuple[str, ast.stmt, ast.expr]] = []
    for view in incident.user_frames:
        place = resolve(view.site)
        if place is not None and not skips:
            skips = _skips(place)
    if not skips and not finished:
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
    if len(skips) != 1:
        notes = [f"line {node.lineno}: `{_text(file, test)}` can skip backward too" for file, node, test in skips]
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
    file, node, test = skips[0]
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


def _skips(place: ResolvedSite) -> list[tuple[str, ast.stmt, ast.expr]]:
    """Statements that leave a round of the loop, or the function, before the place; or the condition around it."""
    start = place.node or place.statement
    if start is None:
        return []
    found: list[tuple[str, ast.stmt, ast.expr]] = []
    counters: set[str] = set()
    around = list(shared.inside_out(place.file, start))
    for child, above in around:
        if isinstance(above, (ast.For, ast.While)) and child in above.body:
            if not _holds_backward(above):
                return []
            counters |= _counters(above)
            break
    for child, above in around:
        looping = isinstance(above, (ast.For, ast.While)) and child in above.body
        block = next((b for b in (getattr(above, name, None) for name in ("body", "orelse")) if isinstance(b, list) and child in b), None)
        for before in block[: block.index(child)] if block is not None else ():
            if isinstance(before, ast.If) and not _by_count(before.test, counters):
                found += [(place.file, leave, before.test) for leave in _leaves(before)]
        if isinstance(above, ast.If) and child in above.body and not _by_count(above.test, counters):
            found.append((place.file, above, above.test))
        if looping:
            break
    return found


def _leaves(branch: ast.If) -> list[ast.stmt]:
    last: list[ast.stmt] = [item for item in branch.body if isinstance(item, (ast.Continue, ast.Break, ast.Return))]
    return last[:1]


def _holds_backward(loop: ast.AST) -> bool:
    return any(calls_inside(loop, *_BACKWARD)) or not any(inside(loop, ast.Continue))


def _counters(loop: ast.For | ast.While) -> set[str]:
    """Variables that count rounds: they are the same on every rank."""
    counted = [node for node in inside(loop, ast.AugAssign) if isinstance(node.value, ast.Constant)]
    found = {node.target.id for node in counted if isinstance(node.target, ast.Name)}
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call):
        target = loop.target
        if last_part(loop.iter.func) == "range" and isinstance(target, ast.Name):
            found.add(target.id)
        elif last_part(loop.iter.func) == "enumerate" and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
            found.add(target.elts[0].id)
    return found


def _by_count(test: ast.expr, counters: set[str]) -> bool:
    """Whether a condition reads nothing but counters and constants of the program."""
    if any(inside(test, ast.Call)):
        return False
    names = [dotted(node) or "" for node in inside(test, ast.Name)]
    return bool(names) and any(name in counters for name in names)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a rank leaves out a backward call that the others make",
    recognise=recognise,
    messages=(
        "connection closed by peer",
        "connection reset by peer",
        "timed out waiting",
        "broken pipe",
        "collective operation timeout",
        "pair closure",
        "connection was likely closed",
    ),
    priority=30,
)
