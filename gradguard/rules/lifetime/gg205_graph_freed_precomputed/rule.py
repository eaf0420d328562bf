"""# GG205 graph-freed-precomputed

## What it is
Something was computed from trainable parameters once (before the loop, in `__init__`, into a cache, outside a closure) and is
used in every step. The first backward() that went through it freed its graph.

## Why it is wrong
The value is stale from the first optimizer.step() on: it belongs to parameters that are no more. And there is one graph for
it, good for one backward.

## Example
    basis = torch.exp(log_width)
    for inputs, targets in loader:
        loss = criterion(head(inputs * basis), targets)
        loss.backward()

## Use instead
    for inputs, targets in loader:
        basis = torch.exp(log_width)
        loss = criterion(head(inputs * basis), targets)
        loss.backward()

## Fix safety
Computing it in each step is what training the parameters behind it means. If they are not to be trained, compute it once
under `torch.no_grad()`. `retain_graph=True` would go on with values of old parameters, or fail with the in-place error.

## When it speaks, what silences it
When backward() fails on a freed graph that was made before the last call of this same backward, and what carries it is not
made anew: an attribute set in a constructor or a cache, a variable set before the loop, a `parametrize.cached()` held open. Also
when that graph is whole still and backward() fails in it on weights that optimizer.step() has changed since.
"""

from __future__ import annotations

import ast

from gradguard.analysis.graph.walk import leaves, walk
from gradguard.analysis.history.carried_graphs import Carrier, called_in
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.live.optimizer_contents import trained_by
from gradguard.analysis.live.stores import Store
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import Definition, Program, only, program_of
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.rules.base import Rule
from gradguard.rules.lifetime import kept_by_retain_graph, wording
from gradguard.rules.lifetime.detaching import kept_detached
from gradguard.rules.lifetime.gg205_graph_freed_precomputed.caching import (
    CachedBlock,
    cached_parametrization,
    memoized,
    opened_in_loop,
    plain_property,
)
from gradguard.rules.lifetime.moving import comes_with_data, computed_each_time
from gradguard.rules.lifetime.second_backward import MESSAGES, Study, study

AVOID = (
    "retain_graph=True would keep using values made from parameters that "
    "optimizer.step() {changes}: the gradient would be that of old "
    "parameters, or the next error the in-place one"
)


def recognise(incident: Incident) -> Diagnosis | None:
    if incident.says(kept_by_retain_graph.CHANGED):
        return kept_by_retain_graph.recognise_precomputed(incident, RULE.code, RULE.name)
    facts = study(incident)
    if facts is None or facts.cause != "precomputed" or facts.carrier is None:
        return None
    carrier = facts.carrier
    block = cached_parametrization(facts)
    name = block.text if block is not None else _name(facts, carrier)
    culprit, where = _culprit(facts, carrier, block)
    behind = _parameters(facts, carrier)
    used = (" used again" if facts.previous is not None else " used") + " by this backward()"
    explanation = (
        f"{name} was computed once, {where}, with its graph{behind}. The graph's saved values "
        f"were freed {wording.freed_words(facts)}, and {'what it holds' if block else 'it'} is"
        f"{used}. One graph is good for one backward; a new step needs a new one."
    )
    related = [
        *wording.made_span(
            facts, carrier, "made here once, then taken from the cache" if memoized(carrier) else "the tensor was made here"
        ),
        *wording.entry_span(facts, carrier, "used again here"),
        *wording.freed_span(facts),
        *wording.backward_span(facts),
    ]
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        headline=f"{name} {'keeps' if block else 'was computed once and keeps'} a graph that the first backward() through it has freed",
        culprit=culprit,
        related=wording.without_repeats(culprit, related),
        tensors=wording.tensor_facts(None, carrier.tensor, carrier.link.source) if block else wording.carrier_facts(carrier),
        explanation=explanation,
        notes=wording.notes(facts, carrier),
        fixes=_fixes(facts, carrier, block, name),
        avoid=[AVOID.format(changes="has changed since" if _stepped(facts, carrier) else "is to change")],
        confidence=wording.confidence(facts, carrier),
    )


def _stepped(facts: Study, carrier: Carrier) -> bool:
    """Whether an optimizer has stepped since the value was made."""
    return any(fact.seq > carrier.link.seq for fact in facts.incident.journal.steps)


def _name(facts: Study, carrier: Carrier) -> str:
    function = memoized(carrier)
    return f"the cached result of `{function.name}`" if function is not None else wording.holder_name(carrier)


def _culprit(facts: Study, carrier: Carrier, block: CachedBlock | None) -> tuple[SourceSpan | None, str]:
    if block is not None:
        return block.span, "and kept for all steps inside this block"
    function = memoized(carrier)
    if function is not None:
        return function.span, f"by the memoized function `{function.name}`"
    store = carrier.store
    before = "in an earlier step" if _stepped(facts, carrier) else "before the backward() that freed it"
    where = {"cache": "into a cache", "init": "in the constructor", "outside": "before the loop", "fresh": "outside what is repeated"}.get(
        store.relation if store else "", before
    )
    if store is not None and carrier.made is not None and _only_fetches(store, carrier.made):
        where = before if store.relation == "outside" else where
        return carrier.made.statement_span("computed with its graph, and kept", "culprit"), where
    if (
        store is not None
        and carrier.made is not None
        and carrier.holding is not None
        and carrier.holding.through
        and not store.covers(carrier.made)
        and _is_plain(carrier)
    ):
        return carrier.made.statement_span(f"computed once, {where}, with its graph", "culprit"), where
    if store is not None:
        function_name = store.function_name
        where += f" (`{function_name}`)" if store.relation in ("cache", "init") and function_name != "<module>" else ""
        return _where_bound(store, carrier).span("computed once, with its graph, and used again"), where
    if carrier.made is not None:
        return carrier.made.statement_span("computed once, with its graph", "culprit"), before
    return None, before


def _where_bound(store: Store, carrier: Carrier) -> Store:
    """The statement that binds the value: the store, or one in the function that gave it, which did no more than return it."""
    program = program_of(store.source)
    origin = None if program is None or carrier.name is None else only(program.origins(store.statement, carrier.name))
    return store if origin is None or isinstance(origin, ast.Return) else Store(store.source, origin, store.relation)


def _only_fetches(store: Store, made: ResolvedSite) -> bool:
    """Whether a statement takes out what was made before it, elsewhere in the file: nothing that it calls leads to where it was made."""
    function = (made.function or "").rpartition(".")[2]
    tree = store.source.tree
    if store.value is None or tree is None or made.file != store.file or not function or function in ("forward", "<module>"):
        return False
    if made.function == store.function_name:
        return False
    called = called_in(store.value)
    if not called and isinstance(store.value, (ast.Name, ast.Attribute)):
        return True  # only read: what has a graph by now was given it later
    program = program_of(store.source)
    bodies: list[ast.AST] = [store.value]
    for _ in range(4):
        if program is not None and any(_runs_a_module(program, call) for body in bodies for call in inside(body, ast.Call)):
            called.add("forward")
        bodies = [node for node in store.source.scopes if isinstance(node, FUNCTIONS) and getattr(node, "name", "") in called]
        called = called.union(*map(called_in, bodies))
    return bool(called) and function not in called


def _runs_a_module(program: Program, call: ast.Call) -> bool:
    """Whether a call may be that of a module: of what a function was given, or of an object."""
    if isinstance(call.func, ast.Attribute):
        return False
    values = program.values(call.func)
    return any(not isinstance(each, Definition) or each.kind == "parameter" for each in values)


def _is_plain(carrier: Carrier) -> bool:
    """Whether the tensor was made by a statement of its own, not inside a module's forward."""
    return carrier.made is not None and bool(carrier.made.targets) and not (carrier.made.function or "").endswith(".forward")


def _parameters(facts: Study, carrier: Carrier) -> str:
    names = []
    for leaf in leaves([carrier.link.source]):
        name = facts.incident.names.leaf(leaf)
        if name is not None and name not in names:
            names.append(name)
    return f" (it leads to {short_list(names, 4)})" if names else ""


def _fixes(facts: Study, carrier: Carrier, block: CachedBlock | None, name: str) -> list[Fix]:
    if block is not None:
        title = f"open `{block.code}` inside the loop, around one step's forward and backward"
        return [Fix(title=title, safety="safe", patch=opened_in_loop(block))]
    function = memoized(carrier)
    if function is not None and function.decorator is not None:
        return [
            Fix(
                title=f"take `@{function.decorator}` off `{function.name}`: what is made from parameters is good for one step",
                safety="unsafe",
                detail="what does not depend on parameters can be cached in a function of its own",
            )
        ]
    if carrier.store is not None and (plain := plain_property(carrier.store)) is not None:
        return [plain]
    closure = next(
        (
            view.code_name
            for view in facts.incident.user_frames[:1]
            if view.code_name != "<module>" and carrier.store is not None and carrier.store.relation == "fresh"
        ),
        None,
    )
    title = (
        f"compute {name} inside `{closure}`, which is called several times"
        if closure
        else f"compute {name} anew in each step, from the parameters as they are then"
    )
    constant = _constant(facts, carrier, name)
    if constant is not None:
        return [constant.model_copy(update={"safety": "unsafe", "patch": kept_detached(carrier)}), Fix(title=title, safety="manual")]
    patch = None if carrier.store is None else computed_each_time(facts, carrier.store)
    return [
        Fix(title=title, safety="safe" if patch else "manual", patch=patch),
        Fix(
            title=f"if the parameters behind {name} are not to be trained, compute it under `torch.no_grad()` or `.detach()` it",
            safety="unsafe",
        ),
    ]


def _constant(facts: Study, carrier: Carrier, name: str) -> Fix | None:
    """What to do with a value that is a constant of the losses, as far as what ran tells."""
    anew = _is_reached_anew(facts, carrier)
    if anew and carrier.store is not None and comes_with_data(facts, carrier.store):
        return Fix(
            title=f"keep {name} without its graph: `.detach()` it where it is kept",
            detail="it belongs to data that was made once; what the loss is to train it reaches by what is computed anew",
        )
    if anew and _is_a_probability(carrier):
        return Fix(
            title=f"keep {name} without its graph: compute it under `torch.no_grad()`, or `.detach()` it where it is kept",
            detail="the log-probability of the policy that acted is a constant of the ratio",
        )
    if _untrained(facts, carrier):
        return Fix(
            title=f"compute {name} under `torch.no_grad()`, or `.detach()` it: no optimizer trains what is behind it",
            detail="a constant can be used in as many losses as wanted",
        )
    return None


def _untrained(facts: Study, carrier: Carrier) -> bool:
    """Whether optimizers are known, and none of them trains a parameter that the value was computed from: target networks, a teacher."""
    behind = {id(leaf) for leaf in leaves([carrier.link.source])}
    optimizers = facts.incident.names.optimizers()
    return bool(behind) and bool(optimizers) and not any(behind & trained_by(optimizer) for optimizer in optimizers)


def _is_a_probability(carrier: Carrier) -> bool:
    """A log-probability: one that was taken once is what PPO and its kin compare with."""
    callee = carrier.made.callee if carrier.made is not None else None
    return callee is not None and callee.rpartition(".")[2] == "log_prob"


def _is_reached_anew(facts: Study, carrier: Carrier) -> bool:
    """Whether the same loss reaches all parameters behind the value by what is computed anew as well."""
    behind = {id(leaf) for leaf in leaves([carrier.link.source])}
    old = facts.graph.below(carrier.link.source)
    anew = {
        id(leaf)
        for node, _ in walk(facts.graph.roots)
        if (leaf := getattr(node, "variable", None)) is not None and any(user not in old for user, _ in facts.graph.users.get(node, ()))
    }
    return bool(behind) and behind <= anew


RULE = Rule(
    code="GG205",
    name="graph-freed-precomputed",
    recognise=recognise,
    priority=50,
    messages=(*MESSAGES, kept_by_retain_graph.CHANGED),
    summary="a value computed once from parameters (before the loop, in __init__, in a cache) is used in every step",
)
