"""# GG613 unintended-training

## What it is
A module that is meant to be frozen is trained: `module.requires_grad = False` only set an attribute of that name, the name is
misspelt (`p.require_grad = False`), the method that freezes is never called or compares with names that no parameter has, the
frozen parameters kept a gradient (zeros, mostly), on which the optimizer goes on, a switch that turns the rest of the network
off and on turns it on as well, or a target network, which another one is copied into, is computed with its graph.

## Why it is wrong
`requires_grad` is a property of tensors. On a module the assignment makes a plain attribute and freezes nothing; the call
that does is `module.requires_grad_(False)`. And a freeze that stands in an overridden `train()` does not happen until
`train()` is called.

## Example
    model.outc.requires_grad = False        # does nothing

## Use instead
    model.outc.requires_grad_(False)

## Fix safety
Unsafe: the module stays as it is from then on, which is what was meant.

## When it speaks, what silences it
At the 12th step of an optimizer that has changed parameters of a module which carries a plain attribute `requires_grad = False`, or of
parameters (or their module) with a public attribute that is False and whose name is `requires_grad` but for a letter or two; or where
what freezes by the names of `named_parameters()` or `named_modules()` has run, what it compares with is known, it freezes nothing, and
all that has such a name from some module inside on (or would have, wrapped) is trained. For a freeze in a method: when that method is
called only from an overridden `train()`, `train()` was never called, what it loops over is not empty with the module's present values,
and the parameters it would freeze are trained. For a switch of the whole: where one statement turns parameters on and off again and
again, some of which did not require grad when their optimizer was made, and some of which did. All at once, or only those that were
frozen, is silent. For gradients that were kept: at the step after the 3rd, 12th, 24th, 60th ..., when it has changed parameters that do
not require grad. For a target network: when `load_state_dict` copies parameters of the same optimizer over parameters that its steps have
moved since the copy before, and the next backward calls give gradient to both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.interpreter import Interpreter, UnknownError
from gradguard.analysis.places.source import ResolvedSite, at_line, dotted
from gradguard.analysis.program.index import Program, program_of
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import attributes, class_attributes, modules_in, named_modules, parameters_in
from gradguard.fixes.at_places import own_statement, put_after
from gradguard.fixes.edits import replaced
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.moving_frozen import MovingFrozen
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.tensor_state import version_of
from gradguard.monitors.trained_copies import TrainedCopy
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol.gg613_unintended_training import still_moving, trained_copy
from gradguard.rules.protocol.gg613_unintended_training.freeze_by_name import freezes_nothing
from gradguard.rules.protocol.gg613_unintended_training.misspelt_freeze import misspelt
from gradguard.rules.protocol.gg613_unintended_training.unfrozen import unfrozen
from gradguard.rules.spans import class_node, the_one

CODE, NAME = "GG613", "unintended-training"
_STEPS = 12


def recognise(incident: Incident) -> Diagnosis | None:
    """The assignment that freezes nothing, or the place where the freeze should be called."""
    finding = incident.finding
    book: Book = finding.book
    if isinstance(finding, MovingFrozen):
        return still_moving.told(incident, finding, book, CODE, NAME)
    if isinstance(finding, TrainedCopy):
        return trained_copy.told(incident, finding, book, CODE, NAME)
    if book.steps != _STEPS:
        return None
    moved = {id(p) for ref, version in book.first_versions if (p := ref()) is not None and version_of(p) >= version + _STEPS - 1}
    again = unfrozen(incident, book, moved)
    if again is not None:
        return again
    wrong = misspelt(incident, book, moved, CODE, NAME)
    if wrong is not None:
        return wrong
    nothing = freezes_nothing(incident, book, moved, CODE, NAME)
    if nothing is not None:
        return nothing
    seen: set[int] = set()
    for name, root in [(name, value) for name, value in incident.names.bindings if isinstance(value, nn.Module)]:
        if id(root) in seen:
            continue
        for path, module in named_modules(root):
            seen.add(id(module))
            parameters: list[torch.Tensor] = [p for p in parameters_in(module) if id(p) in moved and p.requires_grad]
            if not parameters:
                continue
            full = f"{name}.{path}" if path else name
            if attributes(module).get("requires_grad") is False and len(parameters) == len(list(parameters_in(module))):
                return _flag(incident, book, full, module, parameters)
            found = _never_frozen(incident, book, full, module, moved)
            if found is not None:
                return found
    return None


def _flag_sets(sources: list[Source], name: str) -> list[tuple[Source, ast.stmt]]:
    """Statements that set `.requires_grad` of something of this name; where there is none, of anything but a parameter in a loop."""
    found = [
        (program, write)
        for source in sources
        if (program := program_of(source)) is not None
        for write in program.writes("requires_grad")
        if write.owner is not None and not (isinstance(write.node, ast.Call) and isinstance(write.node.func, ast.Attribute))
    ]
    exact = [(program, write) for program, write in found if write.owner is not None and (dotted(write.owner) or "").split(".")[-1] == name]
    of_modules = exact or [(program, write) for program, write in found if not _is_parameter(program, write.owner)]
    return [(program.source, statement) for program, write in of_modules if (statement := program.source.statement(write.node)) is not None]


def _is_parameter(program: Program, owner: ast.expr | None) -> bool:
    """Whether it is what a loop gives that goes over parameters."""
    over = [each.value for each in program.reaching(owner) if each.kind == "loop"] if owner is not None else []
    return any(name.endswith("parameters") for each in over if isinstance(each, ast.Call) for name in program.names_of(each.func))


def _flag(incident: Incident, book: Book, full: str, module: nn.Module, parameters: list[torch.Tensor]) -> Diagnosis:
    place = the_one(incident, lambda sources: _flag_sets(sources, full.split(".")[-1]))
    name = wording.optimizer_name(book, incident)
    names = wording.parameter_names(parameters, incident.names)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{full}` is trained although `{full}.requires_grad = False`: on a module that is a plain attribute and freezes nothing",
        culprit=None
        if place is None
        else place.statement_span("sets an attribute of the module; its parameters still require grad", "culprit"),
        related=wording.spans(wording.span(book.step_site, f"`{name}` changes its parameters here", "context")),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"{wording.listed(names, len(parameters))} require grad and were changed at each of the {book.steps} steps of "
        f"`{name}`.",
        fixes=[
            Fix(
                title=f"Call `{full}.requires_grad_(False)`",
                safety="unsafe",
                detail="It sets the flag on every parameter of the module.",
                patch=_called(place),
            )
        ],
    )


def _called(place: ResolvedSite | None) -> str | None:
    """The assignment to a module's flag as a call of the method that sets those of its parameters."""
    own = own_statement(place)
    if own is None or not isinstance(own[1], ast.Assign) or len(own[1].targets) != 1 or not isinstance(own[1].targets[0], ast.Attribute):
        return None
    holder = own[0].segment(own[1].targets[0].value)
    return None if holder is None else replaced(own[0], [(own[1], f"{holder}.requires_grad_(False)")])


# -- a freeze in a method that nothing calls -----------------------------------------------------------------------------


def _never_frozen(incident: Incident, book: Book, full: str, module: nn.Module, moved: set[int]) -> Diagnosis | None:
    kind = type(module)
    if "train" not in class_attributes(kind) or any(
        s.ref() is module or ((m := s.ref()) is not None and any(c is module for c in modules_in(m)))
        for s in incident.notes[Ledger].modes.switches
    ):
        return None
    found = class_node(kind)
    if found is None:
        return None
    source, tree = found
    methods = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    train = methods.get("train")
    if train is None:
        return None
    called = [name for name in methods if name != "train" and _calls(train, name)]
    freezing = [name for name in called if _freezes(methods[name])] or (["train"] if _freezes(train) else [])
    if not freezing:
        return None
    freeze = methods[freezing[0]]
    if any(_calls(node, freeze.name) for name, node in methods.items() if name not in ("train", freeze.name)):
        return None
    if freeze.name != "train" and any(
        isinstance(node, ast.Attribute) and node.attr == freeze.name and not (dotted(node) or "").startswith("self.")
        for node in ast.walk(source.tree or tree)
    ):
        return None  # called from outside
    targets = _would_freeze(module, freeze)
    parameters = [p for p in targets if id(p) in moved]
    if not parameters or len(parameters) < len(targets):
        return None
    init = methods.get("__init__")
    at = at_line(source.filename, init.body[-1].lineno) if init is not None else None
    inside = next((node for node in ast.walk(train) if isinstance(node, ast.Call) and dotted(node.func) == f"self.{freeze.name}"), None)
    there = None if inside is None else at_line(source.filename, inside.lineno)
    reads = list(
        dict.fromkeys(
            node.attr for node in ast.walk(freeze) if isinstance(node, ast.Attribute) and (dotted(node) or "").startswith("self.")
        )
    )
    names = wording.parameter_names(parameters, incident.names)
    about = " and ".join(f"`{each}`" for each in reads[:3] if not callable(getattr(nn.Module, each, None)))
    what = f"`{freeze.name}()`" if freeze.name != "train" else "`train()`"
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{full}` freezes {about or 'its parameters'} only in `train()`, which is never called: they are trained",
        culprit=None if at is None else at.statement_span(f"`__init__` ends here without calling {what}", "culprit"),
        related=wording.spans(
            None if there is None else there.statement_span("the only call of it", "context"),
            wording.span(book.step_site, "changes the parameters", "context"),
        ),
        tensors=wording.facts(parameters, incident.names),
        explanation=(
            f"{what} of `{kind.__name__}` would switch requires_grad off for {wording.listed(names, len(parameters))}; a new "
            "module is in train mode without train() being called, "
            f"so nothing has run it, and {book.steps} steps have changed them."
        ),
        fixes=[
            Fix(
                title=f"Call `self.{freeze.name}()` at the end of `__init__` as well"
                if freeze.name != "train"
                else f"Call `{full}.train()` before making the optimizer",
                safety="unsafe",
                patch=put_after(at, f"self.{freeze.name}()") if freeze.name != "train" and not freeze.args.args[1:] else None,
            )
        ],
        confidence="likely",
    )


def _calls(node: ast.AST, method: str) -> bool:
    return any(isinstance(each, ast.Call) and dotted(each.func) == f"self.{method}" for each in ast.walk(node))


def _freezes(node: ast.AST) -> bool:
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Assign)
            and isinstance(each.value, ast.Constant)
            and each.value.value is False
            and any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in each.targets)
        ):
            return True
        if (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "requires_grad_"
            and each.args
            and getattr(each.args[0], "value", None) is False
        ):
            return True
    return False


def _would_freeze(module: nn.Module, freeze: ast.FunctionDef) -> list[torch.Tensor]:
    """The parameters the method would freeze with the module's present values; nothing where that cannot be told without running it."""
    found: dict[int, torch.Tensor] = {}
    try:
        for value in _frozen(freeze.body, Interpreter({"self": module})):
            if isinstance(value, nn.Module):
                found.update((id(p), p) for p in parameters_in(value))
            elif isinstance(value, torch.Tensor):
                found[id(value)] = value
    except UnknownError:
        return []
    return list(found.values())


def _frozen(body: list[ast.stmt], known: Interpreter) -> Iterator[Any]:
    """What `X` is in each `X.requires_grad = False`, loops and plain conditions followed."""
    for statement in body:
        if isinstance(statement, ast.For):
            for item in known.items(known.value(statement.iter)):
                known.assign(statement.target, item)
                yield from _frozen(statement.body, known)
        elif isinstance(statement, ast.If):
            yield from _frozen(statement.body if known.truth(statement.test) else statement.orelse, known)
        elif isinstance(statement, ast.Assign) and _freezes(statement):
            yield from (known.value(t.value) for t in statement.targets if isinstance(t, ast.Attribute))
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
            known.assign(statement.targets[0], known.value(statement.value))
        elif (
            isinstance(statement, ast.Expr)
            and _freezes(statement)
            and isinstance(statement.value, ast.Call)
            and isinstance(statement.value.func, ast.Attribute)
        ):
            yield known.value(statement.value.func.value)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a module that is meant to be frozen is trained",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
