"""One backward() in a loop, no step between its turns: their losses share a tensor that was made before the loop."""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.syntax import load
from gradguard.analysis.program.user_files import loaded_files
from gradguard.core.diagnosis import Fix
from gradguard.instrumentation.facts import BackwardFact
from gradguard.rules.lifetime import wording
from gradguard.rules.lifetime.second_backward import Study
from gradguard.torch_compat.private_api import node_sequence

_CALLS = ("backward", "manual_backward", "grad")


def are_turns(facts: Study) -> bool:
    """Whether the call that freed the graph and the failing one are turns at one call, before any optimizer has stepped."""
    first, call = facts.freed_by, facts.call
    if first is None or call is None or first.stack != call.stack:
        return False
    return not any(fact.clock > first.clock for fact in facts.incident.journal.steps)


def is_the_only_call(facts: Study) -> bool:
    """Whether the program has no other backward: what this loss were detached from would then be trained by nothing.

    A generator's batch in a loop over critics looks the same, but for the generator's own loss.
    """
    call = facts.call
    if call is None or facts.carrier is None or facts.carrier.store is None:
        return False
    helpers = _helpers(call, facts.carrier.store.function)
    files = dict.fromkeys((*(site.code.co_filename for site in call.stack), *loaded_files()))
    written: list[str] = []
    for file in files:
        source = load(file)
        if source is None or source.tree is None:
            if file in (site.code.co_filename for site in call.stack):
                return False
            continue
        written += [last_part(node) for node in inside(source.tree, ast.Call)]
    return sum(name in _CALLS for name in written) == 1 and all(written.count(name) == 1 for name in helpers)


def _helpers(call: BackwardFact, around: ast.AST | None) -> list[str]:
    """The functions on the way from the one that makes the shared tensor to the call: each may serve another loss as well."""
    found = []
    for site in call.stack:
        place = resolve(site)
        if place is None or place.enclosing_function is around:
            break
        found.append(site.code.co_name)
    return found


def turning_place(facts: Study) -> ResolvedSite | None:
    """Where the call stands in its loop: backward() itself, or the call of the helper that it stands in."""
    places = [] if facts.freed_by is None else [resolve(site) for site in facts.freed_by.stack]
    return next((place for place in places if place is not None and place.enclosing_loops), places[0] if places else None)


def story(facts: Study, name: str) -> tuple[str, str, list[Fix]]:
    """Headline, explanation and repairs.

    Args:
        name: the shared tensor, in backticks.
    """
    first = facts.freed_by
    words = wording.call_words(first)
    there = first is not None and all(node_sequence(root) < first.seq for root in facts.graph.roots)  # the losses: made already
    text = (
        f"The loss of each turn of the loop is computed from {name}, which was made before it. {words} freed the saved values of "
        f"everything below its loss, the part behind {name} included (backward call {first.index if first else '?'}); the next turn "
        "has to go through that part again."
    )
    fixes = [
        Fix(
            title="add the losses up and call backward() once, on their sum",
            safety="safe",
            detail="gradients add up just the same, and the common part is gone through once",
        )
    ]
    if not there:
        fixes.append(
            Fix(
                title=f"compute {name} in each turn, from that turn's part of the input",
                safety="manual",
                detail="where the turns are there to save memory: each then holds a graph of its own part only",
            )
        )
    fixes.append(Fix(title=f"pass retain_graph=True to {words} in all turns but the last, where they must stay apart", safety="manual"))
    return f"the loss of each turn goes through the graph of {name}, which the backward() of the first has freed", text, fixes
