"""Non-finite values that came into the graph from outside: weights that an earlier step spoilt, data that was never right."""

from __future__ import annotations

import ast
from typing import Any

import torch

from gradguard.analysis.graph.node_values import GraphValues, health, plain
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.contents import lookup
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.source import ResolvedSite, at_line, dotted, function_def, module_ast, resolve
from gradguard.analysis.program.bindings import assignments_to
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix, Severity, SourceSpan, TensorFacts
from gradguard.monitors.numerics import Numbers
from gradguard.rules.numerics.first_nonfinite import Origin
from gradguard.rules.numerics.gg501_nonfinite_forward.births import birthplace
from gradguard.rules.numerics.gg501_nonfinite_forward.columns import bad_columns, listed, standardised
from gradguard.rules.numerics.gg501_nonfinite_forward.delivered import behind_delivery
from gradguard.rules.numerics.gg501_nonfinite_forward.divided import divided_by_zero
from gradguard.rules.numerics.gg501_nonfinite_forward.nonfinite_expressions import Search, deviates_of_one, operand_of
from gradguard.rules.numerics.ranges import elements, kinds
from gradguard.rules.numerics.spans import Places, expression
from gradguard.rules.numerics.updating_optimizer import last_step, made_at, rate
from gradguard.torch_compat.private_api import storage_key


def poisoned(
    incident: Incident,
    numbers: Numbers,
    root: torch.Tensor,
    values: GraphValues,
    origin: Origin,
    subject: str,
    severity: Severity = "warning",
) -> Diagnosis | None:
    """A leaf or constant of the graph that was not finite before the forward pass began."""
    if origin.tensor is None:
        return None
    earlier = numbers.pending or numbers.told
    if earlier is not None:
        return earlier.model_copy(
            update={
                "severity": severity,
                "notes": [*earlier.notes, f"by now {subject} is {kinds(health(root))}: the weights have been reached"],
            }
        )
    state = incident.names.state(origin.tensor)
    if origin.kind == "leaf" and (state is not None or isinstance(origin.tensor, torch.nn.Parameter)):
        return _weights(incident, origin, state.full if state is not None else "a parameter", root, subject, severity)
    return _data(incident, numbers, values, origin, root, subject, severity)


def _weights(incident: Incident, origin: Origin, name: str, root: torch.Tensor, subject: str, severity: Severity) -> Diagnosis:
    found = last_step(incident, [origin.tensor])
    stepped = None if found is None else resolve(found[0].site)
    related: list[SourceSpan] = []
    why = (
        f"`{name}` holds {kinds(origin.health)} in {elements(origin.health.bad, origin.health.total)}: whatever it takes part in is not"
        " finite either. "
    )
    fixes = [Fix(title="load the weights of a checkpoint from before, and run with `level: strict`, which names what spoils them")]
    culprit = stepped
    label = "this step spoilt the weights"
    if found is not None:
        optimizer = found[1]
        made = made_at(incident, optimizer)
        cause, repair = _update_fault(optimizer, origin.tensor)
        if cause is not None:
            why += cause
            fixes.insert(0, Fix(title=repair))
            culprit, label = made or stepped, "with these settings the update is not finite"
        else:
            why += "The gradients that gradguard looked at were finite; an update of the last step made it so."
        if made is not None and made is not culprit:
            related.append(made.span(f"the optimizer is made here, with {rate(optimizer)}", "declared"))
    else:
        why += "No optimizer step of this run can have done it: it was so when training began."
        culprit, label, born = birthplace(incident, incident.names.state(origin.tensor), Search(_lookup_table(incident)))
        related += born
        fixes = [
            Fix(
                title=f"look at how `{name}` is initialised or loaded: `torch.isfinite(p).all()` for every parameter before training starts"
            )
        ]
    if stepped is not None and stepped is not culprit:
        related.append(stepped.span("the weights are updated here", "changed"))
    if incident.place is not None:
        related.append(incident.place.span("it is noticed here", "backward"))
    return Diagnosis(
        code="GG502",
        name="nonfinite-backward",
        severity=severity,
        headline=(
            f"{subject[0].upper()}{subject[1:]} is {kinds(health(root))} because the parameter `{name}` already is, before the forward"
            " pass."
        ),
        culprit=None if culprit is None else culprit.span(label, "culprit"),
        related=related,
        tensors=[
            TensorFacts(name=name, kind="parameter", shape=list(origin.health and origin.tensor.shape if origin.tensor is not None else []))
        ],
        explanation=why,
        fixes=fixes,
        confidence="likely",
    )


def _update_fault(optimizer: Any, parameter: Any) -> tuple[str | None, str]:
    """What in an optimizer's settings makes a non-finite update of a finite gradient."""
    for group in optimizer.param_groups:
        if not any(p is parameter for p in group["params"]):
            continue
        eps, lr = group.get("eps"), group.get("lr")
        dtype = parameter.dtype
        if isinstance(eps, (int, float)) and torch.tensor(float(eps), dtype=dtype).item() == 0.0:
            word = "is 0" if eps == 0 else f"({eps:g}) rounds to 0 in {str(dtype).removeprefix('torch.')}"
            repair = (
                "give `eps` a value above 0, such as 1e-8, the default"
                if eps == 0 and torch.tensor(1e-8, dtype=dtype).item() > 0.0
                else "give `eps` a value that the parameters' dtype can hold (`eps=1e-4` in float16), or keep the weights in float32"
            )
            return f"`eps` of this {type(optimizer).__name__} {word}, so a gradient of 0 gives an update of 0/0 = NaN.", repair
        if isinstance(lr, float) and not abs(lr) < float("inf"):
            return f"The learning rate is {lr}.", "correct the schedule that made the learning rate not finite"
    return None, ""


# -- data -------------------------------------------------------------------------------------------------------------


def _data(
    incident: Incident, numbers: Numbers, values: GraphValues, origin: Origin, root: torch.Tensor, subject: str, severity: Severity
) -> Diagnosis:
    assert origin.tensor is not None
    names = incident.names.of_storage(storage_key(origin.tensor))
    name = names[0] if names else None
    places = Places(incident, numbers, values.nodes)
    used = places.of(origin.node)
    operand = None if used is None else operand_of(used, origin.slot)
    made = source_of_bad(incident)
    culprit, label, notes = used, "it enters the graph here", list[str]()
    related: list[SourceSpan] = []
    search = Search(_lookup_table(incident))
    columns = bad_columns(origin.tensor)
    seen = incident.journal.nonfinite_of(origin.tensor)
    seen_at = None if seen is None else resolve(seen.site)
    if seen is not None and seen_at is not None:
        culprit, label = seen_at, f"`{seen.func.strip('_')}` made {seen.nan + seen.inf} non-finite values here, of finite ones"
        made = None
    elif made is not None:
        delivered = isinstance(made[0].statement, (ast.For, ast.AsyncFor))
        culprit, label = (
            made[0],
            (f"`{made[1]}` is delivered with {made[2]} in it" if delivered else f"`{made[1]}` becomes {made[2]} here, of finite values"),
        )
        each = origin.tensor[0].numel() if origin.tensor.dim() > 1 else 1  # elements of an item of a batch
        inner = behind_delivery(search, made[0], made[1], each) if delivered else search.statement(made[0])
        divides = standardised(incident) if columns and (inner is None or inner.line == made[0].line) else None
        if divides is None and inner is None and _is_bound_again(made[0], made[1]):
            culprit, label, made = used, "it enters the graph here", None  # a later statement made it so, and it is not known which
            notes.append("where it became so was not seen: several statements give it a value, one after the other")
        divides = (
            None if divides is not None and made is not None and divides.line == made[0].line and divides.file == made[0].file else divides
        )
        if made is None:
            pass
        elif divides is not None:
            related.append(made[0].span(label, "made"))
            culprit, label = divides, "a column that is constant has a deviation of 0 here, and 0/0 is NaN"
            notes.append("the division was found in the source: it is the only one around by a bare standard deviation")
        elif inner is not None and inner.line != made[0].line:
            related.append(made[0].span(label, "made"))
            culprit, label = inner, "this can divide by zero or leave its domain"
            notes.append(
                "no gradient is recorded here, so the line was found in the source: it is the one on the way that can make a non-finite"
                " value of finite ones"
            )
    elif used is not None:
        behind = search.behind(used, operand)
        if behind is None and name is not None and "." in name:
            behind = search.attribute(incident.sources, name.rpartition(".")[2])
        if behind is not None:
            culprit, label = behind, "this can divide by zero or leave its domain"
            notes.append(
                "no gradient is recorded here, so the line was found in the source: it is the one on the way that can make a non-finite"
                " value of finite ones"
            )
        else:
            notes.append("where it became so was not seen: no line of the functions running now made it of finite values")
    if used is not None and used is not culprit and (culprit is None or culprit.line != used.line):
        related.append(used.span("it enters the graph here", "context"))
    if incident.place is not None:
        related.append(
            incident.place.span("backward is called on the loss here" if incident.error is None else "the error surfaced here", "backward")
        )
    if origin.slot == "injected":
        return _injected(incident, origin, root, subject, severity, culprit, culprit is used, related, notes)
    shown = made[1] if made is not None else name
    if shown is None and operand is not None:
        shown = dotted(operand)
    what = f"`{shown}`" if shown else "a value that is not part of the graph"
    fix = Fix(
        title=(
            "clean it where it is made: check `torch.isfinite(x).all()` after loading and normalising; where it divides, keep the divisor"
            " from zero (`.clamp(min=1e-6)`): a constant column has a deviation of 0, an absent class a"
            " count of 0, a node without edges a degree of 0"
        )
    )
    if seen is None and culprit is not None and deviates_of_one(culprit, origin.tensor.numel()):
        label = "the deviation of a single element is NaN: there are no degrees of freedom"
        fix = Fix(title="leave out what is a single element (`drop_last=True` in the DataLoader), or take `std(unbiased=False)`")
    found = origin.health
    those = f" (all of {listed(columns)})" if columns else ""
    return Diagnosis(
        code="GG501",
        name="nonfinite-forward",
        severity=severity,
        headline=(
            f"{subject[0].upper()}{subject[1:]} is {kinds(health(root))} because {what} is: {kinds(found)} in"
            f" {elements(found.bad, found.total)}{those}, before the model computes anything of it."
        ),
        culprit=None if culprit is None else culprit.span(label, "culprit"),
        related=related,
        tensors=[TensorFacts(name=shown, shape=list(origin.tensor.shape), dtype=str(origin.tensor.dtype).removeprefix("torch."))],
        explanation=(
            "The graph's operands were finite except for this one, which came in from outside: data, a target, a weight or a statistic"
            " computed without gradient."
        ),
        notes=notes,
        confidence="likely" if made is None or culprit is not made[0] else "certain",
        fixes=[fix],
    )


def _injected(
    incident: Incident,
    origin: Origin,
    root: torch.Tensor,
    subject: str,
    severity: Severity,
    culprit: ResolvedSite | None,
    direct: bool,
    related: list[SourceSpan],
    notes: list[str],
) -> Diagnosis:
    """An infinity that a constant operand (a mask, a logarithm computed without gradient) brought in and nothing removed."""
    text = "an op" if culprit is None else f"`{expression(culprit, origin.node)}`"
    return Diagnosis(
        code="GG501",
        name="nonfinite-forward",
        severity=severity,
        headline=f"{subject[0].upper()}{subject[1:]} is {kinds(health(root))}: {text} brings infinities in, and they reach it.",
        culprit=(
            None
            if culprit is None
            else culprit.span("infinities come in here" if direct else "this can divide by zero or leave its domain", "culprit")
        ),
        related=related,
        explanation=(
            "An operand that is no part of the graph holds infinities. Where they are meant as a mask they must not be picked by what comes"
            " after (a masked class that is a target, an entry that is summed); where they come from log(0) or a division by 0, that is the"
            " bug."
        ),
        notes=[note for note in notes if "was not seen" not in note],
        confidence="likely",
        fixes=[
            Fix(
                title=(
                    "clamp before the log or the division: `x.clamp(min=1e-8)`"
                    if not direct
                    else "use a large finite number in place of the infinity, or keep masked entries out of the loss"
                )
            )
        ],
    )


def source_of_bad(incident: Incident) -> tuple[ResolvedSite, str, str] | None:
    """The first statement of the running functions that gave a variable a non-finite value though what it reads is finite."""
    found: list[tuple[int, int, ResolvedSite, str, str]] = []
    for depth, view in enumerate(incident.user_frames):
        for name, value in list(view.locals.items()):
            if name.startswith("__") or not _is_bad(value) or value.requires_grad:
                continue
            places = _assigned(view, name)
            divided = divided_by_zero(view, places[-1], name) if places else None
            if divided is not None:
                found.append((-depth, places[-1].line, divided, name, kinds(health(value))))
                continue
            for place in places:
                reads = place.statement_names
                if name in reads or any(_is_bad(_lookup(view, other)) for other in reads):
                    continue
                found.append((-depth, place.line, place, name, kinds(health(value))))
    if not found:
        return None
    first = min(found, key=lambda item: item[:2])
    return first[2], first[3], first[4]


def _is_bound_again(place: ResolvedSite, name: str) -> bool:
    """Whether a later statement of the same function gives the variable another value, made of the one before."""
    scope = place.enclosing_function or (place.source.tree if place.source is not None else None)
    later = [item for item in assignments_to(scope, name) if item.lineno > place.line] if scope is not None else []
    return any(node.id == name and isinstance(node.ctx, ast.Load) for item in later for node in inside(item, ast.Name))


def _lookup_table(incident: Incident) -> dict[str, Any]:
    """Names around the incident, the innermost frame's first."""
    table: dict[str, Any] = {}
    for view in incident.user_frames:
        for name, value in (*view.locals.items(), *view.globals.items()):
            table.setdefault(name, value)
    return table


def _assigned(view: FrameView, name: str) -> list[ResolvedSite]:
    scope = module_ast(view.frame.f_code.co_filename) if view.is_module_level else function_def(view.frame.f_code)
    if scope is None:
        return []
    places = (at_line(view.frame.f_code.co_filename, statement.lineno) for statement in assignments_to(scope, name))
    return [place for place in places if place is not None and place.statement is not None]


def _lookup(view: FrameView, name: str) -> Any:
    return lookup(view, name)


def _is_bad(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or plain(value) is None or value.numel() > 20_000_000:
        return False
    return health(value).nan > 0 if value.dim() else not health(value).finite
