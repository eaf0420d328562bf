"""# GG306 unused-input

## What it is
A gradient is asked for with respect to a tensor that the output's graph does not contain: the values went through an
optimizer's step (which writes parameters in place and records nothing), the tensor is a copy or a slice made for this call,
it was rebound, its path was cut on the way, or it was simply not used.

## Why it is wrong
Autograd differentiates with respect to the very tensor that went into the computation, along recorded operations only. What
is not in the graph has no gradient, and PyTorch raises ("One of the differentiated Tensors appears to not have been used in
the graph").

## Example
```python
inner_loss(model, weights).backward()
optimizer.step()                              # records nothing
torch.autograd.grad(outer_loss(model), weights)
```

## Use instead
```python
grads = torch.autograd.grad(inner_loss(model, weights), params, create_graph=True)
stepped = {name: p - lr * g for (name, p), g in zip(named_params, grads)}
torch.autograd.grad(outer_loss(functional_call(model, stepped, x)), weights)
```

## Fix safety
Manual.

## When it speaks, what silences it
When autograd.grad raises over an unused input. `allow_unused=True` gives None instead of an error and is nobody's cure.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import torch

from gradguard.analysis.graph import walk
from gradguard.analysis.history import cut_origins, loss_expressions
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.analysis.places.sites import same_place, short, site_at
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.foreign_exceptions import internal_error
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import lost_path, wanted, wording
from gradguard.rules.gradient_path.gg306_unused_input import late_switch
from gradguard.torch_compat.private_api import node_sequence, storage_key

MESSAGES = ("appears to not have been used in the graph",)


@dataclass
class Reason:
    """Why the input is not in the graph."""

    clause: str
    culprit: SourceSpan | None
    related: list[SourceSpan] = field(default_factory=list)
    explanation: str = ""
    fix: str = ""
    certain: bool = True
    patch: str | None = None


def recognise(incident: Incident) -> Diagnosis | None:
    """The first input that is not in the graph of the outputs, and why."""
    if incident.where not in ("grad", "backward") or not incident.inputs:
        return None
    uses: set[tuple[Any, int]] = set()
    leaves = []
    for node, edges in walk.walk(incident.root_nodes):
        uses.update((edge.source, edge.output) for edge in edges)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
    uses.update((root.grad_fn, root.output_nr) for root in incident.roots if isinstance(root, torch.Tensor) and root.grad_fn is not None)
    for index, tensor in enumerate(incident.inputs):
        used = any(leaf is tensor for leaf in leaves) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr) in uses
        if not used and not any(root is tensor for root in incident.roots):
            return _diagnose(incident, tensor, index, leaves)
    return None


def _diagnose(incident: Incident, tensor: torch.Tensor, index: int, leaves: list[torch.Tensor]) -> Diagnosis:
    text = wanted.input_text(incident, index)
    state = incident.names.state(tensor)
    name = text or (state.full if state is not None else _called(incident, tensor)) or f"input {index}"
    output = lost_path.root_text(incident) or "the output"
    reason = (
        _made_later(incident, tensor, index, name, output) or _cut(incident, tensor, name) or _stepped(incident, leaves,
            name) or _copied(incident, tensor, leaves, name, output)
    )  # fmt: skip
    if reason is None and state is not None and text is None and tensor.grad_fn is None:
        return _parameter_left_out(incident, tensor, name)
    reason = reason or _late(incident, tensor, index, name) or _not_used(incident, name, output)
    related = list(reason.related)
    if incident.place is not None and not (reason.culprit is not None and reason.culprit.line == incident.place.line):
        related.append(incident.place.span(f"`{name}` is not in the graph of `{short(output, 30)}`", "backward"))
    return Diagnosis(
        code="GG306", name="unused-input", headline=f"`{name}` is not in the graph of `{output}`: "
                                                    f"{reason.clause}", culprit=reason.culprit, related=related,
        tensors=[lost_path.facts(name, tensor)], explanation=reason.explanation,
        fixes=[Fix(title=reason.fix, safety="manual", patch=reason.patch)],
        avoid=["`allow_unused=True` is no cure: it gives None in place of the "
               "gradient."], confidence="certain" if reason.certain else "likely",
    )  # fmt: skip


def _called(incident: Incident, tensor: torch.Tensor) -> str | None:
    """A variable of its own, where there is one, before an item of a container."""
    name = incident.names.of(tensor)
    variable = wanted.made_in_a_caller(incident, tensor) if name is not None and not name.isidentifier() else None
    return name if variable is None else variable[0]


def _parameter_left_out(incident: Incident, tensor: torch.Tensor, name: str) -> Diagnosis:
    """One of many parameters that were asked for at once, and that this loss does not use."""
    output = lost_path.root_text(incident) or "the output"
    used = {id(leaf) for leaf in walk.leaves(incident.root_nodes)}
    others = [
        state.full
        for each in incident.inputs
        if each is not tensor and each.grad_fn is None and id(each) not in used and (state := incident.names.state(each)) is not None
    ]
    also = f" (nor to {short_list(others)})" if others else ""
    call = None if incident.place is None else incident.place.span(f"asks for the gradient of `{name}` too", "culprit")
    return Diagnosis(
        code="GG306",
        name="unused-input",
        headline=f"`{name}` is not in the graph of `{output}`: the forward pass of this loss does not use it",
        culprit=call,
        related=[],
        tensors=[lost_path.facts(name, tensor)],
        explanation=f"`{name}` is one of {len(incident.inputs)} inputs, and no way leads from `{output}` to it{also}: "
        "a branch that did not run in this step, or a layer that the result does not go through.",
        fixes=[
            Fix(
                title="where that is meant: pass `allow_unused=True` and leave out the inputs whose gradient is None, "
                "or ask for the parameters in use only",
                safety="manual",
            ),
            Fix(title=f"where it is not: have `{output}` computed from `{name}`", safety="manual"),
        ],
    )


def _made_later(incident: Incident, tensor: torch.Tensor, index: int, name: str, output: str) -> Reason | None:
    """A slice, view or result that was made after the output."""
    if tensor.grad_fn is None:
        return None
    newest = max((node_sequence(node) for node in incident.root_nodes), default=-1)
    seq = node_sequence(tensor.grad_fn)
    if not seq > newest >= 0:
        return None
    place = incident.place_of_node(seq)
    node = wanted.input_node(incident, index)
    inline = isinstance(node, (ast.Subscript, ast.Call, ast.BinOp))
    site = place or (incident.place if inline else wanted.made(incident, tensor, name))
    caller = None if inline else wanted.made_in_a_caller(incident, tensor)
    site = site or (caller[1] if caller is not None else None)
    base = (
        short(incident.place.source.flat(node.value), 30)
        if inline and isinstance(node, ast.Subscript) and incident.place is not None and incident.place.source
        else wanted.sliced(caller[1], caller[0])
        if caller is not None
        else None
    )
    return Reason(
        f"it was made after `{output}` was computed" + (f", as a new tensor sliced from `{base}`" if base else ""),
        site.span(f"makes a new tensor that `{output}` never saw", "culprit") if site is not None else None, [],
        "Slicing, viewing or computing makes a new tensor. A gradient can be had only with respect to the tensor that went into "
        "the computation.",
        f"Differentiate with respect to `{base}` and slice the result" if base else f"Differentiate with respect to the tensor "
                                                                                    f"that went into `{output}`, and slice or "
                                                                                    f"reshape the gradient",
    )  # fmt: skip


def _cut(incident: Incident, tensor: torch.Tensor, name: str) -> Reason | None:
    """The path from this input was cut, as recorded."""
    seq = -1 if tensor.grad_fn is None else node_sequence(tensor.grad_fn)
    for _, cut in reversed(list(incident.journal._cuts.values())):
        for origin in cut.roots():
            direct = any(ref() is tensor for ref in origin.leaves) or (seq >= 0 and seq in origin.sources)
            if not direct:
                continue
            found = cut_origins.of_cut(incident, origin)
            culprit, related = lost_path.story(found)
            if culprit is None or (found.place is not None and incident.place is not None and found.place.line == incident.place.line):
                continue
            if found.kind in ("escape",) and found.func in ("item", "__float__", "tolist"):
                continue
            return Reason(wording.why(found, name), culprit, related, wording.explanation(found, name), wording.fix(found, name).title)
    return None


def _stepped(incident: Incident, leaves: list[torch.Tensor], name: str) -> Reason | None:
    """The graph is built on parameters that an optimizer step, or a write, changed in this very function."""
    codes = {view.site.code for view in incident.user_frames}
    ids = {id(leaf) for leaf in leaves}
    oldest = min((seq for seq in (node_sequence(node) for node, _ in walk.walk(incident.root_nodes)) if 0 <= seq < 2**63), default=-1)
    for fact in reversed(incident.journal.steps):
        optimizer = fact.optimizer()
        if fact.site is None or optimizer is None or fact.site.code not in codes or (oldest >= 0 and fact.seq > oldest):
            continue
        if not ids & trained_by(optimizer):
            continue
        if incident.journal.step - fact.step > 1:
            break
        place = resolve(fact.site)
        called = incident.names.optimizer(optimizer)
        backward = next(
            (
                back
                for back in reversed(incident.journal.backwards)
                if back.clock < fact.clock and back.site is not None and back.site.code is fact.site.code
            ),
            None,
        )
        before = resolve(backward.site) if backward is not None else None
        return Reason(
            f"the way from `{name}` leads through `{called}.step()`, which writes the parameters in place and records nothing",
            place.span(f"the new parameters carry no graph back to `{name}`", "culprit") if place is not None else None,
            [before.span(f"`{name}` has its say in these gradients only", "context")] if before is not None else [],
            "An optimizer step runs under no_grad: the parameters afterwards are leaves as before, with other numbers in them. "
            "How those numbers depend on the "
            f"gradients, and so on `{name}`, is not recorded.",
            "Take the inner gradients with `torch.autograd.grad(..., create_graph=True)`, make the stepped parameters out of "
            "place (`p - lr * g`), "
            "and run the outer loss with `torch.func.functional_call`",
        )  # fmt: skip
    keys = {storage_key(leaf) for leaf in leaves} - {None}
    for write in reversed(incident.journal.writes):
        if (
            write.storage in keys
            and write.site is not None
            and write.site.code in codes
            and write.via in ("op", "data")
            and (oldest < 0 or write.seq <= oldest)
        ):
            place = resolve(write.site)
            return Reason(
                f"the way from `{name}` leads through an in-place update of the parameters, which records nothing",
                place.span(f"written without a graph back to `{name}`", "culprit") if place is not None else None, [],
                "Parameters written under no_grad or through `.data` are leaves as before, with other numbers in them.",
                "Make the updated parameters out of place (`p - lr * g` with `create_graph=True`) and run the outer loss with "
                "`torch.func.functional_call`",
            )  # fmt: skip
    return None


def _copied(incident: Incident, tensor: torch.Tensor, leaves: list[torch.Tensor], name: str, output: str) -> Reason | None:
    """Another tensor of the same values went in: the input is a copy, or the one that went in is."""
    for leaf in leaves:
        twin = leaf is not tensor and _same_values(leaf, tensor)
        parent = tensor.grad_fn is not None and any(getattr(node, "variable", None) is leaf for node, _ in walk.walk([tensor.grad_fn]))
        if not twin and not parent:
            continue
        other = incident.names.of(leaf)
        if isinstance(leaf, torch.nn.Parameter) and not parent:
            continue
        made = wanted.made(incident, tensor, name)
        site = made if made is not None else incident.place
        used = f"`{other}`" if other and other != name else "another tensor"
        return Reason(
            f"{used} went into it, and `{name}` is a {'copy' if twin else 'result'} of that",
            site.span(f"`{name}` is another tensor than the one that `{output}` was "
                      f"computed from", "culprit") if site is not None else None, [],
            "Autograd knows tensors by identity, not by value: a copy or a result of the tensor that was used is another tensor.",
            f"Use `{name}` itself in the forward pass, or differentiate with respect to {used}", certain=False,
        )  # fmt: skip
    return None


def _late(incident: Incident, tensor: torch.Tensor, index: int, name: str) -> Reason | None:
    """It was made to require grad after the computation that used it."""
    late = late_switch.found(incident, tensor, index)
    if late is None:
        return None
    switch, use = site_at(late.source, late.switch), site_at(late.source, late.use)
    text = short(late.source.flat(late.use), 40)
    return Reason(
        f"`{short(late.source.flat(late.switch), 40)}` comes after `{text}`, which used it",
        switch.span(f"from here on `{name}` requires grad: too late for what was computed from it above", "culprit"),
        [use.span(f"uses `{name}` before that: recorded nothing", "made")],
        f"Autograd records an operation if an input requires grad when it runs. What `{text}` computed from `{name}` is a constant to it.",
        f"Move `{short(late.source.flat(late.switch), 40)}` above `{text}`", certain=False, patch=late_switch.moved(late),
    )  # fmt: skip


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return a.shape == b.shape and a.dtype == b.dtype and a.numel() < 1_000_000 and bool(torch.equal(a.detach(), b.detach()))
    except internal_error():
        return False


def _not_used(incident: Incident, name: str, output: str) -> Reason:
    """As far as the source tells: a cut whose input names it, or nothing."""
    followed = loss_expressions.flow_of_root(incident)
    for origin in followed[1].found if followed is not None else ():
        names = origin.place.inner_names if origin.place is not None else []
        if origin.place is not None and origin.sure and (name in names or origin.inner == name):
            culprit, related = lost_path.story(origin)
            return Reason(
                wording.why(origin, name),
                culprit,
                related,
                wording.explanation(origin, name),
                wording.fix(origin, name).title,
                certain=False,
            )
    place: ResolvedSite | None = incident.place
    made = wanted.made(incident, incident.inputs[0], name)
    return Reason(
        "nothing recorded on the way to it used this tensor", place.span(f"asks for a gradient with respect to `{name}`, which "
                                                                f"was not used", "culprit") if place is not None else None,
        [made.span(f"`{name}` is made here", "made")] if made is not None and not same_place(made, place) else [],
        f"No recorded way leads from `{output}` to the tensor that `{name}` names now: it was not used, was passed as a copy, was used "
        "before it required grad, or the name was bound to another tensor meanwhile.",
        f"Compute `{output}` from this very `{name}`", certain=False,
    )  # fmt: skip


RULE = Rule(
    code="GG306", name="unused-input", summary="a gradient is asked for with respect to a tensor that the output does not "
                                               "depend on", recognise=recognise,
    priority=50, messages=MESSAGES,
)  # fmt: skip
