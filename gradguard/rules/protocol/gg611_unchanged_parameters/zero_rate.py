"""What has brought a learning rate to zero: a loaded state, a schedule that is at its end, a statement. Part of GG611."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.monitors.learning_rates import Schedule
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import the_one

_BETWEEN = 8  # steps between two looks at a rate, in long runs
Said = tuple[str, str]  # a rule's code and name


def loaded(book: Book, optimizer: str, step: SourceSpan | None, rule: Said) -> Diagnosis | None:
    """The rate has been zero ever since a state with that rate was loaded; None where it was not so."""
    rates = book.rates
    if rates.brought is None or book.steps - rates.brought[1] > rates.zero + _BETWEEN:
        return None
    given = rates.given if type(rates.given) in (int, float) and rates.given else None
    made = None if given is None else wording.span(book.made, f"made with a rate of {given:g}", "made")
    return Diagnosis(
        code=rule[0],
        name=rule[1],
        severity="warning",
        headline=f"the learning rate (lr) of `{optimizer}` has been zero since its state was loaded: no parameter changed in "
        f"{rates.zero} steps",
        culprit=wording.span(rates.brought[0], "brings the saved learning rate back, which is zero", "culprit"),
        related=wording.spans(made, step),
        explanation="`load_state_dict()` of an optimizer restores its `param_groups` too, rates included: what a schedule had ended with "
        f"takes the place of the rate that `{optimizer}` was made with.",
        fixes=[
            Fix(
                title=f"Set the rate after loading: `for group in {optimizer}.param_groups: group['lr'] = "
                + (f"{given:g}`" if given is not None else "...`"),
                safety="unsafe",
                detail="Before a scheduler is made, and `group['initial_lr']` with it. Or load the model alone, to train it anew.",
            )
        ],
    )


def run_out(book: Book, optimizer: str, schedule: Schedule, step: SourceSpan | None, rule: Said) -> Diagnosis:
    """A schedule has come to its end, and training goes on."""
    scheduler = wording.made_name(schedule.made) or schedule.type_name
    which = f"`{scheduler}`" if scheduler == schedule.type_name else f"`{scheduler}` ({schedule.type_name})"
    rates = book.rates
    return Diagnosis(
        code=rule[0],
        name=rule[1],
        severity="warning",
        headline=f"the learning rate (lr) of `{optimizer}` has been zero for {rates.zero} steps: no parameter changes any more",
        culprit=wording.span(schedule.made, f"has brought the rate to zero in {schedule.calls} calls of step()", "culprit"),
        related=wording.spans(wording.span(schedule.site, "steps the schedule", "context"), step),
        explanation=f"The rate was {rates.highest:g} before. {which} drives it, has been stepped {schedule.calls} times and is at its end: "
        "what comes after changes nothing.",
        fixes=[
            Fix(
                title=f"Make `{scheduler}` for as many calls of its step() as the whole training takes",
                safety="unsafe",
                detail="Or give it an end above zero (`eta_min`, `end_factor`), or begin a new schedule here with the rate set back.",
            )
        ],
    )


def written(incident: Incident) -> SourceSpan | None:
    """The one statement that writes a rate into parameter groups: where no scheduler is there, it has made it zero."""
    place = the_one(incident, lambda sources: ((source, node) for source in sources for node in _writes(source)))
    return None if place is None else place.statement_span("sets the rate, which is zero", "culprit")


def _writes(source: Source) -> Iterator[ast.stmt]:
    """Assignments to the item `lr` of a parameter group."""
    for node in ast.walk(source.tree or ast.Module([], [])):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(
                isinstance(target, ast.Subscript)
                and isinstance(target.slice, ast.Constant)
                and target.slice.value == "lr"
                and _is_group(source, target.value)
                for target in targets
            ):
                yield node


def _is_group(source: Source, node: ast.expr) -> bool:
    """Whether it is an item of `param_groups`, or the variable of a loop over them."""
    if isinstance(node, ast.Subscript):
        return (dotted(node.value) or "").endswith("param_groups")
    loops = (above for above in source.ancestors(node) if isinstance(above, ast.For))
    over = (
        loop
        for loop in loops
        if isinstance(node, ast.Name) and any(isinstance(n, ast.Name) and n.id == node.id for n in ast.walk(loop.target))
    )
    return any(isinstance(each, ast.Attribute) and each.attr == "param_groups" for loop in over for each in ast.walk(loop.iter))
