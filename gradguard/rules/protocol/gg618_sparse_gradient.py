"""# GG618 sparse-gradient

## What it is
An optimizer refuses the gradients of some of its parameters: they are sparse and it takes dense ones only, or (`SparseAdam`) the other
way round.

## Why it is wrong
An embedding with `sparse=True` gives a gradient that holds only the rows that were looked up. Adam, AdamW, RMSprop and most others
update every element of a parameter at every step, and have no rule for rows without a gradient.

## Example
    self.users = nn.Embedding(n, dim, sparse=True)
    ...
    optimizer = Adam(model.parameters())
    ...
    optimizer.step()

## Use instead
    self.users = nn.Embedding(n, dim)

Or, where the table is too large for dense gradients, an optimizer of its own for it: `SparseAdam([model.users.weight])`.

## Fix safety
Safe: a dense gradient has the same values.

## When it speaks, what silences it
When `step()` of one of PyTorch's optimizers refuses the layout of a gradient. The culprit is the call that asks for sparse gradients, or
the line that makes the `SparseAdam`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import StateName, as_code
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import argument, inside, last_part
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import peek, store_of
from gradguard.fixes.edits import replaced
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.stepping import stepping
from gradguard.rules.spans import attribute_sets, in_tiers

CODE, NAME = "GG618", "sparse-gradient"
_POSITION = {"Embedding": 6, "from_pretrained": 6, "embedding": 6, "embedding_bag": 6}  # of `sparse` among the arguments


def recognise(incident: Incident) -> Diagnosis | None:
    """The parameters with the gradients that the optimizer has no rule for."""
    optimizer = stepping(incident)
    held = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    sparse = [p for p in held if p.grad.layout != torch.strided]
    dense = [p for p in held if p.grad.layout == torch.strided]
    name = "" if optimizer is None else incident.names.optimizer(optimizer)
    book = next((book for book in incident.notes[Ledger].books.values() if book.ref() is optimizer), None)
    made = None if book is None else resolve(book.made)
    if incident.says("dense gradients"):
        return _dense(incident, name, made, dense, sparse) if dense else None
    return _sparse(incident, name, type(optimizer).__name__, made, sparse) if sparse else None


def _sparse(incident: Incident, name: str, kind: str, made: ResolvedSite | None, refused: list[torch.Tensor]) -> Diagnosis:
    states = [state for p in refused if (state := incident.names.state(p)) is not None]
    names = [incident.names.leaf(p) or "a parameter" for p in refused]
    found = _asking(incident, states) if len(states) == len(refused) else _every(incident)
    switches = [switch for each in found if (switch := _switch(*each)) is not None]
    patch = None
    if len(switches) == len(found) and len({id(source) for source, _ in found}) == 1:
        patch = replaced(found[0][0], [(node, "False") for node in switches])
    label = f"asks for sparse gradients of `{names[0]}`" if len(names) == 1 else "asks for sparse gradients"
    asked = [site_at(source, call).span(label, "culprit") for source, call in found]
    culprit, further = (asked[0] if asked else None), asked[1:]
    step = None if incident.place is None else incident.place.span(f"`{kind}` takes dense gradients only", "context")
    if culprit is None and step is not None:
        culprit, step = step.model_copy(update={"role": "culprit"}), None
    many = len(refused) > 1
    holders = {state.full.rpartition(".")[0]: type(state.owner).__name__ for state in states}
    of = f" of the {next(iter(holders.values()))} `{next(iter(holders))}`" if len(holders) == 1 else ""
    parts = ", ".join(as_code(each) for each in names[:4]) + (", ..." if len(names) > 4 else "")
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{name}` cannot update {wording.listed(names, len(names))}{of}: {'their gradients are' if many else 'its gradient is'} "
        f"sparse, and `{kind}` takes dense ones only",
        culprit=culprit,
        related=wording.spans(
            *(each.model_copy(update={"role": "declared"}) for each in further),
            None if made is None else made.span(f"`{name}` is given {'them' if many else 'it'} here", "declared"),
            step,
        ),
        tensors=wording.facts(refused, incident.names),
        explanation="A sparse gradient holds only the rows that were looked up. "
        f"`{kind}` updates every element of a parameter at every step.",
        fixes=[
            Fix(title="Take dense gradients: `sparse=False`, which is the default", safety="safe", patch=patch),
            Fix(
                title=f"Give {'them' if many else 'it'} an optimizer of {'their' if many else 'its'} own, which takes sparse gradients: "
                f"`torch.optim.SparseAdam([{parts}])`, and `{name}` the others",
                safety="manual",
                detail="Worth it where the table is so large that a dense gradient costs too much.",
            ),
        ],
        confidence="certain" if found else "likely",
    )


def _dense(incident: Incident, name: str, made: ResolvedSite | None, dense: list[torch.Tensor], sparse: list[torch.Tensor]) -> Diagnosis:
    names = [incident.names.leaf(p) or "a parameter" for p in dense]
    step = None if incident.place is None else incident.place.span("`SparseAdam` takes sparse gradients only", "context")
    culprit: SourceSpan | None = None if made is None else made.span(f"`{name}` is given them here", "culprit")
    if culprit is None and step is not None:
        culprit, step = step.model_copy(update={"role": "culprit"}), None
    patch = None
    call = None if made is None else made.call
    if made is not None and call is not None and made.source is not None and isinstance(call.func, ast.Attribute):
        text = made.source.flat(call.func)
        patch = replaced(made.source, [(call.func, f"{text.removesuffix('SparseAdam')}Adam")]) if text.endswith(".SparseAdam") else None
    ours = wording.listed([incident.names.leaf(p) or "a parameter" for p in sparse], len(sparse))
    split = f"Give `SparseAdam` only what has sparse gradients, {ours}, and the others to an `Adam` of their own"
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{name}` is a `SparseAdam` and cannot update {wording.listed(names, len(names))}: "
        f"{'their gradients are' if len(names) > 1 else 'its gradient is'} dense",
        culprit=culprit,
        related=wording.spans(step),
        tensors=wording.facts(dense, incident.names),
        explanation="`SparseAdam` updates the rows that a sparse gradient holds. Sparse gradients come from embeddings made with "
        "`sparse=True`, and from nothing else in an ordinary model.",
        fixes=[Fix(title=split, safety="manual") if sparse else Fix(title="Use `Adam` instead", safety="unsafe", patch=patch)],
    )


def _asking(incident: Incident, states: Iterable[StateName]) -> list[tuple[Source, ast.Call]]:
    """The calls that ask for sparse gradients of these parameters; none where one of them has no such call, or it is not known which."""
    found: dict[tuple[str, int, int], tuple[Source, ast.Call]] = {}
    for state in states:
        calls = _of_attribute(state) or _every(incident)
        if len(calls) != 1:
            return []
        source, call = calls[0]
        found[source.filename, call.lineno, call.col_offset] = calls[0]
    return list(found.values())


def _of_attribute(state: StateName) -> list[tuple[Source, ast.Call]]:
    """The calls in the statement that sets the attribute which the parameter's module lies in, innermost class first."""
    way: list[tuple[nn.Module, str]] = []
    module: nn.Module | None = state.root
    for part in state.path.split(".")[:-1]:
        if module is None:
            break
        way.append((module, part))
        module = store_of(module, "_modules").get(part)
    if peek(state.owner, "sparse", False) is not True:
        return []
    for holder, part in reversed(way):
        for place in attribute_sets(type(holder), part):
            if place.source is not None and place.statement is not None:
                calls = [(place.source, call) for call in _calls(place.statement)]
                if calls:
                    return calls
    return []


def _every(incident: Incident) -> list[tuple[Source, ast.Call]]:
    """The calls of the program's files that ask for sparse gradients, in the nearest files that have any."""
    for sources in in_tiers(incident):
        calls = [(source, call) for source in sources if source.tree is not None for call in _calls(source.tree)]
        if calls:
            return calls if len(calls) == 1 else []
    return []


def _calls(tree: ast.AST) -> list[ast.Call]:
    values = [(call, _value(call)) for call in inside(tree, ast.Call)]
    return [call for call, value in values if value is not None and (not isinstance(value, ast.Constant) or value.value is True)]


def _value(call: ast.Call) -> ast.expr | None:
    """What is given for `sparse`."""
    return argument(call, "sparse", _POSITION.get(last_part(call))) or argument(call, "sparse_grad")


def _switch(source: Source, call: ast.Call) -> ast.expr | None:
    """The value to change, where it is written in the call itself."""
    value = _value(call)
    return value if isinstance(value, ast.Constant) else None


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="the optimizer refuses sparse gradients (or, SparseAdam, dense ones)",
    recognise=recognise,
    priority=45,
    messages=("not support sparse grad", "not support dense grad", "not compatible with sparse gradients"),
)
