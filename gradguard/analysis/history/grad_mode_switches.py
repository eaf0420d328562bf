"""Where grad mode was switched off: a `with` block, a decorator, a call that was never undone, a generator that yields inside."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch

from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, WithBlock, function_def, resolve
from gradguard.analysis.program.expressions import last_part
from gradguard.analysis.program.syntax import FUNCTIONS, Function, Source, load
from gradguard.core.callsite import USER_FILES, CallSite
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import peek, unless_loud
from gradguard.instrumentation.facts import Cut, ModeFact
from gradguard.instrumentation.journal import Journal

How = Literal["with", "decorator", "left_on", "yield", "checkpoint", "library", "caller"]
_CO_GENERATOR = 0x20 | 0x200


@dataclass(frozen=True)
class Switch:
    """A place that switched grad mode off.

    Attributes:
        how: a `with` block around the code; a decorator; a call that nothing undid; a generator that yields inside its
            block; a reentrant checkpoint, which runs its function without grad at first; inside another library function
            that the user's line calls; in the library that calls the user's function.
        text: what is written there, `torch.no_grad()`.
        owner: the decorated function (of a library: only where it is known), the generator, or what the block or call stands in.
        also: further places that belong to it, such as the `yield`.
        called: the user's call of a library's function that has it.
    """

    how: How
    span: SourceSpan
    text: str
    owner: str | None = None
    also: tuple[SourceSpan, ...] = ()
    called: ResolvedSite | None = None


def turns_grad_off(node: ast.expr) -> bool:
    """Whether an expression, as a `with` item, a decorator or a call, switches grad mode off."""
    call = node if isinstance(node, ast.Call) else None
    name = last_part(call.func if call is not None else node)
    if name in ("no_grad", "inference_mode"):
        return not (call is not None and call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value is False)
    if name in ("set_grad_enabled", "_set_grad_enabled", "set_grad_mode"):
        values = [*call.args, *(keyword.value for keyword in call.keywords)] if call is not None else []
        # a condition (`phase == "train"`) may well be off
        return bool(values) and not (isinstance(values[0], ast.Constant) and values[0].value is True)
    return False


def turns_grad_on(node: ast.expr) -> bool:
    call = node if isinstance(node, ast.Call) else None
    name = last_part(call.func if call is not None else node)
    if name == "enable_grad":
        return True
    return bool(
        name == "set_grad_enabled"
        and call is not None
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value is True
    )


def is_inference(text: str) -> bool:
    return "inference_mode" in text


def block_around(place: ResolvedSite | None) -> Switch | None:
    """The innermost `with` block around the place, or the decorator of its function, that decides grad mode, if it is off."""
    if place is None:
        return None
    for block in place.enclosing_withs():
        if turns_grad_on(block.node):
            return None
        if turns_grad_off(block.node):
            return Switch("with", _span(block), block.text, place.function if place.function != "<module>" else None)
    for block in place.decorators():
        if turns_grad_off(block.node):
            return Switch("decorator", _span(block), block.text, place.function)
    return None


def inference_around(place: ResolvedSite | None) -> Switch | None:
    """The innermost block or decorator that enters inference mode; grad mode may have been switched on again within."""
    if place is None:
        return None
    blocks = [("with", block) for block in place.enclosing_withs()] + [("decorator", block) for block in place.decorators()]
    for how, block in blocks:
        if turns_grad_off(block.node) and is_inference(block.text):
            owner = place.function if how == "decorator" or place.function != "<module>" else None
            return Switch("with" if how == "with" else "decorator", _span(block), block.text, owner)
    return None


def _span(block: WithBlock) -> SourceSpan:
    return block.span


def decorator_of(source: Source, function: Function) -> Switch | None:
    """The decorator of a function that switches grad mode off."""
    for node in getattr(function, "decorator_list", []):
        if turns_grad_off(node):
            site = site_at(source, node)
            return Switch("decorator", site.span(), source.flat(node), source.qualname(function))
    return None


class Quiet(NamedTuple):
    """A function that runs under a decorator of torch's: what is written there, what it is called, what it is bound to."""

    text: str
    owner: str
    bound: Any


def graded_off(callee: Any) -> Quiet | None:
    """Whether a live function is decorated with `no_grad` or `inference_mode`: the decorator keeps the context that it clones."""
    method = isinstance(callee, MethodType)
    bound, function = (unless_loud(callee.__self__), unless_loud(callee.__func__)) if method else (None, callee)
    while isinstance(function, FunctionType) and "__wrapped__" in function.__dict__:
        names = function.__code__.co_freevars
        cell = (function.__closure__ or ())[names.index("ctx_factory")] if "ctx_factory" in names else None
        factory = None if cell is None else unless_loud(cell.cell_contents)
        context = unless_loud(factory.__self__) if isinstance(factory, MethodType) else None
        if isinstance(context, (torch.no_grad, torch.inference_mode)) and peek(context, "mode", True):
            text = "torch.inference_mode()" if isinstance(context, torch.inference_mode) else "torch.no_grad()"
            return Quiet(text, function.__qualname__, bound)
        function = function.__dict__["__wrapped__"]
    return None


def of_cut(journal: Journal, cut: Cut) -> Switch | None:
    """What had switched grad mode off when a value lost its path."""
    place = resolve(cut.site)
    around = inference_around if cut.kind == "inference" else block_around
    near = around(place)
    if near is not None:
        return near
    for site in (*((cut.outer,) if cut.outer else ()), *cut.around):
        further = around(resolve(site))
        if further is not None:
            return as_decorator(further, place) or further
    if cut.kind == "inference":
        return None
    fact = switched_off_by(journal, cut.clock)
    return None if fact is None else of_fact(fact, cut.site)


def as_decorator(block: Switch, place: ResolvedSite | None) -> Switch | None:
    """A decorator of the user's own whose wrapper has the block in it, where the function around the place is decorated with it."""
    maker, inside, _ = (block.owner or "").partition(".<locals>.")
    if block.how != "with" or not inside or place is None:
        return None
    for each in place.decorators():
        made_by = each.node.func if isinstance(each.node, ast.Call) else each.node
        if last_part(made_by) == maker.rpartition(".")[2]:
            runs = block.span.model_copy(update={"label": f"runs what it decorates under `{block.text}`", "role": "declared"})
            return Switch("decorator", each.span, each.text, place.function, (runs,))
    return None


def switched_off_by(journal: Journal, clock: int) -> ModeFact | None:
    """The switch that turned grad mode off for good, before a clock reading: not the ends of blocks nested in it."""
    found: ModeFact | None = None
    inside_enable = False
    for fact in reversed(journal.modes):
        if fact.clock > clock:
            continue
        if inside_enable:
            inside_enable = False  # the entering of that `enable_grad`
            continue
        if fact.enabled:
            break
        if fact.via == "enable_grad":  # leaving it restored what was before
            inside_enable = True
            continue
        found = fact
    return found


def of_fact(fact: ModeFact, user: CallSite | None = None) -> Switch | None:
    """A recorded switch as a place in the source."""
    if fact.decorated is not None:
        function = function_def(fact.decorated)
        source = load(fact.decorated.co_filename)
        if function is not None and source is not None:
            found = decorator_of(source, function)
            called = resolve(user) if found is not None and not USER_FILES[source.filename] else None
            if found is not None and called is None:
                return found
            if found is not None and called is not None:  # a library's function is as it is: what the user wrote is the call, or is called
                if not torch.is_grad_enabled():  # under way
                    return Switch("caller", called.span(), found.text, called.function)
                at = resolve(fact.site) or called
                return Switch("library", at.span(), found.text, found.owner, called=at)
    place = resolve(fact.site)
    if place is None or place.source is None:
        return None
    if isinstance(place.statement, (ast.With, ast.AsyncWith)):
        for item in place.statement.items:
            if turns_grad_off(item.context_expr):
                site = site_at(place.source, item.context_expr)
                text = place.source.flat(item.context_expr)
                yields = _yields(place.statement)
                generator = fact.site is not None and bool(fact.site.code.co_flags & _CO_GENERATOR)
                if generator and yields and (user is None or fact.site is None or user.code is not fact.site.code):
                    also = tuple(
                        site_at(place.source, node).span("hands out control with grad mode still off", "carried") for node in yields[:2]
                    )
                    return Switch("yield", site.span(), text, place.function, also)
                return Switch("with", site.span(), text, place.function if place.function != "<module>" else None)
    node = place.node
    call = (
        node
        if isinstance(node, ast.Call)
        else next((item for item in ast.walk(place.statement) if isinstance(item, ast.Call)), None)
        if place.statement
        else None
    )
    if call is not None and turns_grad_off(call):
        return Switch(
            "left_on", site_at(place.source, call).span(), place.source.flat(call), place.function if place.function != "<module>" else None
        )
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "__enter__"
        and turns_grad_off(call.func.value)
    ):
        return Switch("left_on", place.span(), place.source.flat(call), place.function)
    checkpoint = (place.callee or "").rpartition(".")[2] in ("checkpoint", "checkpoint_sequential")
    return Switch("checkpoint" if checkpoint else "library", place.span(), place.text or "", None)


def _yields(block: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(block):
        if isinstance(child, FUNCTIONS):
            continue
        if isinstance(child, (ast.Yield, ast.YieldFrom)):
            found.append(child)
        found += _yields(child)
    return found


def _says_false(call: ast.Call) -> bool:
    """A mode that is restored (`set_grad_enabled(previous)`) is none that was left off."""
    return any(
        isinstance(value, ast.Constant) and value.value is False for value in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def left_off_in(sources: Iterable[Source]) -> list[Switch]:
    """Untraced: statements that switch grad mode off and leave it so, and generators that yield inside a block that does."""
    found = []
    for source in sources:
        if source.tree is None:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                call = node.value
                entered = isinstance(call.func, ast.Attribute) and call.func.attr == "__enter__" and turns_grad_off(call.func.value)
                if entered or (turns_grad_off(call) and _says_false(call)):
                    site = site_at(source, call)
                    found.append(Switch("left_on", site.span(), source.flat(call), site.function if site.function != "<module>" else None))
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    yields = _yields(node) if turns_grad_off(item.context_expr) else []
                    if yields:
                        site = site_at(source, item.context_expr)
                        also = tuple(
                            site_at(source, inner).span("hands out control with grad mode still off", "carried") for inner in yields[:2]
                        )
                        found.append(Switch("yield", site.span(), source.flat(item.context_expr), site.function, also))
    return found
