"""# GG712 checkpoint-mismatch

## What it is
A checkpointed function gives another result when backward runs it again than it gave in forward: a tensor it reads from outside
its arguments was changed in between, or it branches on something that has changed: a counter, a flag, a cache that forward has
filled, a draw of Python's or numpy's random numbers (only torch's default random state is put back).

## Why it is wrong
Checkpointing drops the activations and recomputes them in backward. The recomputation must see what forward saw; else the
gradients belong to another function. PyTorch notices different shapes, not different values.

## Example
    for r in range(rounds):
        out.append(checkpoint(lambda h: pool(h, mask), h, use_reentrant=False))
        mask[:, r] = 0                      # backward will read this mask in every round

## Use instead
    for r in range(rounds):
        out.append(checkpoint(pool, h, mask.clone(), use_reentrant=False))
        mask[:, r] = 0

## Fix safety
Safe: the forward stays as it is, the gradients become right.

## When it speaks, what silences it
When PyTorch raises, with the line that wrote a buffer which forward had read, or that changed a number, flag or word which decides
what the function computes, where there is one; in a traced step where
`preserve_rng_state=False` is given for a module with an active dropout; and before a backward whose checkpoints would recompute from a
closed-over tensor that was written in place after forward had read it. Tensors passed as arguments, and tensors bound to a new value,
are silent.
"""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.fixes.edits import edit_of, patched
from gradguard.monitors.checkpoints import AnotherMask, Checkpointed
from gradguard.rules.base import Rule
from gradguard.rules.frameworks.gg712_checkpoint_mismatch import changed_state, drawn_anew, remembered, rewritten_buffer
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.unchecked import UNCHECKED

CODE, NAME = "GG712", "checkpoint-mismatch"
_SAYS = (
    "recomputed values for the following tensors have different metadata",
    "a different number of tensors was saved during the original forward",
    "expected different number of tensors",
    "checkpoint with the same id",
)


def recognise(incident: Incident) -> Diagnosis | None:
    """A closed-over tensor that was written between forward and recomputation, or PyTorch's own finding."""
    if incident.moment == "finding":
        return _other_mask(incident)
    held = incident.notes[Checkpointed].read
    if incident.error is None and (incident.where != "backward" or not held):
        return None
    for site, tensors in held:
        for name, ref, version, storage, clock in tensors:
            tensor = ref()
            if tensor is None or storage is None or tensor._version == version:
                continue
            found = _written(incident, site, name, tensor, version, storage, clock)
            if found is not None:
                held.clear()
                return found
    held.clear()
    return _raised(incident) if incident.error is not None else None


def _other_mask(incident: Incident) -> Diagnosis | None:
    """Dropout in a function whose random state is not restored for the second run."""
    finding: AnotherMask = incident.finding
    place, module = resolve(finding.site), finding.module()
    name = (incident.names.module_path(module) if module is not None else None) or finding.type_name
    dropout = f"{name}.{finding.path}" if finding.path else name
    return Diagnosis(
        code=CODE, name=NAME, severity="warning",
        headline=f"`{dropout}` will drop other values when backward runs the checkpointed `{finding.type_name}` again: "
                 "`preserve_rng_state=False`",
        culprit=None if place is None else place.span("the random state is not restored for the second run", "culprit"),
        explanation=f"The function is run once more in backward. `{dropout}` (p={finding.p:g}) then draws a new mask, so the gradients "
        "belong to another forward pass than the loss.",
        fixes=[Fix(title="Leave `preserve_rng_state` at True, or checkpoint a part without dropout", safety="unsafe",
                   patch=_without_flag(place))],
    )  # fmt: skip


def _without_flag(place: ResolvedSite | None) -> str | None:
    call = None if place is None else place.call
    given = [item for item in call.keywords if item.arg == "preserve_rng_state"] if call is not None else []
    if place is None or place.source is None or len(given) != 1 or not isinstance(given[0].value, ast.Constant):
        return None
    return patched(place.source, edit_of(given[0].value, "True"))


def _written(incident: Incident, site: Any, name: str, tensor: Any, version: int, storage: int, clock: int) -> Diagnosis | None:
    writes = [write for write in incident.journal.writes_to(storage, clock) if write.version > version]
    place = resolve(site)
    if not writes or place is None:
        return None
    write = resolve(writes[0].site)
    if write is None:
        return None
    here = incident.place
    return Diagnosis(
        code=CODE, name=NAME, severity="error" if incident.error is not None else "warning",
        headline=f"`{write.text}` changes `{name}` after a checkpointed forward has read it: backward will recompute with the new values",
        culprit=write.span(f"changes `{name}`: version {version} becomes {writes[0].version}", "culprit"),
        related=[place.span(f"the function checkpointed here reads `{name}` again in backward", "saved"),
                 *([here.span("recomputes", "backward")] if here is not None else [])],
        tensors=[TensorFacts(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
                              version_saved=version, version_found=tensor._version)],
        explanation=f"The function is run once more in backward, to get back the activations that checkpointing has dropped. "
        f"`{name}` is no argument of it but "
        "read from the surrounding scope, so it sees the value of that later moment. The gradients are those of another function.",
        fixes=[Fix(title=f"Pass the value as an argument: `checkpoint(..., {name}.clone(), use_reentrant=False)`", safety="safe"),
               Fix(title=f"Make a new tensor in place of writing into `{name}`", safety="safe")],
    )  # fmt: skip


def _raised(incident: Incident) -> Diagnosis:
    place = incident.place
    function = drawn_anew.function_run_again(incident)
    drawn = drawn_anew.draws_in(function) if function is not None else []
    filled = remembered.filled_in(function) if function is not None and not drawn else None
    if filled is not None:
        return remembered.told(filled, place, CODE, NAME)
    written = rewritten_buffer.rewritten_in(incident, function) if function is not None and not drawn else None
    if written is not None:
        return rewritten_buffer.told(written, place, CODE, NAME)
    changed = changed_state.changed_in(incident, function) if function is not None and not drawn else None
    if changed is not None:
        return changed_state.told(changed, place, CODE, NAME)
    text = drawn[0].text if len(drawn) == 1 else None
    told = [each.span("draws anew when the function runs again", "culprit") for each in drawn]
    headline = "a checkpointed function did not do in backward what it did in forward: "
    seen = "The place that changed in between was not seen."
    fixes = [
        Fix(
            title="Make the checkpointed function depend on its arguments alone: no counters, caches or flags "
            "that change between forward and backward",
            safety="manual",
        )
    ]
    if drawn:
        what = f"`{text}`" if text is not None else f"{len(drawn)} of its expressions"
        seen = (
            f"Checkpointing puts torch's default random state back for it, and no other; what {what} give{'s' if text else ''} "
            "decides what is computed, and comes out anew each time."
        )
        fixes.insert(
            0,
            Fix(
                title="Draw before the checkpoint, and pass what was drawn as an argument; or draw with torch's default "
                "generator, such as `torch.rand(()).item()`",
                safety="manual",
            ),
        )
    return Diagnosis(
        code=CODE, name=NAME,
        headline=headline + (f"`{text}` draws from a random state that is not restored" if text is not None
                             else "the recomputed tensors differ"),
        culprit=told[0] if len(told) == 1 else None,
        related=[*([each.model_copy(update={"role": "declared"}) for each in told[:4]] if len(told) > 1 else []),
                 *([place.span("backward runs the checkpointed function again", "backward")] if place is not None else [])],
        explanation="The recomputation must see the same values, modes and random state as forward. "
        f"It took another branch or made tensors of other shapes. {seen}",
        fixes=fixes,
        avoid=[UNCHECKED],
        confidence="likely",
    )  # fmt: skip


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a checkpointed function sees other values when backward runs it again",
    recognise=recognise,
    moments=frozenset({"error", "before_backward", "finding"}),
    messages=_SAYS,
    traced_only=True,
    screen=lambda notes, moment, facts, traced: bool(notes[Checkpointed].read),
)
