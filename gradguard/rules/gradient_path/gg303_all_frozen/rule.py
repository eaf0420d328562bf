"""# GG303 all-frozen

## What it is
Nothing that the loss was computed from requires grad: every parameter on the way is frozen (`requires_grad_(False)`, a
`requires_grad = True` that was set on a module instead of on its parameters, an embedding loaded with `from_pretrained`,
which freezes by default), or the input tensor never had requires_grad set.

## Why it is wrong
PyTorch records a graph only from tensors that require grad. With none, backward() has nothing to do and raises ("element 0
of tensors does not require grad and does not have a grad_fn").

## Example
```python
model.requires_grad_(False)
model.head.requires_grad = True      # a new attribute of the module: its parameters stay frozen
loss = criterion(model(x), y)
loss.backward()
```

## Use instead
```python
model.requires_grad_(False)
model.head.requires_grad_(True)
```

## Fix safety
A plain attribute on a module is replaced by `requires_grad_(...)`, which does what was meant; marked unsafe, since it
changes what is trained.

## When it speaks, what silences it
When backward() or autograd.grad raises over a root without a graph and neither the record nor the source shows a place
where a path was lost; and, whatever else was cut off on the way, where every parameter of the optimizer that steps next is
frozen (a discriminator that was frozen for the generator's turn, and not unfrozen for its own).
"""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.history import loss_expressions
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.live.optimizer_contents import parameters_of
from gradguard.analysis.places.sites import bare, in_words, short
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.user_files import files_of, sources_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.safe_read import attributes, modules_in, named_children, parameters_in
from gradguard.fixes.edits import replaced
from gradguard.rules import lightning_manual
from gradguard.rules.base import Rule
from gradguard.rules.gradient_path import freezing_places, frozen_in_play, lost_path
from gradguard.rules.gradient_path.gg303_all_frozen import never_put_in


def recognise(incident: Incident) -> Diagnosis | None:
    """No origin of a lost path: what there is, and who froze it."""
    lost = lost_path.lost_path(incident)
    if lost is None or lost.silent or lost.origins:
        return None
    if lost.frozen is not None and not _mislaid(lost.frozen.modules) and not lightning_manual.toggled_twice(incident):
        return frozen_in_play.diagnosis(incident, lost, lost.frozen)
    followed = loss_expressions.flow_of_root(incident)
    modules = followed[0].modules if followed is not None else []
    if not modules:
        modules = [module for name, module in incident.names.modules if name is not None] if followed is None else []
    parameters: list[torch.Tensor] = list({id(p): p for module in modules for p in parameters_in(module)}.values())
    if any(p.requires_grad for p in parameters):
        return _apart(incident, lost, parameters)
    if parameters:
        return _frozen(incident, lost, modules, parameters)
    return _plain(incident, lost, followed[0].made if followed is not None else [])


def _mislaid(modules: list[torch.nn.Module]) -> bool:
    """Whether one of them was to be switched on by a plain attribute, which is the cause then."""
    return any(attributes(module).get("requires_grad") is True for root in modules for module in modules_in(root))


def _part(incident: Incident, names: list[str]) -> str:
    """How a part of the model is switched on again: a child by name, so that nobody unfreezes the whole by copying the line."""
    for name, module in incident.names.modules:
        children = [child for child, part in named_children(module) if list(parameters_in(part))] if name in names else []
        if len(children) > 1:
            return f"{name}[{children[-1]}]" if children[-1].isdigit() else f"{name}.{children[-1]}"
    return "module"


# -- frozen parameters ------------------------------------------------------------------------------------------------------


def _frozen(incident: Incident, lost: lost_path.LostPath, modules: list[torch.nn.Module], parameters: list[torch.Tensor]) -> Diagnosis:
    sources = sources_of(files_of(incident.user_frames, modules))
    held = [p for p in parameters if id(p) in _held(incident)]
    root = lost.root_name
    owner = incident.names.module_path(modules[0]) or type(modules[0]).__name__
    owners = list(
        dict.fromkeys(
            incident.names.module_path(module) or type(module).__name__ for module in modules if list(parameters_in(module, recurse=True))
        )
    )
    outer = [name for name in owners if not any(name.startswith(other + ".") for other in owners)] or [owner]
    listed = short_list(outer, 3)
    mislaid = [item for item in freezing_places.mislaid(incident, modules, sources) if item.value]
    culprit: SourceSpan | None = None
    related: list[SourceSpan] = []
    switched = freezing_places.recorded(incident, held or parameters)
    certain = bool(switched)
    if not switched:
        switched = freezing_places.in_source(sources)
    count = (
        f"all {len(parameters)} parameters of {listed} are frozen" if len(parameters) > 1 else f"the only parameter of {listed} is frozen"
    )
    if mislaid:
        item = mislaid[0]
        headline = (
            f"{in_words(root)} has no gradient path: {count}; `{item.name}.requires_grad = True` set an attribute of the module, "
            f"not of its parameters"
        )
        if item.place is not None:
            culprit = item.place.span(f"sets an attribute on the module: the parameters of `{item.name}` stay frozen", "culprit")
        related += [freeze.place.span(f"freezes {_thing(freeze)}", "declared") for freeze in switched[:2]]
        fixes = [
            Fix(
                title=f"Call `{item.name}.requires_grad_(True)`, which reaches the parameters",
                safety="unsafe",
                patch=_call_instead(item.place),
            )
        ]
        explanation = (
            "A module has no `requires_grad` of its own: the assignment makes a new attribute that nothing reads. "
            "`requires_grad_(...)`, with the underscore, sets it on every parameter of the module."
        )
    else:
        headline = f"{in_words(root)} has no gradient path: {count}"
        chosen = switched[0] if certain or len(switched) == 1 else None
        if chosen is not None:
            culprit = chosen.place.span(
                f"freezes {_thing(chosen)}"
                if chosen.how != "pretrained"
                else "`from_pretrained` freezes the embedding unless told `freeze=False`",
                "culprit",
            )
            headline += f", since {_short_reason(chosen)}"
        related += [freeze.place.span(f"freezes {_thing(freeze)}", "declared") for freeze in switched[:4] if freeze is not chosen]
        call = f"{_part(incident, outer)}.requires_grad_(True)"
        fixes = [
            Fix(
                title=f"Switch requires_grad on for the part that is to be trained, after the freezing, such as `{call}`",
                safety="manual",
                detail="Freeze only the part that shall stay fixed, or replace the head after freezing: new modules require grad.",
            )
        ]
        absent = never_put_in.after(incident, chosen.place, modules) if chosen is not None else None
        if absent is not None:
            headline += f"; no `{absent.kind}` has been put in"
            related.append(absent.place.span(f"puts in a `{absent.kind}`, of which the model has none", "context"))
            fixes.insert(0, Fix(title=f"Let `{absent.condition}` be true for the parts that are to be replaced", safety="manual"))
        explanation = (
            "PyTorch records a graph only where an input requires grad. With every parameter frozen and plain data as input there is none."
        )
        if chosen is not None and lightning_manual.toggled_twice(incident):
            headline += " while another optimizer is still toggled"
            fixes = [
                Fix(title="Call `self.untoggle_optimizer(...)` for the optimizer before, when it has stepped: here", safety="unsafe"),
            ]
            explanation = (
                "`toggle_optimizer` freezes what the other optimizers hold, and gives its own parameters the requires_grad they had: "
                "off, where the toggle before is not taken back."
            )
    if incident.place is not None:
        related.append(incident.place.span(f"{in_words(root)} has no graph to follow", "backward"))
    return _diagnosis(
        incident, lost, headline, culprit, related, explanation, fixes, _facts(incident, held or parameters), certain or bool(mislaid)
    )


def _thing(freeze: freezing_places.Freeze) -> str:
    return f"`{short(freeze.subject, 40)}`" if freeze.subject else "parameters"


def _short_reason(freeze: freezing_places.Freeze) -> str:
    if freeze.how == "pretrained":
        return "`from_pretrained` freezes by default"
    return f"requires_grad is switched off for {_thing(freeze)}" + (
        f" in `{freeze.place.function}`" if freeze.place.function != "<module>" else ""
    )


def _call_instead(place: ResolvedSite | None) -> str | None:
    node = place.node if place is not None else None
    if (
        place is None
        or place.source is None
        or not isinstance(node, ast.Assign)
        or len(node.targets) != 1
        or not isinstance(node.targets[0], ast.Attribute)
    ):
        return None
    return replaced(place.source, [(node, f"{place.source.flat(node.targets[0].value)}.requires_grad_({place.source.flat(node.value)})")])


def _facts(incident: Incident, parameters: list[torch.Tensor]) -> list[TensorFacts]:
    facts = []
    for parameter in parameters[:4]:
        state = incident.names.state(parameter)
        fact = lost_path.facts(state.full if state is not None else incident.names.of(parameter), parameter)
        facts.append(fact.model_copy(update={"kind": "parameter"}))
    return facts


def _held(incident: Incident) -> set[int]:
    from gradguard.analysis.history.cut_origins import trained_ids

    return trained_ids(incident)


# -- trainable parameters exist, and the loss was made without them ----------------------------------------------------------


def _apart(incident: Incident, lost: lost_path.LostPath, parameters: list[torch.Tensor]) -> Diagnosis | None:
    """The source leads through trainable parameters, and yet the value has no path: what cut it was not seen."""
    root = lost.root_name
    trainable = [p for p in parameters if p.requires_grad]
    related = [incident.place.span(f"{in_words(root)} has no graph to follow", "backward")] if incident.place is not None else []
    return _diagnosis(
        incident,
        lost,
        f"{in_words(root)} has no gradient path: none of the values it was computed from had one",
        None,
        related,
        f"There are {len(trainable)} parameters that require grad, but {in_words(root)} does not depend on any of them through "
        f"operations that autograd recorded.",
        [
            Fix(
                title=f"Print `requires_grad` of the values on the way to {in_words(root)}: the first that says False lies behind the cut",
                safety="manual",
            )
        ],
        _facts(incident, trainable),
        False,
    )


# -- plain tensors ----------------------------------------------------------------------------------------------------------


def _plain(incident: Incident, lost: lost_path.LostPath, made: list[ResolvedSite]) -> Diagnosis:
    root = lost.root_name
    if _had_a_graph(incident) and _trainable(incident):
        return _this_time(incident, lost, made)
    wanted = _wants_grad(made)
    named = list(dict.fromkeys(name for place in made for name in place.targets[:1]))
    culprit = None
    related: list[SourceSpan] = []
    chosen = wanted or (made[0] if len({(place.file, place.line) for place in made}) == 1 else None)
    if chosen is not None:
        name = chosen.targets[0] if chosen.targets else "the tensor"
        culprit = chosen.span(f"`{name}` is made without requires_grad", "culprit")
    related += [place.span("made without requires_grad", "made") for place in made[:4] if place is not chosen]
    if incident.place is not None:
        related.append(incident.place.span(f"{in_words(root)} has no graph to follow", "backward"))
    held = _trainable(incident)
    listed = short_list(named, 4)
    if held:
        headline = f"{in_words(root)} has no gradient path: it was not computed from any of the parameters that the optimizer holds"
    elif named:
        headline = f"{in_words(root)} has no gradient path: nothing it was computed from requires grad ({listed})"
    else:
        headline = f"{in_words(root)} has no gradient path: nothing it was computed from requires grad"
    fixes = [
        Fix(
            title=f"Create {f'`{chosen.targets[0]}`' if chosen is not None and chosen.targets else 'the tensor to be learned'} "
            f"with `requires_grad=True`",
            safety="manual",
            patch=_with_grad(chosen),
        )
    ]
    return _diagnosis(
        incident,
        lost,
        headline,
        culprit,
        related,
        "PyTorch records a graph only where an input requires grad; plain tensors do not.",
        fixes,
        [lost_path.facts(root, lost.root)],
        chosen is not None,
    )


def _had_a_graph(incident: Incident) -> int:
    """How many backward calls of this line began at a root with a graph before."""
    call = incident.call
    if call is None or call.site is None:
        return 0
    code, lasti = call.site  # code objects of equal text are equal, those of another run of the same file too
    earlier = [fact.site for fact in incident.journal.backwards if fact is not call and fact.site is not None and fact.root_seqs]
    return sum(site[0] is code and site[1] == lasti for site in earlier)


def _this_time(incident: Incident, lost: lost_path.LostPath, made: list[ResolvedSite]) -> Diagnosis:
    """The same line had a graph before: in this step a branch was taken that leaves every parameter out."""
    root, times = lost.root_name, _had_a_graph(incident)
    zeros = [place for place in made if _zero(place)] if _is_zero(lost.root) else []
    branches = {_branch(place) for place in zeros}
    chosen = zeros if len(branches) == 1 and None not in branches else []
    culprit = chosen[0].span("a constant, which no parameter has a part in", "culprit") if chosen else None
    related = [place.span("a constant, too", "context") for place in chosen[1:4]]
    if incident.place is not None:
        related.append(incident.place.span(f"{in_words(root)} has no graph to follow", "backward"))
    before = "the call before" if times == 1 else f"the {times} calls before"
    return _diagnosis(
        incident,
        lost,
        f"{in_words(root)} has no gradient path this time: no parameter that the optimizer holds had a part in it, unlike in {before}",
        culprit,
        related,
        f"In {before} of this line there was a graph, so nothing is frozen or detached for good. This batch led past all that is "
        "computed from parameters: it has no example of what the loss is about, or only some that were masked out.",
        [
            Fix(
                title="Give such a batch a loss with a graph, of the model's own outputs: `output.sum() * 0.0` in place of a constant",
                safety="manual",
                detail=f"Or leave out backward() and the step where `{bare(root)}.requires_grad` is False.",
            )
        ],
        [lost_path.facts(root, lost.root)],
        False,
    )


def _is_zero(root: torch.Tensor) -> bool:
    return root.numel() == 1 and root.device.type == "cpu" and float(root) == 0.0


def _zero(place: ResolvedSite) -> bool:
    """Whether a tensor of zeros is made here, of nothing but constants: `torch.tensor(0.0)`, `torch.zeros(())`; not what is handed on."""
    call, made = place.call, (place.callee_full_name or "").rpartition(".")[2]
    if call is None or made not in ("tensor", "zeros", "scalar_tensor"):
        return False
    inner: ast.AST = call
    for node in () if place.source is None else place.source.ancestors(call):
        if isinstance(node, ast.Call) and inner is not node.func:
            return False
        inner = node
    values = [node.value for argument in call.args for node in inside(argument, ast.Constant)]
    return made == "zeros" or (bool(values) and not any(values))


def _branch(place: ResolvedSite) -> tuple[int, bool] | None:
    """The innermost `if` around a place, and whether it stands in its `else`: of two branches only one has run."""
    inner = place.node
    for node in () if place.source is None or inner is None else place.source.ancestors(inner):
        if isinstance(node, ast.If):
            return id(node), any(inner is statement for statement in node.orelse)
        inner = node
    return None


def _trainable(incident: Incident) -> bool:
    return any(p.requires_grad for optimizer in incident.names.optimizers() for p in parameters_of(optimizer))


def _wants_grad(made: list[ResolvedSite]) -> ResolvedSite | None:
    """The one plain tensor whose `.grad` the same file reads."""
    wanted = []
    for place in made:
        if place.source is None or place.source.tree is None or not place.targets:
            continue
        name = place.targets[0]
        for node in inside(place.source.tree, ast.Attribute):
            if node.attr == "grad" and place.source.flat(node.value) == name:
                wanted.append(place)
                break
    return wanted[0] if len(wanted) == 1 else None


def _with_grad(place: ResolvedSite | None) -> str | None:
    if place is None or place.source is None or place.call is None:
        return None
    if not (place.callee_full_name or "").startswith("torch.") or any(
        keyword.arg in ("requires_grad", None) for keyword in place.call.keywords
    ):
        return None
    text = place.source.flat(place.call)
    if not text.endswith(")"):
        return None
    separator = ", " if place.call.args or place.call.keywords else ""
    return replaced(place.source, [(place.call, text[:-1].rstrip(", ") + separator + "requires_grad=True)")])


def _diagnosis(
    incident: Incident,
    lost: lost_path.LostPath,
    headline: str,
    culprit: SourceSpan | None,
    related: list[SourceSpan],
    explanation: str,
    fixes: list[Fix],
    tensors: list[TensorFacts],
    certain: bool,
) -> Diagnosis:
    root = lost.root_name
    notes = lost_path.second_problem(lost.root, root, incident)
    if not incident.traced:
        notes.append(
            "This step was not traced; a path that was lost in an unusual way may have been missed. `level: strict` (or "
            "GRADGUARD_LEVEL=strict) shows it."
        )
    return Diagnosis(
        code="GG303",
        name="all-frozen",
        headline=headline,
        culprit=culprit,
        related=related,
        tensors=tensors,
        explanation=explanation,
        fixes=fixes,
        notes=notes,
        avoid=[
            f"`{bare(root)}.requires_grad_(True)` is no cure. It silences the error: {in_words(root)} becomes a leaf of its own and no "
            f"parameter learns anything."
        ],
        confidence="certain" if certain and incident.traced else "likely",
    )


RULE = Rule(
    code="GG303",
    name="all-frozen",
    summary="nothing that the loss was computed from requires grad",
    recognise=recognise,
    priority=40,
    messages=lost_path.MESSAGES,
)
