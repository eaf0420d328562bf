"""# GG711 checkpoint-no-grad-input

## What it is
Reentrant checkpointing of a module whose inputs do not require grad: its parameters get no gradient.

## Why it is wrong
`checkpoint(..., use_reentrant=True)` runs the module inside a custom autograd Function. Whether its output takes part in the
graph depends on the *inputs* alone; parameters used inside do not count. The first module behind the data is the usual victim:
it is never trained, and the rest trains on.

## Example
    x = checkpoint(stem, images, use_reentrant=True)

## Use instead
    x = checkpoint(stem, images, use_reentrant=False)

## Fix safety
Safe: the same forward; gradients now reach the parameters.

## When it speaks, what silences it
In a traced step, at the call: grad mode is on, the module is in training mode and has parameters that require grad, and no
input does. Under no_grad, in eval mode and for frozen modules it is silent.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import module_ast, resolve, span_of
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.user_calls import user_files
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.rules.base import Rule

CODE, NAME = "GG711", "checkpoint-no-grad-input"
_CUT = ("does not require grad and does not have a grad_fn",)


class _Seen(NamedTuple):
    """What was found, and in which step."""

    finding: Any
    step: int


def recognise(incident: Incident) -> Diagnosis | None:
    """The checkpoint call; also behind the error it causes when nothing else requires grad."""
    if incident.error is not None:
        seen = incident.notes.get(_Seen)
        if seen is None or seen.step != incident.journal.step:
            return None
        finding = seen.finding
    else:
        finding = incident.finding
        incident.notes.put(_Seen(finding, incident.journal.step))
    place = resolve(finding.site)
    if place is None:
        return None
    what = finding.module or "the module"
    loops = place.enclosing_loops
    target: SourceSpan = place.span("no input of this call requires grad", "culprit")
    arguments = [argument for argument in place.arguments if "=" not in argument]
    first = arguments[0] if arguments else what
    items = _iterated(loops, first)
    inner = f" (`{items}`)" if items else ""
    given = place.keywords.get("use_reentrant")
    own = "checkpoint" in (place.callee or "").rpartition(".")[2]  # else a framework's code calls it, as it was configured to
    if not own:
        first = what
    spoken = "`use_reentrant` left at True" if own and given is None else "`use_reentrant=True`"
    setting = None if own else _setting(incident)
    fix = Fix(title="Pass `use_reentrant=False`", safety="safe")
    if not own:
        fix = Fix(
            title=f"Set `use_reentrant` to False where checkpointing is switched on{f' (line {setting.line})' if setting else ''}",
            safety="safe",
            detail="With transformers: `gradient_checkpointing_kwargs={'use_reentrant': False}`.",
        )
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="error" if incident.error is not None else "warning",
        headline=f"the parameters of `{first}`{inner} get no gradient: it is checkpointed with {spoken}, and no input requires grad",
        culprit=target,
        explanation="Reentrant checkpointing runs the module inside a custom autograd Function, "
        "whose output requires grad only if an input does. "
        f"The {finding.parameters} parameters inside ({finding.names}) do not count, so they are cut off.",
        related=[] if setting is None else [setting],
        fixes=[fix],
        avoid=["setting `requires_grad_()` on the input data: it works, at the price of a gradient for the data that nobody uses"],
    )


def _setting(incident: Incident) -> SourceSpan | None:
    """Where the user's own code switches checkpointing on: the one argument or call that speaks of it."""
    found: dict[tuple[str, int], SourceSpan] = {}
    for file in user_files(incident):
        tree = module_ast(file)
        for node in inside(tree, ast.keyword, ast.Call):
            at: ast.expr | None = None
            named: str | None = None
            if isinstance(node, ast.keyword) and not _is_off(node.value):
                named, at = node.arg, node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                named, at = node.func.attr, node
            if at is not None and "checkpointing" in (named or ""):
                found.setdefault((file, at.lineno), span_of(file, at, label=f"`{named}` is set here", role="declared"))
    spans = list(found.values())
    reentrant = [span for span in spans if "use_reentrant" in (span.text or "")]
    return spans[0] if len(spans) == 1 else reentrant[0] if len(reentrant) == 1 else None


def _is_off(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value


def _iterated(loops: object, name: str) -> str | None:
    """What a loop goes over, where the name is its variable."""
    for loop in loops if isinstance(loops, list) else []:
        node = getattr(loop, "node", loop)
        if isinstance(node, ast.For) and any(target.id == name for target in inside(node.target, ast.Name)):
            return ast.unparse(node.iter)
    return None


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="reentrant checkpointing of a module whose inputs do not require grad",
    recognise=recognise,
    moments=frozenset({"error", "finding"}),
    messages=_CUT,
    priority=60,
)
