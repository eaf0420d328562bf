"""# GG605 parameter-without-grad

## What it is
Parameters that an optimizer has never got a gradient in the whole run: their module is never called, or what it computes
never reaches a loss.

## Why it is wrong
They keep their initial values. Most often another layer was called in their place (a copied line with the wrong name), or
their module runs under `no_grad`, or its result is dropped or detached.

## Example
    i = torch.sigmoid(self.ix(x) + self.ih(h))
    f = torch.sigmoid(self.ix(x) + self.ih(h))     # meant: self.fx and self.fh, which are never used

## Use instead
Call the layers that were made for it; compute what is to be trained with grad mode on.

## Fix safety
Manual.

## When it speaks, what silences it
When the optimizer or the guard comes to its end (or after 400 steps of the optimizer), about parameters that no step has
ever changed and no backward filled, while the others were; at its 16th step, as likely, where the line that cuts them off stands under
no condition, and nothing else calls them. Only if the module was called (at steps 13 and 14 calls are
looked at), or nothing in its class's source ever reads the attribute it is kept in. What began as a copy of a module that trains, as
target networks and momentum encoders do, is silent. Heads that this run does not use and
that the source does use are silent, and so is what drops out of a loss made of derivatives (`autograd.grad(...,
create_graph=True)`). Parameters that are frozen count where one statement freezes them and others in each iteration of the loop,
and only the others are switched on again; where all of an optimizer's parameters were switched off and on in turns and are only
switched off now, at its tenth step without any gradient; and where a statement that freezes many has met matrices that are still all
zeros, as adapters begin: their layer gives 0 for as long as they are frozen.
"""

from __future__ import annotations

import ast
import weakref
from typing import Any

import torch
from torch import nn

from gradguard.analysis.history import cut_origins
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.copied_weights import is_copied
from gradguard.analysis.places.source import ResolvedSite, at_line, resolve
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import parameters_in, peek
from gradguard.fixes.edits import replaced
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.checkpoints import Checkpointed
from gradguard.monitors.cut_paths import LoneLoss
from gradguard.monitors.findings import Confirmed
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book, Prepared
from gradguard.monitors.surveys import FrozenAtZero, SwitchedOff
from gradguard.monitors.tensor_state import version_of
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.protocol import leaving
from gradguard.rules.protocol.blocked import blocked
from gradguard.rules.protocol.cut_off import of_calls, the_cut
from gradguard.rules.protocol.gg605_parameter_without_grad import frozen_at_zero, hook_output, left_off
from gradguard.rules.protocol.gg605_parameter_without_grad.fixed_index import fixed_index
from gradguard.rules.protocol.gg605_parameter_without_grad.reads import bare_read, reads_of
from gradguard.rules.protocol.new_leaves import new_leaf, without_wrapper
from gradguard.rules.protocol.settled import settled
from gradguard.rules.spans import attribute_set, class_node
from gradguard.rules.told import Told

CODE, NAME = "GG605", "parameter-without-grad"
Idle = list[tuple[torch.Tensor, str, nn.Module, nn.Module | None, str]]  # parameter, path, module, parent, attribute in the parent


def recognise(incident: Incident) -> Diagnosis | None:
    """The parameters, and the line that should have used them."""
    finding = incident.finding
    if isinstance(finding, Confirmed):
        return finding.diagnosis
    book: Book = finding.book
    if isinstance(finding, SwitchedOff):
        return left_off.told(incident, book, [p for ref in finding.parameters if (p := ref()) is not None], CODE, NAME)
    if isinstance(finding, FrozenAtZero):
        return _frozen(incident, book)
    refs: list[weakref.ref[Any]] = finding.parameters
    told = incident.notes[Checkpointed].cut_off  # by GG711
    ledger = incident.notes[Ledger]
    filled = ledger.severed.filled  # and cleared again: by other means than a step, or another rule has said so
    parameters = [p for ref in refs if (p := ref()) is not None and id(p) not in filled]
    idle = _of_their_own(incident, book, _idle(incident, [p for p in parameters if id(p) not in told or told[id(p)]() is not p]))
    if not idle:
        return None
    diagnosis = (
        _called(incident, book, idle, ledger.called)
        or _unused(incident, book, idle)
        or _bare(incident, book, idle)
        or _same_item(incident, book, idle)
    )
    if diagnosis is None:
        return None
    kept = [(TensorRef(p), version_of(p)) for p, *_ in idle]
    last = dict.fromkeys(range(len(kept)), True)

    def holds() -> bool:
        for i, (ref, version) in enumerate(kept):
            parameter = ref()
            if parameter is not None:
                last[i] = last[i] and parameter.grad is None and version_of(parameter) == version
        return any(last.values())

    if book.steps >= 400:
        return diagnosis
    book.prepared = [each for each in book.prepared if each.code != CODE] + [Prepared(CODE, diagnosis, holds)]
    if diagnosis.confidence == "certain" and settled(incident, diagnosis.culprit, [each[1] for each in idle]):
        return diagnosis.model_copy(update={"confidence": "likely"})  # which only the end of the run makes certain
    return None


def _frozen(incident: Incident, book: Book) -> Diagnosis | None:
    """What is frozen at zero: said at once where nothing switches anything on again, else at the end if it still holds."""
    found = frozen_at_zero.find(incident)
    if found is None:
        return None
    diagnosis = frozen_at_zero.render(found, incident, CODE, NAME)
    kept = [(TensorRef(p), version_of(p)) for p in found.parameters]

    def holds() -> bool:
        return all(p is None or (not p.requires_grad and version_of(p) == version) for ref, version in kept for p in (ref(),))

    if not frozen_at_zero.switched_on_elsewhere(incident, found.site):
        return diagnosis
    book.prepared = [*book.prepared, Prepared(CODE, diagnosis, holds)]
    return None


def _idle(incident: Incident, parameters: list[torch.Tensor]) -> Idle:
    found: Idle = []
    for parameter in parameters:
        state = incident.names.state(parameter)
        if state is None or not state.root.training or not incident.names.is_a_modules(parameter):
            continue
        owner_path = state.path.rpartition(".")[0]
        parent = state.root
        steps = owner_path.split(".") if owner_path else []
        for step in steps[:-1]:
            parent = peek(parent, step, parent)
        found.append((parameter, state.full, state.owner, parent if steps else None, steps[-1] if steps else state.path))
    return found


def _of_their_own(incident: Incident, book: Book, idle: Idle) -> Idle:
    """Without the modules that began as copies of what trains, such as a target network: nobody meant them to get gradients."""
    waiting = {id(each[0]) for each in idle}
    trained = [p for p in book.parameters() if id(p) not in waiting]
    copies = [each[1] for each in idle if is_copied(each[0], trained)]
    if not copies:
        return idle
    paths = [state.full for p in trained if (state := incident.names.state(p)) is not None]
    whole = {_apart(path, paths) for path in copies}
    return [each for each in idle if not any(each[1].startswith(module) for module in whole)]


def _apart(path: str, others: list[str]) -> str:
    """The path, with its final dot, of the largest module around a parameter that has none of the others; else the parameter's."""
    parts = path.split(".")
    modules = (".".join(parts[:i]) + "." for i in range(1, len(parts)))
    return next((module for module in modules if not any(other.startswith(module) for other in others)), path)


def _called(incident: Incident, book: Book, idle: Idle, called: dict[int, Any]) -> Diagnosis | None:
    """Their module runs, and yet they get nothing."""
    hit = [(each, called[id(each[2])]) for each in idle if id(each[2]) in called and called[id(each[2])][0]() is each[2]]
    if not hit:
        return None
    root = incident.names.state(hit[0][0][0])
    whole = None if root is None else called.get(id(root.root))
    entry = hit[0][1]
    if whole is not None and whole[0]() is (root and root.root) and whole[2] == entry[2]:
        entry = whole  # the line that every reader knows; but where grad mode is off for a part only, it is the part's
    elif not any(each[2] for _, each in hit):
        entry = _outermost(root, called, [each[0] for each, _ in hit]) or entry
    site, grad_on = entry[1:]
    place = resolve(site)
    name = wording.optimizer_name(book, incident)
    paths = [each[1] for each, _ in hit]
    culprit: SourceSpan | None = None
    shown = wording.listed(paths, len(paths))
    prefix = wording.common_prefix(paths) or paths[0]
    others = [full for p in book.parameters() if (full := getattr(incident.names.state(p), "full", None)) and p.grad is not None]
    if any(other.startswith(f"{prefix}.") for other in others):  # a part of it does train
        prefix = paths[0] if len(paths) == 1 else paths[0].rpartition(".")[0] or paths[0]
    alone = prefix in paths or any(other.startswith(f"{prefix}.") for other in others)  # parameters of a module that trains otherwise
    if not any(entry[2] for _, entry in hit) and place is not None:
        blocks = [*place.enclosing_withs(), *place.decorators()]
        block = next((b for b in blocks if "no_grad" in b.text or "inference_mode" in b.text or "set_grad_enabled" in b.text), None)
        culprit = (
            block.span.model_copy(
                update={"role": "culprit", "label": f"everything computed inside has no graph: `{prefix}` gets no gradient"}
            )
            if block is not None
            else None
        )
        culprit = culprit or place.span("runs with grad mode off", "culprit")
        headline = f"`{prefix}` is in `{name}` and never gets a gradient: it is only ever called with grad mode off"
        fix = Fix(
            title=f"Run `{wording.short(place.text, 48)}` outside `{block.text if block is not None else 'no_grad'}`, or leave "
            f"`{prefix}` out of `{name}`",
            safety="unsafe",
        )
    elif all(entry[2] for _, entry in hit):
        if grad_on is None or place is None:
            return None
        headline = f"`{prefix}` is called and in `{name}`, but never gets a gradient: "
        if alone:
            many = len(paths) > 1
            headline = f"{shown} {'are' if many else 'is'} in `{name}` and never get{'' if many else 's'} a gradient: "
        parameters = [each[0] for each, _ in hit]
        at = place.span("called here", "context")
        ledger = incident.notes[Ledger]
        cuts = ledger.severed.cuts(parameters)
        found = cut_origins.merged(cut_origins.of_cut(incident, cut) for cut in cuts)
        if any(origin.key in incident.notes[Told].lost_terms for origin in found):
            return None  # the term without a path has been shown
        if not found and _is_told(incident, parameters):
            return None
        between = ledger.severed.blocked(parameters)
        readers = ledger.severed.read_by(cuts)
        mine = next((call for call in reversed(ledger.calls()) if call.stack in readers), None)
        twice = None if mine is None else of_calls(incident.journal, readers, mine, book.ref())
        cut = the_cut(found, twice, shown) if between is None else blocked(between)
        if cut is not None and between is None:
            cut = hook_output.in_hook(incident, found[0], cut) or cut
        if cut is not None:
            return _told(incident, book, headline + cut.clause, cut.culprit, [*cut.related, at], cut.fix, parameters, shown)
        lone = ledger.severed.losses(parameters)
        if len(lone) == 1 and (loss := resolve(lone[0].made)) is not None:
            return _lone(incident, book, headline, lone[0], loss, parameters, shown)
        cut = the_cut(leaving.left(incident, parameters))
        if cut is not None:
            told = _told(incident, book, headline + cut.clause, cut.culprit, [*cut.related, at], cut.fix, parameters, shown)
            return told.model_copy(update={"confidence": "likely"})
        made = new_leaf(incident) if ledger.severed.has_new_leaves() else None
        if made is not None:
            leaf = made.statement_span("a new leaf in each step: no gradient leads from it back to what it is made of", "culprit")
            fix = without_wrapper(made)
            headline += "a Parameter is made anew of computed values in each step"
            told = _told(incident, book, headline, leaf, [at], fix, parameters, shown)
            return told.model_copy(update={"confidence": "likely"})
        headline += (
            f"what is computed from {'them' if len(paths) > 1 else 'it'} does not reach any loss"
            if alone
            else "what it computes does not reach any loss"
        )
        bare = _bare(incident, book, [each for each, _ in hit])
        if bare is not None:
            return bare
        if not found and any(call.kind == "grad" and call.create_graph for call in ledger.calls()):
            return None  # a loss of derivatives: what only adds a constant (a last bias) is in none of them
        related = [spot.span("cut off here", "context") for origin in found[:3] if (spot := origin.place) is not None]
        fix = Fix(title="Find where its result is detached, dropped or turned into a number", safety="manual")
        return _told(incident, book, headline, None, [at, *related], fix, parameters, shown)
    else:
        return None
    return _told(
        incident,
        book,
        headline,
        culprit,
        [place.span("called here", "context")] if place is not None else [],
        fix,
        [each[0] for each, _ in hit],
        shown,
    )


def _outermost(state: Any, called: dict[int, Any], parameters: list[torch.Tensor]) -> Any:
    """Where the largest part of the model that has all these parameters, and only runs with grad mode off, was called."""
    part = None if state is None else state.root
    for step in () if state is None else state.path.split(".")[:-1]:
        part = peek(part, step, None)
        entry = called.get(id(part))
        if isinstance(part, nn.Module) and entry is not None and entry[0]() is part and not entry[2]:
            held = {id(p) for p in parameters_in(part)}
            return entry if all(id(p) in held for p in parameters) else None
    return None


def _is_told(incident: Incident, parameters: list[torch.Tensor]) -> bool:
    """Whether a term of the loss was shown whose values left torch where these parameters' did (`torch.FloatTensor` carries no memory)."""
    told = incident.notes[Told].lost_terms
    return bool(told) and any(cut_origins.of_cut(incident, cut).key in told for cut in incident.notes[Ledger].severed.met(parameters))


def _lone(
    incident: Incident, book: Book, headline: str, lone: LoneLoss, loss: ResolvedSite, parameters: list[torch.Tensor], shown: str
) -> Diagnosis:
    """A loss is computed with them, and another one is all that backward starts from."""
    name = loss.targets[0] if loss.targets else wording.short(loss.text, 40)
    back = resolve(lone.backward)
    culprit = loss.span("no backward starts from it, and nothing that one starts from contains it", "culprit")
    related = wording.spans(
        wording.span(lone.taken, "takes only its number", "context"),
        None if back is None else back.span("starts from another loss", "backward"),
    )
    fix = Fix(title=f"Add `{name}` (times its weight) to the loss that backward starts from", safety="unsafe")
    headline += f"it goes into `{name}`, which is never added to the loss"
    return _told(incident, book, headline, culprit, related, fix, parameters, shown)


def _unused(incident: Incident, book: Book, idle: Idle) -> Diagnosis | None:
    """Nothing in the class's source ever uses the attributes; perhaps another layer is used in their place."""
    dead = [each for each in idle if each[3] is not None and _never_read(type(each[3]), each[4])]
    if not dead:
        return None
    parent = dead[0][3]
    assert parent is not None
    dead = [each for each in dead if each[3] is parent]
    attributes = list(dict.fromkeys(each[4] for each in dead))
    called = " and ".join(f"`{name}`" for name in attributes[:4])
    name = wording.optimizer_name(book, incident)
    kind = type(parent).__name__
    made = attribute_set(type(parent), attributes[0])
    instead = _used_twice(parent, attributes)
    get, them = ("get", "them") if len(attributes) > 1 else ("gets", "it")
    declared = None if made is None else made.statement_span("made here and never called", "declared")
    parameters = [each[0] for each in dead]
    shown = wording.listed([each[1] for each in dead], len(dead))
    if instead is not None:
        place, twins = instead
        text = " and ".join(f"`self.{twin}`" for twin in twins)
        culprit = place.statement_span(f"uses {text} again; {called} {'are' if len(attributes) > 1 else 'is'} never used", "culprit")
        again = f"{text} {'are' if len(twins) > 1 else 'is'} used a second time"
        headline = f"{called} of `{kind}` never {get} a gradient: nothing calls {them}, and {again}"
        fix = Fix(title=f"Use {' and '.join(f'`self.{a}`' for a in attributes[:4])} here", safety="unsafe")
        return _told(incident, book, headline, culprit, wording.spans(declared), fix, parameters, shown)
    are = "are" if len(attributes) > 1 else "is"
    headline = f"{called} of `{kind}` {are} in `{name}` and never {get} a gradient: nothing in `{kind}` uses {them}"
    fix = Fix(title=f"Call {called} in `forward`, or remove {'them' if len(attributes) > 1 else 'it'}", safety="manual")
    return _told(incident, book, headline, declared and declared.model_copy(update={"role": "culprit"}), [], fix, parameters, shown)


def _bare(incident: Incident, book: Book, idle: Idle) -> Diagnosis | None:
    """They, or their module, are only read for the bare values: `self.embedding.weight.data[index]`, `self.scale.exp().item()`."""
    for parameter, path, owner, parent, attribute in idle:
        own = path.rpartition(".")[2]
        read = (None if parent is None else bare_read(type(parent), attribute)) or bare_read(type(owner), own)
        if read is None:
            continue
        name = wording.optimizer_name(book, incident)
        culprit = read.place.statement_span(f"`{read.how}` gives the bare values, without a path", "culprit")
        headline = f"`{path}` is in `{name}` and never gets a gradient: it is only read through `{read.how}`"
        title = f"Read `self.{read.attribute}` with its graph: call it, or drop `{read.how}`"
        if read.number:
            title = f"Use `self.{read.attribute}` as a tensor: without `{read.how}`"
        return _told(incident, book, headline, culprit, [], Fix(title=title, safety="unsafe", detail=read.detail), [parameter], f"`{path}`")
    return None


def _same_item(incident: Incident, book: Book, idle: Idle) -> Diagnosis | None:
    """A loop over a list of modules calls one and the same of them each time."""
    parameters = [each[0] for each in idle]
    found = fixed_index(incident.names, parameters, incident.notes[Ledger])
    if found is None:
        return None
    item = f"{found.items}[{found.index}]"
    culprit = found.place.span(f"calls `{item}` {found.times} times, once for each item", "culprit")
    headline = f"the other items of `{found.items}` never get a gradient: the loop over them calls `{item}` each time"
    title = f"Use `{found.instead}` in place of `{item}`" if found.instead else f"Call each item of `{found.items}`"
    call, source = found.place.call, found.place.source
    patch = replaced(source, [(call.func, found.instead)]) if found.instead and call is not None and source is not None else None
    fix = Fix(title=title, safety="unsafe", patch=patch if call is not None and source and source.flat(call.func) == item else None)
    return _told(incident, book, headline, culprit, [], fix, parameters, wording.listed([each[1] for each in idle], len(idle)))


def _told(
    incident: Incident,
    book: Book,
    headline: str,
    culprit: SourceSpan | None,
    related: list[SourceSpan],
    fix: Fix,
    parameters: list[torch.Tensor],
    shown: str,
) -> Diagnosis:
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=[*related, *wording.spans(wording.span(book.step_site, "no step has ever changed them", "context"))],
        tensors=wording.facts(parameters, incident.names),
        explanation=f"{shown}: no backward has filled a gradient since training began, and no step has changed a value, while the "
        "optimizer's other parameters were trained.",
        fixes=[fix],
        confidence="likely" if culprit is None else "certain",
    )


def _never_read(kind: type, attribute: str) -> bool:
    reads = reads_of(kind)
    if reads is None or attribute.isdigit() or attribute in reads or len(reads) < 2:
        return False
    found = class_node(kind)
    assert found is not None
    source = found[0]
    # read from elsewhere (`model.head(x)`), or by a subclass
    elsewhere = [
        node
        for node in ast.walk(source.tree or ast.Module([], []))
        if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load)
    ]
    return not elsewhere


def _used_twice(parent: nn.Module, dead: list[str]) -> tuple[ResolvedSite, list[str]] | None:
    """The statement that uses layers of the same shape for a second time, where the unused ones were meant."""
    reads = reads_of(type(parent))
    found = class_node(type(parent))
    if reads is None or found is None:
        return None
    shapes = [_shapes(peek(parent, name, None)) for name in dead]
    twins = {
        name: nodes
        for name, nodes in reads.items()
        if len(nodes) > 1 and _shapes(peek(parent, name, None)) in shapes and _shapes(peek(parent, name, None))
    }
    second = {name: max(nodes, key=lambda node: (node.lineno, node.col_offset)) for name, nodes in twins.items()}
    first = {name: min(nodes, key=lambda node: (node.lineno, node.col_offset)) for name, nodes in twins.items()}
    lines = [node.lineno for name, node in second.items() if first[name].lineno != node.lineno]
    if not lines:
        return None
    line = max(set(lines), key=lines.count)
    names = [name for name, node in second.items() if node.lineno == line]
    if len(names) < len(dead) and len(dead) > 1:
        return None
    place = at_line(found[0].filename, line)
    return None if place is None else (place, names)


def _shapes(module: object) -> tuple[object, ...]:
    if not isinstance(module, nn.Module):
        return ()
    return (type(module).__name__, *(tuple(p.shape) for p in parameters_in(module)))


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="parameters in an optimizer that never get a gradient",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
