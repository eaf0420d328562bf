"""Optimizers that hold parameters of modules which no longer exist: what replaced them, and where."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, at_line, dotted, resolve
from gradguard.analysis.program.index import calls_in, writes_in
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import is_quiet, modules_in, own_dict, peek
from gradguard.fixes.at_places import repeated_after, without_keyword
from gradguard.instrumentation.tensor_refs import TensorRef
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.protocol.made_later import later
from gradguard.rules.protocol.owners import Owner
from gradguard.rules.protocol.placed import classes_on_the_way, placing
from gradguard.rules.spans import bindings, function_around, in_tiers, only_one, the_one
from gradguard.rules.told import Told

CODE, NAME = "GG604", "optimizer-orphaned-parameters"


def partly(incident: Incident, book: Book, left: list[tuple[torch.Tensor, Owner]]) -> Diagnosis | None:
    """Part of the model was replaced after the optimizer was made: it has old parameters that no module has any more."""
    gone = without_module(incident, book)
    return told(incident, book, left, gone) if gone else None


def without_module(incident: Incident, book: Book) -> list[torch.Tensor]:
    """The parameters of an optimizer that no module has any more and that get no gradient."""
    return [p for p in book.parameters() if not incident.names.is_a_modules(p) and p.grad is None and isinstance(p, nn.Parameter)]


def told(incident: Incident, book: Book, left: list[tuple[torch.Tensor, Owner]], gone: list[torch.Tensor]) -> Diagnosis:
    """The diagnosis: the optimizer's parameters are not the model's."""
    name = wording.optimizer_name(book, incident)
    owner = left[0][1]
    still = alive_owner(gone[0])
    if still is not None and _has_name(incident, still):
        return _another(incident, book, left, still)
    paths = [each.path for _, each in left]
    everything = len(gone) == len(book.parameters())
    replaced, whole = _replaced(incident, book, owner, everything)
    if replaced is not None and incident.is_ahead(replaced.file, replaced.line):
        replaced = None
    model = owner.variable or type(owner.root).__name__
    assigned = next(
        (site for ref, site, _ in reversed(incident.notes[Ledger].assignments) if ref() is owner.root or ref() is owner.module), None
    )
    made = wording.span(book.made, f"`{name}` keeps the parameters that `{model}` had here", "declared")
    culprit: SourceSpan | None
    called: SourceSpan | None = None
    if assigned is not None:
        culprit = wording.span(assigned, f"replaces the parameters of `{model}`: `{name}` still has the old ones", "culprit")
        loaded = resolve(assigned)
        patch = without_keyword(loaded.source, loaded.call, "assign") if loaded is not None and loaded.source and loaded.call else None
        fix = Fix(title=f"Load the model before making `{name}`, or load without `assign=True`", safety="unsafe", patch=patch)
    else:
        culprit = replaced
        after = None if everything and whole else later(incident, book.made, culprit)
        title = f"Make `{name}` after the model has its final parameters" + (" (inside the loop that makes the model)" if whole else "")
        if after is not None and after.patch is not None:
            title += f": after line {after.statement.end_lineno}"
            if after.call is not None:
                title += f", `{wording.short(after.call.statement_span().text)}`"
        patch = after.patch if after is not None else None
        if everything and whole and replaced is not None:
            patch = repeated_after(resolve(book.made), at_line(replaced.file, replaced.line))
        fix = Fix(title=title, safety="unsafe", patch=patch)
        if after is not None and after.call is not None:
            called = after.call.span(f"called after `{name}` was made", "context")
            if culprit is not None and _is_a_helpers(culprit):
                called, culprit = (
                    culprit.model_copy(update={"role": "context"}),
                    after.call.span(f"replaces parameters after `{name}` was made: it keeps the old ones", "culprit"),
                )
    back = _copy_put_back(replaced) if assigned is None else None
    if back is not None:
        fix = Fix(
            title=f"Keep the module itself and put it back: `{back[1]} = {back[2]}`, without a copy",
            safety="unsafe",
            detail=f"Or change weights only: `load_state_dict` into the module that `{name}` trains.",
        )
    elif replaced is not None and assigned is None and "deepcopy(" in (replaced.text or ""):
        fix = Fix(
            title=f"Load the values into the model that `{name}` trains (`{model}.load_state_dict(...)`), or make a new optimizer here",
            safety="unsafe",
        )
    if culprit is None and made is not None:
        culprit = made.model_copy(update={"role": "culprit"})
    what = f"`{model}`" if whole else wording.listed(paths, len(paths))
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` updates parameters that the model no longer has: {what} is not trained"
        if everything
        else f"`{name}` still has the parameters that were replaced: {what} {'are' if len(paths) > 1 else 'is'} not trained",
        culprit=culprit,
        related=wording.spans(
            None if back is None else back[0].statement_span("a copy, with parameters of its own", "made"),
            called,
            made,
            wording.span(book.step_site, "steps on the old parameters", "context"),
        ),
        tensors=wording.facts([leaf for leaf, _ in left], incident.names),
        explanation=(
            f"{len(gone)} of the {len(book.parameters())} parameters of `{name}` belong to no module any more and get no "
            "gradient, while "
            f"{wording.listed(paths, len(paths))} {'get' if len(paths) > 1 else 'gets'} gradient and "
            f"{'are' if len(paths) > 1 else 'is'} in no optimizer."
        ),
        fixes=[fix],
    )


def _has_name(incident: Incident, module: nn.Module) -> bool:
    """Whether a variable leads to a module: a method that was kept for its call (`go = net.train`) keeps alive what was replaced."""
    return any(each is module for name, root in incident.names.modules if name is not None for each in modules_in(root))


def _is_a_helpers(replacing: SourceSpan) -> bool:
    """Whether the line stands in a function outside of classes, which replaces layers whenever it is called: the call is what is late."""
    place = at_line(replacing.file, replacing.line)
    return place is not None and place.enclosing_function is not None and place.enclosing_class is None


def _another(incident: Incident, book: Book, left: list[tuple[torch.Tensor, Owner]], still: nn.Module) -> Diagnosis:
    """The optimizer's model is there all right, and another one is trained: a copy, in most cases."""
    name = wording.optimizer_name(book, incident)
    owner = left[0][1]
    # GG603 need not tell of the same parameters again
    incident.notes[Told].trained_elsewhere.update((id(leaf), TensorRef(leaf)) for leaf, _ in left)
    model = owner.variable or type(owner.root).__name__
    known = next(((variable, root) for variable, root in incident.names.modules if any(m is still for m in modules_in(root))), None)
    theirs = f"`{known[0]}`" if known is not None and known[0] else "another model"
    root = peek(owner.root, "_orig_mod", owner.root)  # what torch.compile has wrapped
    alike = known is not None and type(known[1]) in (type(root), type(owner.root))
    place = the_one(incident, lambda sources: ((source, node) for source in sources for node in _copies(source))) if alike else None
    paths = [each.path for _, each in left]
    culprit = None if place is None else place.statement_span("a copy has parameters of its own, which no optimizer holds", "culprit")
    made = wording.span(book.made, f"`{name}` was given other parameters here", "declared")
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` holds the parameters of {theirs}, and what gets gradient is `{model}`: neither is trained",
        culprit=culprit,
        related=wording.spans(made, wording.span(book.step_site, "steps on parameters without a gradient", "context")),
        tensors=wording.facts([leaf for leaf, _ in left], incident.names),
        explanation=(
            f"None of the {len(book.parameters())} parameters of `{name}` gets a gradient, while {wording.listed(paths, len(paths))} "
            f"{'get' if len(paths) > 1 else 'gets'} gradient and {'are' if len(paths) > 1 else 'is'} in no optimizer. "
            f"{'No gradient leads from a copy back to what it was copied from.' if culprit is not None else ''}"
        ),
        fixes=[
            Fix(title=f"Compute the loss with the model whose parameters `{name}` holds", safety="manual"),
            Fix(
                title=f"Where `{model}` is an inner learner, call the model with parameters of its own, computed from the outer ones "
                "(`torch.func.functional_call`)",
                safety="manual",
            ),
        ],
        confidence="likely",
    )


def alive_owner(parameter: torch.Tensor) -> nn.Module | None:
    """The module that has a parameter, wherever it is held; None where it is gone."""
    for holder in gc.get_referrers(parameter):
        if type(holder) is not dict or not any(value is parameter for value in holder.values()):
            continue
        for owner in gc.get_referrers(holder):
            state = owner if type(owner) is dict else own_dict(owner)
            if type(state) is not dict or state.get("_parameters") is not holder:
                continue
            module = next((m for m in (owner, *gc.get_referrers(state)) if is_quiet(m) and isinstance(m, nn.Module)), None)
            if module is not None:
                return module
    return None


def _copies(source: Source) -> Iterator[ast.stmt]:
    yield from (each for _, call in calls_in([source], "deepcopy") if (each := source.statement(call)) is not None)


def _replaced(incident: Incident, book: Book, owner: Owner, everything: bool) -> tuple[SourceSpan | None, bool]:
    """The assignment that put the new part (or the whole new model) in place of the old, and whether it was the whole."""
    made = resolve(book.made)
    parts = owner.path.split(".")[:-1]
    inner = parts[1:] if parts and parts[0] == owner.variable else parts
    names = inner if everything else inner[-1:]  # of a model whose parameters are all new any part on the way may have been replaced
    whole = everything
    for sources in in_tiers(incident):
        within = only_one(made, ((source, node) for source in sources for node in _parts_replaced(source, owner)))
        whole = everything and within is None
        parts_set = [(source, node) for source in sources for node in _new_parts(source, *names, owner.attribute)] if inner else []
        outside = only_one(made, parts_set)
        if outside is None and parts_set:
            copied = [(source, node) for source, node in parts_set if _of_new_objects(source, node)]
            outside = only_one(made, copied)
            if outside is None:  # one of them it was; which, and whether not the variable, is not known
                return None, False
        whole = whole and outside is None
        rebound = None
        if whole or not inner:
            rebound = only_one(made, bindings(sources, owner.variable or ""))
        found = outside or within or rebound
        if found is None:
            classes = classes_on_the_way(owner)
            found = placed = only_one(made, ((source, node) for source in sources for node in placing(source, classes, made)))
            whole = whole and placed is None
        if found:
            place = at_line(*found)
            what = f"`{owner.variable}`" if found == rebound else f"`{'.'.join(inner) or owner.path}`"
            if found == outside and place is not None and isinstance(place.statement, ast.Assign):
                what = f"`{dotted(place.statement.targets[0]) or '.'.join(inner)}`"
            elif place is not None and any(target.endswith(f".{owner.path.rpartition('.')[2]}") for target in place.targets):
                what = f"`{owner.path}`"
            label = f"puts a new {what} in place; the optimizer keeps the old one's parameters"
            return None if place is None else place.statement_span(label, "culprit"), whole
    return None, whole


def _new_parts(source: Source, *names: str) -> Iterator[ast.stmt]:
    """Assignments to an attribute of one of these names, on anything but `self` itself."""
    for _, write in (each for name in dict.fromkeys(names) for each in writes_in([source], name)):
        if isinstance(write.node, ast.Assign) and write.owner is not None and dotted(write.owner) != "self":
            yield write.node


def _of_new_objects(source: Source, node: ast.stmt) -> bool:
    """Whether what is assigned is made anew: by a copy or a constructor, in the statement itself or where its value was kept before."""
    return isinstance(node, ast.Assign) and (isinstance(node.value, ast.Call) or bool(_kept_copies(source, node)))


def _kept_copies(source: Source, node: ast.Assign) -> list[ast.Assign]:
    """Where what is assigned was kept before, as a copy: `self.raw = copy.deepcopy(model.net)`."""
    kept = dotted(node.value)
    calls = calls_in([source], "deepcopy") if kept is not None else []
    found = ((call, source.statement(call)) for _, call in calls)
    return [
        each
        for call, each in found
        if isinstance(each, ast.Assign) and each.value is call and any(dotted(target) == kept for target in each.targets)
    ]


def _copy_put_back(culprit: SourceSpan | None) -> tuple[ResolvedSite, str, str] | None:
    """For an assignment of a copy that was kept before: where it was copied, and the names of the variable and of the original."""
    put = None if culprit is None else at_line(culprit.file, culprit.line)
    if put is not None and put.source is not None and isinstance(put.statement, ast.Assign):
        copies = _kept_copies(put.source, put.statement)
        place = at_line(put.file, copies[0].lineno) if len(copies) == 1 else None
        call = copies[0].value if copies else None
        original = dotted(call.args[0]) if isinstance(call, ast.Call) and call.args else None
        if place is not None and original is not None:
            return place, dotted(put.statement.value) or "it", original
    return None


def _parts_replaced(source: Source, owner: Owner) -> Iterator[ast.stmt]:
    """Assignments to the owner's attribute of `self` in a method that is not the constructor."""
    parts = owner.path.split(".")
    if len(parts) - (parts[0] == owner.variable) < 2:
        return
    for _, write in (each for name in (parts[-2], parts[-1]) for each in writes_in([source], name)):
        if not isinstance(write.node, ast.Assign) or write.owner is None or dotted(write.owner) not in ("self", f"self.{parts[-2]}"):
            continue
        around = function_around(source, write.node)
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)) and around.name != "__init__":
            targets = [dotted(each) for each in write.node.targets]
            if any(each in (f"self.{parts[-2]}", f"self.{parts[-2]}.{parts[-1]}") for each in targets):
                yield write.node
