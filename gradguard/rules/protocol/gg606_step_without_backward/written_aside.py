"""Gradients that were written to `.grad` of detached copies, while the optimizer holds the parameters themselves. Part of GG606."""

from __future__ import annotations

import torch

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import bindings, gradient_writes, the_one
from gradguard.torch_compat.private_api import storage_key


def written_aside(incident: Incident, book: Book, parameters: list[torch.Tensor], code: str, rule: str) -> Diagnosis | None:
    """Tensors around the step with a gradient of their own, on the memory of parameters that have none."""
    ours = {id(p) for p in parameters}
    memory = {key for p in parameters if (key := storage_key(p)) is not None}
    copies = {
        id(tensor): (name, tensor)
        for name, tensor in sorted(incident.names.tensor_bindings(), key=lambda each: "[" in each[0])  # a loop's variable has it by another
        if id(tensor) not in ours and tensor.is_leaf and tensor.grad is not None and storage_key(tensor) in memory
    }
    if not copies:
        return None
    names = [name for name, _ in copies.values()]
    holders = {name.split("[")[0] for name in names}
    holder = holders.pop() if len(holders) == 1 else None
    what = f"`{holder}`" if holder is not None else wording.listed(names, len(names))
    name = wording.optimizer_name(book, incident)
    written = the_one(incident, gradient_writes)
    made = None if holder is None else the_one(incident, lambda sources: bindings(sources, holder.rpartition(".")[2], any_owner=True))
    step = wording.span(book.step_site, "no gradient to apply: `.grad` of every parameter is None", "context")
    label = f"fills `.grad` of what is in {what}, and not of the parameters"
    culprit = written.statement_span(label, "culprit") if written is not None else step and step.model_copy(update={"role": "culprit"})
    return Diagnosis(
        code=code,
        name=rule,
        severity="warning",
        headline=f"`{name}.step()` does nothing: the gradients are in `.grad` of {what}, which are copies of its parameters",
        culprit=culprit,
        related=wording.spans(
            None if made is None else made.statement_span("other tensors on the parameters' memory: `.grad` is each one's own", "made"),
            step if written is not None else None,
        ),
        tensors=[
            fact.model_copy(update={"name": name})
            for (name, _), fact in zip(
                copies.values(), wording.facts([tensor for _, tensor in copies.values()], incident.names), strict=False
            )
        ],
        explanation=f"A detached tensor shares a parameter's values and not its `.grad`. All {len(parameters)} parameters of `{name}` have "
        f"`.grad` None at {book.empty} steps in a row, while {len(copies)} such tensors have one. Optimizers skip parameters without "
        "gradient silently.",
        fixes=[Fix(title="Write the gradients to the parameters: `dict(model.named_parameters())[name].grad = ...`", safety="unsafe")],
    )
