"""# GG305 inference-tensor

## What it is
A tensor that was made in inference mode is used where autograd needs it: saved for backward, written in place outside
inference mode, or as the loss itself.

## Why it is wrong
`torch.inference_mode()` makes tensors without version counters and view tracking, for speed. Autograd cannot check them, so
it refuses to save them ("Inference tensors cannot be saved for backward"), for as long as they live.

## Example
```python
with torch.inference_mode():
    features = backbone(images)
loss = criterion(head(features), labels)    # raises
```

## Use instead
```python
with torch.no_grad():
    features = backbone(images)
```
or `features.clone()` outside inference mode, where the producer cannot be changed.

## Fix safety
`no_grad` in place of `inference_mode` gives the same numbers, a little slower: safe. Where what was computed should have trained
parameters of an optimizer, it is to be computed with grad mode on: manual.

## When it speaks, what silences it
When PyTorch raises over an inference tensor in forward, in an in-place write or in backward. Evaluation in inference mode is
never looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gradguard.analysis.graph.walk import leaves, root_nodes
from gradguard.analysis.history import cut_origins, grad_mode_switches
from gradguard.analysis.history import follower as follow
from gradguard.analysis.history.grad_mode_switches import Switch
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places.sites import same_place, short, site_at
from gradguard.analysis.places.source import ResolvedSite, resolve, span_of
from gradguard.analysis.program.expressions import inside, is_constant
from gradguard.analysis.program.index import calls_in, program_of, writes_in
from gradguard.analysis.program.search_scopes import Scope, entry_by_name, entry_of, evaluate
from gradguard.analysis.program.syntax import load
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import UNKNOWN, attributes, elements, named_modules, store_of
from gradguard.fixes.edits import replaced, respelt
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import lost_path
from gradguard.torch_compat.private_api import storage_key

MESSAGES = (
    "inference tensors cannot be saved for backward",
    "inplace update to inference tensor",
    "cannot set version_counter for inference tensor",
    "inference tensors do not track version counter",
    "setting requires_grad=true on inference tensor",
)


def recognise(incident: Incident) -> Diagnosis | None:
    """An inference tensor in a failing call, or a root that was computed in inference mode."""
    if incident.error is None or incident.says(*lost_path.MESSAGES):
        return lost_path.recognise(incident, "GG305")
    if not incident.says(*MESSAGES):
        return None
    tensor = next((item for item in _tensors((incident.args, incident.kwargs)) if _is_inference(item)), None)
    if tensor is None:
        tensor = next((value for _, value in incident.names.tensor_bindings() if _is_inference(value)), None)
    return _diagnose(incident, tensor)


def _is_inference(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_inference()
    except internal_error():
        return False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in elements(value):
            yield from _tensors(item)


def _diagnose(incident: Incident, tensor: torch.Tensor | None) -> Diagnosis:
    name, made, switch = _story(incident, tensor)
    block = switch
    if switch is not None and (cut := incident.journal.cut_of(tensor) if tensor is not None else None) is not None:
        used = (
            grad_mode_switches.as_decorator(switch, resolve(site)) for origin in (cut, *cut.roots()) for site in (origin.site, origin.outer)
        )
        switch = next((each for each in used if each is not None), switch)
    what = f"`{name}`" if name else "a tensor"
    writes = incident.says("inplace update")
    use = "written in place outside inference mode" if writes else "needed for backward"
    related: list[SourceSpan] = []
    culprit: SourceSpan | None = None
    where = ""
    if switch is not None:
        text = short(switch.text, 40)
        subject = f"`{switch.owner}`" if switch.owner and switch.how == "decorator" else "this block"
        culprit = switch.span.model_copy(
            update={"label": f"what {subject} makes are inference tensors, which autograd can never use", "role": "culprit"}
        )
        if switch.how == "decorator" and not grad_mode_switches.is_inference(switch.text):
            where = f" in `{switch.owner}`, which `@{text}` runs in inference mode"
        else:
            where = f" under `{text}`" + (f" in `{switch.owner}`" if switch.owner else "")
        related += switch.also
    kept = _kept(incident, tensor) if culprit is None and tensor is not None else None
    if kept is not None:
        place, owner, attribute, path = kept
        of = f" of `{path}`" if path else f" of `{owner}`"
        culprit = place.statement_span(
            f"ran in inference mode when first called: `{attribute}`{of} has kept inference tensors since", "culprit"
        )
        where = f" in inference mode and is kept in `self.{attribute}`{of}"
    if made is not None and not (culprit is not None and made.line == culprit.line):
        related.append(made.span(f"{what} comes from there", "made"))
    if incident.place is not None and not same_place(made, incident.place):
        related.append(
            incident.place.span(
                "written in place here" if writes else "autograd must save it here, and may not", "changed" if writes else "saved"
            )
        )
    headline = (
        f"{what} is an inference tensor and cannot be {'written in place here' if writes else 'saved for backward'}: it "
        f"was made{where or ' in inference mode'}"
    )
    wanted = [] if kept is not None or tensor is None else _trained_behind(incident, tensor)
    fixes = [
        *([_no_grad_instead(block)] if kept is None else _build_outside(incident, kept[2])),
        Fix(title=f"Take an ordinary copy outside inference mode: `{name or 'x'}.clone()`", safety="safe"),
    ]
    if wanted:
        fixes = [_with_grad(switch, wanted)]
    return Diagnosis(
        code="GG305", name="inference-tensor", headline=headline, culprit=culprit, related=related,
        tensors=[lost_path.facts(name, tensor)] if tensor is not None else [],
        explanation=f"Inference mode makes tensors without version counters. Autograd cannot check them, so {what} may not be "
                    f"{use}, however long ago it was made. "
                    "`torch.no_grad()` records no graph either, and makes ordinary tensors.",
        fixes=fixes, confidence="certain" if switch is not None or kept is not None else "likely",
        avoid=[f"`torch.no_grad()` in its place, or `clone()`: it silences the error, and {short_list(wanted, 2)} never trains"]
        if wanted else [],
        notes=[] if switch is not None or kept is not None else [("Where inference mode was entered was not "
            "seen; look for `inference_mode` in what made it.")],
    )  # fmt: skip


def _trained_behind(incident: Incident, tensor: torch.Tensor) -> list[str]:
    """Modules of an optimizer's parameters that the tensor was computed from, and that nothing around it has a path to: to be trained.

    A target is computed from parameters too, that the prediction beside it trains.
    """
    cut = incident.journal.cut_of(tensor)
    trained = cut_origins.trained_ids(incident)
    found = [leaf for origin in (cut.roots() if cut is not None else ()) for ref in origin.leaves if (leaf := ref()) is not None]
    beside = [*_tensors((incident.args, incident.kwargs)), *(value for _, value in incident.names.tensor_bindings())]
    live = {id(leaf) for leaf in leaves(root_nodes(beside))}
    wanted = [leaf for leaf in found if id(leaf) in trained and id(leaf) not in live]
    return list(dict.fromkeys(state.full.rpartition(".")[0] for leaf in wanted if (state := incident.names.state(leaf)) is not None))


def _with_grad(switch: Switch | None, wanted: list[str]) -> Fix:
    what = short_list(wanted, 2)
    detail = f"An optimizer holds the parameters of {what}, and no gradient comes back through inference mode."
    if switch is not None and switch.how == "decorator":
        text = short(switch.text, 40)
        return Fix(title=f"Call an undecorated version of `{switch.owner}` for training, without `@{text}`", safety="manual", detail=detail)
    where = f"`{short(switch.text, 40)}`" if switch is not None else "inference mode"
    return Fix(title=f"Call {what} outside {where} for training", safety="manual", detail=detail)


def _kept(incident: Incident, tensor: torch.Tensor) -> tuple[ResolvedSite, str, str, str | None] | None:
    """An attribute of an object around the failing call that holds the tensor, or what it is a view of, and the statement that stores it.

    Returns:
        The statement, the object's class, the attribute, and the object's path where it is a module.
    """
    base = getattr(tensor, "_base", None) if not tensor.is_inference() else None
    key = storage_key(tensor)
    for view in incident.user_frames[:8]:
        owners = [value for value in view.locals.values() if issubclass(type(value), nn.Module) or value is view.locals.get("self")]
        everything = [(each, *item) for each in owners for item in {**attributes(each), **store_of(each, "_buffers")}.items()]
        for owner, attribute, value in everything:
            if not isinstance(value, torch.Tensor) or not _is_inference(value):
                continue
            if value is not tensor and value is not base and (key is None or storage_key(value) != key):
                continue
            stores = _stores(view.frame.f_code.co_filename, type(owner), attribute)
            if len(stores) == 1:
                paths = (path for _, root in incident.names.modules for path, module in named_modules(root) if module is owner and path)
                path = next(paths, None)
                return stores[0], type(owner).__name__, attribute, path
    return None


def _stores(file: str, kind: type, attribute: str) -> list[ResolvedSite]:
    """The statements, constructors aside, that give the attribute a value other than None, of objects that can be of this class."""
    kinds = {base.__name__ for base in kind.__mro__}
    program = program_of(file)
    writes = [write for write in program.writes(attribute) if isinstance(write.node, ast.Assign)] if program is not None else []
    return [
        site_at(program.source, write.node)
        for write in writes
        if program is not None and not is_constant(write.value, None) and write.owner is not None
        and any(not isinstance(each, ast.ClassDef) or each.name in kinds for each in program.classes(write.owner))
        and getattr(program.function(write.node), "name", "") != "__init__"
    ]  # fmt: skip


def _build_outside(incident: Incident, attribute: str) -> list[Fix]:
    outside = Fix(title=f"Make `self.{attribute}` where inference mode cannot reach, such as in `__init__`", safety="unsafe")
    if not any("lightning" in view.frame.f_code.co_filename for view in incident.frames):
        return [outside]
    patch = _without_inference_mode(incident)
    return [Fix(title="Evaluate with `Trainer(inference_mode=False)`", safety="safe" if patch else "manual", patch=patch), outside]


def _without_inference_mode(incident: Incident) -> str | None:
    """The diff of the one call that makes the Trainer, as far as the running files show it."""
    sources = [source for file in {view.site.code.co_filename for view in incident.user_frames} if (source := load(file)) is not None]
    made = calls_in(sources, "Trainer")
    if len(made) != 1 or any(keyword.arg in (None, "inference_mode") for keyword in made[0][1].keywords):
        return None
    source, call = made[0]
    name = source.flat(call.func)
    return respelt(
        span_of(source.filename, call), f"{name}(", f"{name}(inference_mode=False" + (", " if call.args or call.keywords else "")
    )


def _no_grad_instead(switch: Switch | None) -> Fix:
    title = "Use `torch.no_grad()` in place of `torch.inference_mode()` there"
    patch = None
    if switch is not None and switch.how in ("with", "decorator"):
        from gradguard.analysis.program.syntax import load

        source = load(switch.span.file)
        node = _node_at(source.tree, switch.span.line, switch.text, source) if source is not None and source.tree is not None else None
        if (
            source is not None
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and not node.args
            and not node.keywords
        ):
            patch = replaced(source, [(node.func, source.flat(node.func.value) + ".no_grad")])
    return Fix(title=title, safety="safe", patch=patch)


def _node_at(tree: ast.AST, line: int, text: str, source: Any) -> ast.AST | None:
    return next((node for node in inside(tree, ast.expr) if node.lineno == line and source.flat(node) == text), None)


def _story(incident: Incident, tensor: torch.Tensor | None) -> tuple[str | None, ResolvedSite | None, Switch | None]:
    """The tensor's name nearest to its making, the statement that made it, and what had switched inference mode on."""
    name: str | None = None
    made: ResolvedSite | None = None
    switch: Switch | None = None
    cut = incident.journal.cut_of(tensor) if tensor is not None else None
    for origin in (*((cut,) if cut is not None else ()), *(cut.roots() if cut is not None else ())):
        switch = switch or _inference_around((origin.site, origin.outer, *origin.around))
    for level, view in enumerate(incident.user_frames):
        for variable, value in view.locals.items():
            if tensor is not None and (value is tensor or _shares(value, tensor)):
                follower = follow.Follower(incident)
                scope = follower.live(level)
                if scope is None:
                    continue
                statement = _binding(scope.source, scope.function, variable, view.site)
                if statement is not None or name is None:
                    name = variable
                if statement is not None:
                    made = site_at(scope.source, statement)
                    switch = switch or _from_value(statement, scope, 0)
                    if switch is not None:
                        return name, made, switch
    if name is None and tensor is not None:
        name = incident.names.of(tensor)
    if name is not None and made is None and "." in name:
        made, found = _attribute(incident, name)
        switch = switch or found
    return name, made, switch


def _shares(value: Any, tensor: torch.Tensor) -> bool:
    held = elements(value, 65)
    return len(held) <= 64 and any(item is tensor for item in held)


def _inference_around(sites: Iterable[CallSite | None]) -> Switch | None:
    for site in sites:
        found = grad_mode_switches.block_around(resolve(site))
        if found is not None and grad_mode_switches.is_inference(found.text):
            return found
    return None


def _binding(source: Any, function: ast.AST, name: str, site: CallSite) -> ast.stmt | None:
    """The last statement before the frame's line that binds the name."""
    from gradguard.analysis.program.bindings import assignments_to

    found = [
        statement for statement in assignments_to(function, name) if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.With, ast.For))
    ]
    before = [statement for statement in found if statement.lineno < site.line]
    chosen = (before or found)[-1:] if found else []
    return chosen[0] if chosen else None


def _from_value(statement: ast.AST, scope: Any, depth: int) -> Switch | None:
    """The inference mode around a statement, or in what it calls."""
    around = grad_mode_switches.block_around(site_at(scope.source, statement))
    if around is not None and grad_mode_switches.is_inference(around.text):
        return around
    if depth > 4:
        return None
    for node in inside(statement, ast.Call):
        entry = entry_of(evaluate(node.func, scope))
        if entry is None:
            entry = entry_by_name(node.func, scope)
        if entry is None:
            continue
        decorator = grad_mode_switches.decorator_of(entry.source, entry.function)
        if decorator is not None and grad_mode_switches.is_inference(decorator.text):
            return decorator
        inner = Scope(entry.source, entry.function, {}, entry.globals, depth=depth + 1)
        if entry.bound is not UNKNOWN:
            inner.env["self"] = entry.bound
        for expr in (item.context_expr for block in inside(entry.function, ast.With, ast.AsyncWith) for item in block.items):
            text = entry.source.flat(expr)
            if grad_mode_switches.turns_grad_off(expr) and grad_mode_switches.is_inference(text):
                site = site_at(entry.source, expr)
                return Switch("with", site.span(), text, site.function if site.function != "<module>" else None)
        for part in inside(entry.function, ast.Return, ast.Assign):
            if depth < 3:
                found = _from_value(part, inner, depth + 1)
                if found is not None:
                    return found
    return None


def _attribute(incident: Incident, name: str) -> tuple[ResolvedSite | None, Switch | None]:
    """`self.cache` or `bank.cache`: the method that stores it."""
    last = name.split("[")[0].rpartition(".")[2]
    stores: list[tuple[ResolvedSite, Switch | None]] = []
    for source, write in writes_in(incident.sources, last):
        site = site_at(source, write.node)
        around = grad_mode_switches.block_around(site)
        if around is not None and grad_mode_switches.is_inference(around.text):
            stores.append((site, around))
    return stores[0] if len(stores) == 1 else (None, None)


RULE = Rule(
    code="GG305", name="inference-tensor", summary="a tensor made in inference mode is used where autograd needs it", recognise=recognise,
    moments=frozenset({"error", "before_backward"}), priority=60, messages=(*lost_path.MESSAGES, *MESSAGES), traced_only=True,
    screen=lost_path.screen,
)  # fmt: skip
