"""# GG603 optimizer-missing-parameters

## What it is
Parameters of a trained model get gradients at every backward, but no optimizer has them: they keep their initial values.

## Why it is wrong
The optimizer updates what it was given when it was made. Modules kept in a plain list or dict, and tensors that are not
`nn.Parameter` (or were computed from one: `nn.Parameter(...).unsqueeze(0)`), are not part of `model.parameters()`; a module left
out of the optimizer's arguments is not either. The loss falls all the same, because the rest of the model adapts to the random part.

## Example
    self.convs = [nn.Conv1d(16, 8, k) for k in (2, 3, 4)]     # a plain list: unknown to self.parameters()
    self.keys = torch.randn(32, 16, requires_grad=True)       # no nn.Parameter

## Use instead
    self.convs = nn.ModuleList(nn.Conv1d(16, 8, k) for k in (2, 3, 4))
    self.keys = nn.Parameter(torch.randn(32, 16))

## Fix safety
Unsafe: more is trained than before; saved checkpoints get new entries.

## When it speaks, what silences it
When the optimizer or the guard comes to its end (or after 400 steps), if leaves that were seen in three or more graphs are
in no optimizer and have exactly the values they had at first; at the twelfth step already, as likely, where no module lists them, where the
optimizer has nothing but frozen parameters, or
they joined the model after the optimizer was made. It is silent about leaves that are no module's (inputs,
latent codes), about modules in eval mode or loaded with `load_state_dict` (a pretrained network through which gradients only
flow), about anything an optimizer made later takes up, and about values that change by hand. And at the
fourth look in a row at which the parameters of the look before are gone and others of the same shapes get gradients, where they were
made in the course of a module's forward call, or one place makes a layer and calls it at once (`nn.Linear(8, 2)(x)`).
"""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import modules_in, parameters_in, peek
from gradguard.fixes.at_places import made_with
from gradguard.monitors.findings import Confirmed
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book, Prepared
from gradguard.monitors.surveys import MadeAnew
from gradguard.monitors.untrained_leaves import Stranger
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol import orphans
from gradguard.rules.protocol.gg603_optimizer_missing_parameters.joined import adding_place, joined_later
from gradguard.rules.protocol.gg603_optimizer_missing_parameters.made_anew import made_anew
from gradguard.rules.protocol.owners import Owner, Owners, is_record
from gradguard.rules.spans import attribute_set
from gradguard.rules.told import Told

CODE, NAME = "GG603", "optimizer-missing-parameters"
Found = list[tuple[torch.Tensor, Owner]]


def recognise(incident: Incident) -> Diagnosis | None:
    """Which parameters were left out, and the line that made them unknown."""
    finding = incident.finding
    if isinstance(finding, Confirmed):
        return finding.diagnosis
    book: Book = finding.book
    if isinstance(finding, MadeAnew):
        return made_anew(incident, book, finding.shapes, finding.makings, CODE, NAME)
    strangers: list[Stranger] = finding.strangers
    owners = Owners(incident.names)
    left = [(leaf, owner) for s in strangers if (leaf := s.ref()) is not None and (owner := owners.of(leaf)) is not None]
    trained = {id(p) for p in book.parameters()}
    told = incident.notes[Told].trained_elsewhere  # by GG604
    left = [(leaf, owner) for leaf, owner in left if id(leaf) not in told or told[id(leaf)]() is not leaf]
    replaced = {tuple(p.shape) for p in orphans.without_module(incident, book)} if left else set()
    left = [(leaf, owner) for leaf, owner in left if _is_meant(incident, book, owner, trained, tuple(leaf.shape) in replaced)]
    if not left:
        return None
    diagnosis = orphans.partly(incident, book, left) or _told(incident, book, left)
    kept = [s for s in strangers if any(leaf is s.ref() for leaf, _ in left)]
    ledger = incident.notes[Ledger]
    last = {id(s): True for s in kept}

    def holds() -> bool:
        known = ledger.trained_ids()
        for s in kept:
            leaf = s.ref()
            if leaf is not None:
                last[id(s)] = s.same() and id(leaf) not in known
        return all(last.values())

    if book.steps >= 400 and holds():
        return diagnosis
    if diagnosis.code == orphans.CODE or _is_frozen(book) or all(not owner.registered for _, owner in left) or joined_later(book, left):
        early = diagnosis.model_copy(update={"confidence": "likely"})  # nothing but another optimizer could change it
    else:
        early = None
    book.prepared = [each for each in book.prepared if each.code not in ("GG603", "GG604")] + [Prepared(diagnosis.code, diagnosis, holds)]
    return early


def _is_meant(incident: Incident, book: Book, owner: Owner, trained: set[int], replaces: bool) -> bool:
    """Whether the owner is part of what this optimizer trains, not a network that gradients only pass.

    Args:
        replaces: whether the optimizer still has a parameter of its shape that no module has any more. A part whose weights were
            loaded is then the new one of the two (`new.load_state_dict(old.state_dict())`), not a pretrained network.
    """
    if not owner.module.training or not owner.root.training:
        return False
    loaded = [module for ref in incident.notes[Ledger].loaded if (module := ref()) is not None]
    around = {id(owner.root), id(owner.module)}
    if (
        not replaces
        and owner.registered
        and any(id(module) in around or any(child is owner.module for child in modules_in(module)) for module in loaded)
    ):
        return False
    if any(id(p) in trained for p in parameters_in(owner.root)):
        return True
    # a module of its own: meant to be trained when the optimizer trains modules at all, not an image or a latent code
    return owner.registered and any(incident.names.state(p) is not None for p in book.parameters()[:4])


def _is_frozen(book: Book) -> bool:
    """Whether an optimizer has nothing that it could train."""
    parameters = book.parameters()
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _told(incident: Incident, book: Book, left: Found) -> Diagnosis:
    name = wording.optimizer_name(book, incident)
    unregistered = [(leaf, owner) for leaf, owner in left if not owner.registered]
    shown = unregistered or left
    leaf, owner = shown[0]
    paths = [each.path for _, each in shown]
    holder = type(owner.module).__name__
    place: ResolvedSite | None = None
    culprit: SourceSpan | None
    if unregistered:
        attributes = list(dict.fromkeys(each.attribute for _, each in shown if each.module is owner.module))
        place = attribute_set(type(owner.module), owner.attribute)
        plain = owner.computed or leaf is peek(owner.module, owner.attribute, None)
        held = peek(owner.module, owner.attribute, None)
        kind = type(held).__name__
        what = (
            "computed from an `nn.Parameter`, and so a plain tensor"
            if owner.computed
            else "a plain tensor"
            if plain
            else f"kept in a `{kind}`, which is no module"
            if is_record(held)
            else f"kept in a plain {kind}"
        )
        culprit = None if place is None else place.statement_span(f"{what}: not part of `{holder}.parameters()`", "culprit")
        others = [attribute_set(type(owner.module), each) for each in attributes[1:4]]
        related = wording.spans(
            *[each.statement_span(f"{what}, too", "context") for each in others if each is not None],
            wording.span(book.made, f"`{name}` is made without them", "declared"),
        )
        subject = " and ".join(f"`{each}`" for each in attributes[:3])
        are = "are" if len(attributes) > 1 or not plain else "is"
        headline = f"{subject} of `{holder}` {are} never updated: {what}, unknown to `parameters()` and to `{name}`"
        container = "ModuleDict" if isinstance(held, dict) or is_record(held) else "ModuleList"
        them = "them" if len(attributes) > 1 else "it"
        title = f"Make {them} `nn.Parameter`" if plain else f"Use `nn.{container}` for `self.{owner.attribute}`"
        if owner.computed:
            title = f"Make the `nn.Parameter` last: `self.{owner.attribute} = nn.Parameter(...)` around the computed values"
        detail = f" Or make `{kind}` an `nn.Module` that has them as attributes." if is_record(held) else ""
        patch = None
        if place is not None and plain and not owner.computed:
            patch = made_with([place, *(each for each in others if each is not None)], "torch.nn.Parameter")
        elif place is not None and not plain and _holds_modules(held):
            patch = made_with([place], f"torch.nn.{container}", (ast.List, ast.ListComp, ast.Dict, ast.DictComp))
        fix = Fix(title=title, safety="unsafe", detail=f"Before the optimizer is made.{detail}", patch=patch)
    elif joined_later(book, shown):
        model = owner.variable or type(owner.root).__name__
        culprit = wording.span(book.made, f"`{name}` gets the parameters that `{model}` has here, before it gets these", "culprit")
        related = wording.spans(adding_place(incident, book, owner))
        headline = f"{wording.listed(paths, len(paths))} joined `{model}` after `{name}` was made: they get gradients and are never updated"
        fix = Fix(
            title=f"Make `{name}` after `{model}` has all its parameters, or call `{name}.add_param_group(...)` where they are added",
            safety="unsafe",
        )
    elif _is_frozen(book):
        frozen = [toggle[1] for p in book.parameters() if (toggle := incident.journal.toggle_of(p)) is not None]
        culprit = wording.span(book.made, "all that it was given is frozen", "culprit")
        related = wording.spans(wording.span(frozen[0], "frozen here", "context") if frozen and len(set(frozen)) == 1 else None)
        headline = (
            f"every parameter of `{name}` is frozen: its steps change nothing, and {wording.listed(paths, len(paths))}, which "
            f"get{'' if len(paths) > 1 else 's'} the gradients, {'are' if len(paths) > 1 else 'is'} not in it"
        )
        fix = Fix(
            title=f"Give `{name}` the parameters that are to be trained: `[p for p in model.parameters() if p.requires_grad]`",
            safety="unsafe",
            detail="Made after the freeze. Or do not freeze what it has.",
        )
    else:
        culprit = wording.span(book.made, f"leaves out {wording.listed(paths, len(paths))}", "culprit")
        related = []
        headline = f"`{name}` does not have {wording.listed(paths, len(paths))}: they get gradients and are never updated"
        fix = Fix(title=f"Give `{name}` these parameters too, or freeze them with `requires_grad_(False)`", safety="unsafe")
    backward = wording.span(book.last_part.call.site, "fills their gradients", "backward") if book.last_part is not None else None
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=[*related, *wording.spans(backward)],
        tensors=[
            fact.model_copy(update={"name": path})
            for fact, path in zip(wording.facts([each for each, _ in shown], incident.names), paths, strict=False)
        ],
        explanation=(
            f"{wording.listed(paths, len(paths))} took part in the losses that were looked at and got gradient, no optimizer has "
            f"{'them' if len(paths) > 1 else 'it'}, and the values are exactly those of the beginning."
        ),
        fixes=[fix],
    )


def _holds_modules(held: object) -> bool:
    """Whether a list or dictionary has nothing but modules, so that torch's own containers take it."""
    items = list(held) if type(held) is list else list(held.values()) if type(held) is dict else []
    return bool(items) and all(issubclass(type(item), torch.nn.Module) for item in items)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="parameters get gradients but are in no optimizer",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
