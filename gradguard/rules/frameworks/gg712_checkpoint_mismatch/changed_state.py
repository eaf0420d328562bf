"""Python state that decides what a checkpointed function computes, and that has changed before backward runs it again. Part of GG712."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import short, site_at
from gradguard.analysis.places.source import ResolvedSite, function_def
from gradguard.analysis.program.expressions import inside, is_constant
from gradguard.analysis.program.index import Program, only, program_of
from gradguard.analysis.program.syntax import FUNCTIONS, Function
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import function_code, in_class, peek
from gradguard.monitors.checkpoints import Checkpointed, plain_state
from gradguard.rules import wording
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.drawn_anew import modules_of
from gradguard.rules.frameworks.gg712_checkpoint_mismatch.unchecked import UNCHECKED


class Changed(NamedTuple):
    """What has changed, and how.

    Attributes:
        text: the state as the function reads it.
        decides: where it decides what is computed.
        write: the one statement that can have changed it, where only one can.
        inside: whether that is the checkpointed function's own.
    """

    text: str
    before: Any
    now: Any
    decides: ResolvedSite
    write: ResolvedSite | None
    inside: bool


def changed_in(incident: Incident, function: Any) -> Changed | None:
    """The one value of Python's that is another now than when the function ran first, and that it branches on."""
    runs = incident.notes[Checkpointed].runs
    now = plain_state(function)
    found: dict[str, Changed] = {}
    for run in runs:
        if run.function != id(function) or run.step != incident.journal.step:
            continue
        for key, before in run.state.items():
            if key in now and (type(now[key]) is not type(before) or now[key] != before):
                for changed in _deciding(incident, function, key[1], before, now[key]):
                    found.setdefault(changed.text, changed)
    return only(list(found.values()))


def _deciding(incident: Incident, function: Any, name: str, before: Any, now: Any) -> Iterator[Changed]:
    for program, inner in _run_by(function):
        for node in inside(inner, ast.AST):
            read = next((read for test in _tests(node) for read in _reads(program, test, name)), None)
            if read is not None:
                decides = site_at(program.source, read)
                write, is_own = _write(incident, program, inner, name, now)
                yield Changed(short(program.source.flat(read), 40), before, now, decides, write, is_own)
                return


def _run_by(function: Any) -> Iterator[tuple[Program, Function]]:
    """The functions of the user's that run: the checkpointed one, its modules' forwards, and what these call in their files."""
    codes = [function_code(peek(function, "__func__", function))]
    codes += [function_code(in_class(type(module), "forward")) for module in modules_of(function)]
    seen: set[ast.AST] = set()
    for code in codes:
        tree = None if code is None else function_def(code)
        program = None if code is None else program_of(code.co_filename)
        if program is None or not isinstance(tree, FUNCTIONS):
            continue
        for each in (tree, *(inner for inner in program.may_run(tree) if isinstance(inner, FUNCTIONS))):
            if each not in seen:
                seen.add(each)
                yield program, each


def _tests(node: ast.AST) -> list[ast.expr]:
    """What decides at a node which way is taken, how often, or of which part."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [node.test]
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.iter]
    if isinstance(node, ast.comprehension):
        return [node.iter, *node.ifs]
    return [node.slice] if isinstance(node, ast.Subscript) else [node.subject] if isinstance(node, ast.Match) else []


def _reads(program: Program, test: ast.expr, name: str) -> Iterator[ast.expr]:
    """Where the value of a test depends on state of this name: an attribute, a variable from outside, or an item by its key."""
    for expression in program.slice(test).expressions:
        for node in inside(expression, ast.Name, ast.Attribute, ast.Subscript):
            if isinstance(node, ast.Name):
                found = node.id == name and not _is_local(program, node)
            elif isinstance(node, ast.Attribute):
                found = node.attr == name
            else:
                found = is_constant(node.slice, name)
            if found and isinstance(node.ctx, ast.Load):
                yield node


def _is_local(program: Program, read: ast.Name) -> bool:
    around = program.function(read)
    return any(definition.scope is around for definition in program.reaching(read))


def _write(incident: Incident, program: Program, function: Function, name: str, now: Any) -> tuple[ResolvedSite | None, bool]:
    """The statement that can have given it its value: the function's own, else the only one in the files that take part."""
    programs = {program.source.filename: program}
    programs.update((source.filename, known) for source in incident.sources if (known := program_of(source)) is not None)
    found: list[tuple[Program, ast.AST]] = [(each, node) for each in programs.values() for node in _writes(each, name, now)]
    runs = {function, *(each for each in program.may_run(function) if isinstance(each, FUNCTIONS))}
    own = [node for each, node in found if each is program and program.function(node) in runs]
    if own:
        node = only(own)
        return (None if node is None else site_at(program.source, node)), True
    one = only(found)
    return (None if one is None else site_at(one[0].source, one[1])), False


def _writes(program: Program, name: str, now: Any) -> Iterator[ast.AST]:
    """The places that write it, but for constructors, a class's or module's first value, and constants that it does not have now."""
    for write in program.writes(name, now):
        around = program.function(write.node)
        if getattr(around, "name", None) != "__init__":
            yield write.node
    for definition in program.definitions(name):
        value = definition.value
        other = definition.kind == "assign" and value is not None and not definition.path and not program.can_be(value, now)
        statement = program.source.statement(definition.node)
        if not other and statement is not None and definition.kind in ("assign", "augmented") and _is_shared(program, definition):
            yield statement
    for node, value in program.item_writes(name):
        if value is None or program.can_be(value, now):
            yield node


def _is_shared(program: Program, definition: Any) -> bool:
    """Whether another function than the one that binds a variable can read it: of the module, or of a function around."""
    return any(program.function(read) is not program.function(definition.node) for read in program.uses(definition))


def told(changed: Changed, again: ResolvedSite | None, code: str, name: str) -> Diagnosis:
    """The diagnosis; without a line where several may have changed it."""
    label = f"changes `{changed.text}`: the second run does not find the value that the first has found"
    culprit = None if changed.write is None else changed.write.statement_span(label, "culprit")
    before, now = short(repr(changed.before), 20), short(repr(changed.now), 20)
    how = "which it changes itself" if changed.inside else "which changes in between"
    return Diagnosis(
        code=code,
        name=name,
        headline=f"a checkpointed function did not do in backward what it did in forward: it depends on `{changed.text}`, {how}",
        culprit=culprit,
        related=wording.spans(
            changed.decides.span("decides what is computed", "saved"),
            None if again is None else again.span("backward runs the checkpointed function again", "backward"),
        ),
        explanation="`checkpoint` drops the activations and computes them anew in backward, from the arguments and from what the function "
        f"reads besides. `{changed.text}` was {before} when forward began, and is {now} after the second run has failed.",
        fixes=[
            Fix(
                title=f"Read `{changed.text}` before the checkpoint, pass it as an argument, and change it outside of the function",
                safety="manual",
            )
        ],
        avoid=[UNCHECKED],
        confidence="likely",
    )
