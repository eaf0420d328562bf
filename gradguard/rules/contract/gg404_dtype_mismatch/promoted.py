"""Where along a tensor's graph it came by its dtype: an operation between two dtypes gives the wider one, and goes on without a word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gradguard.analysis.graph.walk import is_accumulate
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, assignments_to
from gradguard.analysis.program.provenance import Judge, Maker
from gradguard.analysis.program.scopes import Scope, function_scope
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.core.callsite import CallSite
from gradguard.core.safe_read import function_code, in_class, modules_in
from gradguard.rules.contract.operands import Operand, odd_operand, scope_at
from gradguard.torch_compat.private_api import grad_fn_of, node_sequence, output_dtype

_NODES = 20_000


class Entered(NamedTuple):
    """The operation that gave a tensor its dtype, and that one of its operands which had it before."""

    place: ResolvedSite
    operand: Operand


def entered(incident: Incident, value: torch.Tensor, wrong: frozenset[torch.dtype], judge: Judge, maker: Maker) -> Entered | None:
    """The first operation of a tensor's graph whose result has the dtype while no operand with a graph had it."""
    first = _first(grad_fn_of(value), wrong)
    site = None if first is None else incident.site_of_node(node_sequence(first))
    place = None if first is None else incident.place_of_node(node_sequence(first))
    node = None if place is None else place.node or place.statement
    if site is None or place is None or node is None:
        return None
    for scope in _scopes(incident, site, place):
        operand = odd_operand(scope, node, judge, maker)
        if operand is not None and (operand.value is not None or operand.way.certain):
            return Entered(place, operand)
    return None


def _first(node: Any, wrong: frozenset[torch.dtype]) -> Any:
    """The oldest node with such a result that got it from no other node."""
    if node is None or output_dtype(node) not in wrong:
        return None
    pending, seen, found = [node], {node}, []
    while pending and len(seen) < _NODES:
        node = pending.pop()
        sources = [each for each, output in node.next_functions if each is not None and output_dtype(each, output) in wrong]
        if not sources or any(map(is_accumulate, sources)):
            found.append(node)
        for source in sources:
            if source not in seen and not is_accumulate(source):
                seen.add(source)
                pending.append(source)
    return min(found, key=node_sequence, default=None)


def _still(scope: Scope, name: str, line: int) -> bool:
    """Whether a variable of a running function has the value that it had at a line: it was given one before, and no other."""
    given = assignments_to(scope.tree, name)
    return not given or (len(given) == 1 and given[0].lineno < line)


def _scopes(incident: Incident, site: CallSite, place: ResolvedSite) -> list[Scope]:
    """The function that ran the operation, with what is known of its variables: of a method, with each live module that has it."""
    known = scope_at(incident, place)
    if known is not None and (known.values or not isinstance(known.tree, FUNCTIONS)):
        then = {name: value for name, value in known.values.items() if _still(known, name, place.line)}
        return [replace(known, values=then)]
    owners = {
        id(module): module
        for _, root in incident.names.modules
        for module in modules_in(root)
        if function_code(in_class(type(module), site.code.co_name)) is site.code
    }
    found = [function_scope(site.code, owner, known.globals if known is not None else {}) for owner in owners.values()]
    return [scope for scope in found if scope is not None] or ([known] if known is not None else [])
