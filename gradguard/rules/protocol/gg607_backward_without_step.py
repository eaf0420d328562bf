"""# GG607 backward-without-step

## What it is
Backward calls fill the gradients of an optimizer's parameters, and the optimizer never steps.

## Why it is wrong
What it should train keeps its initial values. Another optimizer is stepped in its place, or the condition around `step()` is
never true (an accumulation longer than an epoch, whose counter starts anew with every epoch).

## Example
    critic_loss.backward()
    actor_optimizer.step()       # meant: critic_optimizer.step()

## Use instead
Step each optimizer once a training step; at the end of an epoch, step for what has been accumulated as well.

## Fix safety
Unsafe: it begins to train what was not trained.

## When it speaks, what silences it
At the third superfluous step of another optimizer while this one waits with new gradients and has never stepped; or at the
end (the optimizer is dropped, or the guard is left) after ten or more backward calls and no step, if none of its parameters was
written by anything. An optimizer that another one over the same parameters has replaced is silent.
"""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.index import Program, program_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.fixes.at_places import bare_call, put_after, sees
from gradguard.fixes.edits import replaced, respelt
from gradguard.monitors.ledger_verdicts import AnotherStepped, NoStepYet
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.spans import function_around, gate_of, named_not_called, names_in, statement_span

CODE, NAME = "GG607", "backward-without-step"


def recognise(incident: Incident) -> Diagnosis | None:
    """The optimizer that waits, and the line that steps another one or the condition that never holds."""
    finding = incident.finding
    book: Book = finding.book
    if book.last_part is None:
        return None
    if isinstance(finding, NoStepYet):
        _gather(incident, book)
        return None
    if isinstance(finding, AnotherStepped):
        _gather(incident, book)
        book.gathered["told"] = True
        return _instead(incident, book, finding.other)
    return None if "told" in book.gathered else _never(book)


def _gather(incident: Incident, book: Book) -> None:
    """Names, while the frames that know them are alive."""
    parameters = book.parameters()
    book.gathered["name"] = wording.optimizer_name(book, incident)
    book.gathered["parameters"] = wording.parameter_names(parameters, incident.names)
    book.gathered["roots"] = wording.roots_of(parameters, incident.names)
    book.gathered["facts"] = wording.facts(parameters, incident.names)
    book.gathered["count"] = len(parameters)


def _instead(incident: Incident, book: Book, other: Book) -> Diagnosis:
    name, stepped = book.gathered["name"], wording.optimizer_name(other, incident)
    roots = book.gathered["roots"]
    what = f"`{roots[0]}` is" if len(roots) == 1 else "its parameters are"
    backward = None if book.last_part is None else resolve(book.last_part.call.site)
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` never steps: after its backward `{stepped}.step()` is called a second time, and {what} not trained",
        culprit=wording.span(other.step_site, f"steps `{stepped}` again, on gradients it has already used; `{name}` waits", "culprit"),
        related=wording.spans(
            None if backward is None else backward.span(f"fills the gradients of `{name}`", "backward"),
            wording.span(book.made, f"`{name}` is made here", "declared"),
        ),
        tensors=book.gathered["facts"],
        explanation=(
            f"{book.filled} backward calls have filled {wording.listed(book.gathered['parameters'], book.gathered['count'])}, and "
            f"`{name}` has not stepped once. "
            f"At this line `{stepped}` applies gradients that its step before had applied already."
        ),
        fixes=[Fix(title=f"Call `{name}.step()` here", safety="unsafe", patch=_here(other, stepped, name))],
    )


def _here(other: Book, stepped: str, name: str) -> str | None:
    """The step of the one that waits, in the place of the second step of the other."""
    place = resolve(other.step_site)
    own = bare_call(place)
    if own is None or place is None or place.receiver != stepped or not sees(place, name):
        return None
    return replaced(own[0], [(own[1], f"{name}.step()")])


def _never(book: Book) -> Diagnosis | None:
    if "name" not in book.gathered or book.last_part is None:
        return None
    name = book.gathered["name"]
    backward = resolve(book.last_part.call.site)
    step, gate, culprit = _step_in_source(book, name)
    names = names_in(gate.test) if gate is not None else []
    condition = (
        f"the condition `{wording.short(ast.unparse(gate.test))}` around `{name}.step()` is never true"
        if gate is not None
        else (f"`{name}.step()` is never reached" if step is not None else f"nothing calls `{name}.step()`")
    )
    bare = None if step is not None else _without_parentheses(book, name)
    if bare is not None:
        condition, culprit = f"`{bare.text}` names the method and does not call it", bare
    if culprit is None and backward is not None:
        culprit = backward.span(f"fills gradients that no step of `{name}` uses", "culprit")
    counts = gate is not None and any(isinstance(node, ast.Mod) for node in ast.walk(gate.test))
    decides = f" (`{names[-1]}` decides)" if len(names) > 1 else ""
    restarts = f" A counter that starts anew with every epoch never gets to a number larger than the epoch{decides}." if counts else ""
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"`{name}` never steps in {book.filled} backward calls: {condition}",
        culprit=culprit,
        related=wording.spans(
            None if backward is None else backward.span(f"fills the gradients of `{name}`", "backward"),
            wording.span(book.made, f"`{name}` is made here", "declared"),
        ),
        tensors=book.gathered["facts"],
        explanation=(
            f"{book.filled} backward calls filled {wording.listed(book.gathered['parameters'], book.gathered['count'])}; none of "
            f"these parameters has changed since `{name}` "
            f"was made.{restarts}"
        ),
        fixes=[
            Fix(
                title="Count over epochs, or step at the end of the epoch as well"
                if counts
                else f"Let `{wording.short(ast.unparse(gate.test))}` be true wherever a step is due"
                if gate is not None
                else (f"Call `{name}.step()` after backward" if bare is None else f"Write `{bare.text}()`"),
                safety="unsafe",
                patch=None
                if counts or gate is not None
                else put_after(backward, f"{name}.step()")
                if bare is None
                else respelt(bare, bare.text or "", f"{bare.text}()"),
            )
        ],
    )


def _step_in_source(book: Book, name: str) -> tuple[ast.Call | None, ast.If | None, SourceSpan | None]:
    """The call that would step it, and the condition around it."""
    stack = () if book.last_part is None else book.last_part.call.stack
    around = [place for site in stack if (place := resolve(site)) is not None]  # these functions ran, and with them their conditions
    ran = [place.enclosing_function or (place.source and place.source.tree) for place in around]
    made = resolve(book.made)
    for place in (*around[:1], made):
        if place is None or place.source is None or place.source.tree is None:
            continue
        program = program_of(place.source)
        calls = [] if program is None else _steps(program, name, made)
        calls = [call for call in calls if any((function_around(place.source, call) or place.source.tree) is each for each in ran)]
        for call in calls:
            gate = gate_of(place.source, call)
            if gate is not None:
                return call, gate, statement_span(place.source, gate.test, "never true: the step below is never reached")
        if calls:
            return calls[0], None, statement_span(place.source, calls[0], "never reached")
    return None, None, None


def _steps(program: Program, name: str, made: ResolvedSite | None) -> list[ast.Call]:
    """The calls that step an optimizer: by its name, also as `go = optimizer.step; go()`, or of another name for what was made there."""
    named = program.calls(f"{name.rpartition('.')[2]}.step")
    others = [call for call in program.calls("step") if isinstance(call.func, ast.Attribute) and call not in named]
    return named + [call for call in others if made is not None and made.node in program.values(call.func.value)]  # type: ignore[attr-defined]


def _without_parentheses(book: Book, name: str) -> SourceSpan | None:
    """The one statement that is `optimizer.step`, without a call."""
    place = resolve(book.last_part.call.site) if book.last_part is not None else None
    if place is None or place.source is None or place.source.tree is None:
        return None
    return named_not_called(place.source, place.source.tree, "step", name)


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="gradients are made for an optimizer that never steps",
    recognise=recognise,
    moments=frozenset({"finding"}),
    severity="warning",
)
